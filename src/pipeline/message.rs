//! What goes through the channels. Every message carries its claim, so that every claim finds its outcome.

use std::sync::Arc;

use ndarray::Array4;

use super::budget::Reservation;
use crate::geometry::{Placement, Size};
use crate::model;
use crate::pixels::picture;
use crate::pixels::tensor::Placed;
use crate::row::{Claim, FileStamp, Finished, ImageFacts, ImageId, Outcome, Raw, Region, RowError};

/// From `decode` to `detect`: an upright picture and its tensor.
pub struct Decoded {
    /// The row.
    pub claim: Claim,
    /// What decoding learned.
    pub facts: ImageFacts,
    /// The upright picture; `crop` takes its pieces from it.
    pub pixels: picture::Picture,
    /// `[3, height, width]` of the detector's input, flat.
    pub tensor: Vec<f32>,
    /// Width and height of the tensor.
    pub size: Size,
    /// Where the picture lies in the tensor.
    pub placed: Placed,
    /// Host memory of all of this.
    pub held: Reservation,
}

/// To `crop`: a picture and where to look in it.
pub struct Located {
    /// The row.
    pub claim: Claim,
    /// What decoding learned.
    pub facts: ImageFacts,
    /// The upright picture.
    pub pixels: picture::Picture,
    /// Where to look.
    pub found: Origin,
    /// Host memory of all of this.
    pub held: Reservation,
}

/// Where the regions of a picture come from.
pub enum Origin {
    /// The detector's word in input pixels, not yet selected.
    Raw(model::Found, Placement),
    /// Regions that an earlier `detect` stored.
    Stored(Vec<Region>),
    /// No detector: the whole image.
    Whole,
}

/// From `crop` to `embed`: crops of several images, and the images whose first crop is among them.
pub struct EmbedBatch {
    /// Images that begin in this batch.
    pub opened: Vec<Opened>,
    /// One per row of `tensor`.
    pub slots: Vec<Slot>,
    /// `[n, 3, height, width]` of the embedder's input.
    pub tensor: Array4<f32>,
}

/// An image whose regions are being embedded.
pub struct Opened {
    /// The row.
    pub claim: Claim,
    /// What decoding learned.
    pub facts: ImageFacts,
    /// What they were selected from, where `detect` ran.
    pub raw: Option<Raw>,
    /// All its regions; at least one of them waits for its vector.
    pub regions: Vec<Region>,
}

/// Which region a row of the tensor is.
pub struct Slot {
    /// The image.
    pub image: ImageId,
    /// Index into its regions.
    pub region: usize,
    /// Why the row holds nothing.
    pub error: Option<RowError>,
}

/// A picture that several crops share; its memory is given back with the last of them.
pub struct Picture {
    /// The upright picture.
    pub pixels: picture::Picture,
    /// Its host memory.
    #[expect(dead_code, reason = "held until the last crop drops it")]
    pub held: Reservation,
}

/// One crop to be made.
pub struct Piece {
    /// What to cut from.
    pub picture: Arc<Picture>,
    /// Which region it will be.
    pub slot: Slot,
    /// Where to cut, in pixels of the picture.
    pub bbox: crate::geometry::BoxPx,
}

/// The outcome of `claim`, with what is known of its file.
pub fn finished(claim: &Claim, facts: Option<ImageFacts>, outcome: Outcome) -> Finished {
    let stamp = facts.as_ref().map(|f| f.stamp);
    Finished { id: claim.id, token: claim.token, stage: claim.stage, facts, stamp, outcome }
}

/// A file that could not be decoded; looked at once more for its size and time.
pub fn failed(claim: &Claim, error: RowError) -> Finished {
    let stamp = std::fs::metadata(&claim.path).ok().map(|m| FileStamp::of(&m));
    Finished { stamp, ..finished(claim, None, Outcome::Failed(error)) }
}
