//! What goes through the channels. Every message carries its claim or its image, so that every claim finds its outcome.

use super::budget::Reservation;
use crate::geometry::{Placement, Size};
use crate::model;
use crate::pixels::header::Probed;
use crate::pixels::picture::Picture;
use crate::pixels::tensor::Placed;
use crate::row::{Claim, FileStamp, Finished, ImageFacts, ImageId, Lost, Outcome, Raw, Region, RowCode, RowError};

/// From `decode` to `detect`: an upright picture and its tensor.
pub struct Decoded {
    /// The picture and what is known of it.
    pub image: Image,
    /// `[3, height, width]` of the detector's input, flat.
    pub tensor: Vec<f32>,
    /// Width and height of the tensor.
    pub size: Size,
    /// Where the picture lies in the tensor.
    pub placed: Placed,
}

/// An image on its way.
pub struct Image {
    /// The row.
    pub claim: Claim,
    /// What decoding learned; `None` where nothing was decoded yet.
    pub facts: Option<ImageFacts>,
    /// The file, to be decoded once more for small regions.
    pub probed: Probed,
    /// The upright picture; `None` where all of its regions need another scale.
    pub picture: Option<Picture>,
    /// What a second decode may need, in bytes; 0 where there will be none.
    pub again_bytes: u64,
    /// Host memory of all of this, and of the second decode.
    pub held: Reservation,
}

impl Image {
    /// Gives back what is not needed any more once the detector's tensor is gone.
    pub fn shrink(&mut self) {
        let picture = self.picture.as_ref().map_or(0, Picture::bytes);
        self.held.shrink_to(picture + self.again_bytes);
    }
}

/// To `crop`: a picture and where to look in it.
pub struct Located {
    /// The picture and what is known of it.
    pub image: Image,
    /// Where to look.
    pub found: Origin,
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

/// From `crop` to `embed`: one region as a tensor.
pub struct Crop {
    /// The image.
    pub image: ImageId,
    /// Index into its regions.
    pub region: usize,
    /// `[3, height, width]` of the embedder's input, flat; or why there is none.
    pub tensor: Result<Vec<f32>, NoCrop>,
}

/// A row that fails, unless it is not to blame.
#[derive(Clone, Debug)]
pub struct Refused {
    /// What is wrong.
    pub error: RowError,
    /// Why that may not be the file's fault.
    pub lost: Option<Lost>,
}

impl From<RowError> for Refused {
    fn from(error: RowError) -> Self {
        Self { error, lost: None }
    }
}

/// Why a region has no tensor.
#[derive(Clone, Debug)]
pub enum NoCrop {
    /// The row fails.
    Refused(Refused),
    /// The row begins anew: its regions are those of another picture.
    FileChanged,
}

impl From<RowError> for NoCrop {
    fn from(error: RowError) -> Self {
        Self::Refused(error.into())
    }
}

/// An image whose regions are being embedded.
pub struct Opened {
    /// The row.
    pub claim: Claim,
    /// What decoding learned.
    pub facts: Option<ImageFacts>,
    /// What they were selected from, where `detect` ran.
    pub raw: Option<Raw>,
    /// All its regions; at least one of them waits for its vector.
    pub regions: Vec<Region>,
}

/// The outcome of `claim`, with what is known of its file.
pub fn finished(claim: &Claim, facts: Option<ImageFacts>, outcome: Outcome) -> Finished {
    let stamp = facts.as_ref().map(|f| f.stamp);
    Finished { id: claim.id, token: claim.token, stage: claim.stage, facts, stamp, lost: None, outcome }
}

/// A file that could not be decoded; looked at once more for its size and time. Not where all around it is gone, nor where
/// a thread hangs in it: this one would, too.
pub fn failed(claim: &Claim, refused: Refused) -> Finished {
    let Refused { error, lost } = refused;
    let stamp = match (error.code, &lost) {
        (RowCode::TimedOut, _) => claim.seen,
        (_, Some(_)) => None,
        (_, None) => std::fs::metadata(&claim.path).ok().map(|m| FileStamp::of(&m)),
    };
    Finished { stamp, lost, ..finished(claim, None, Outcome::Failed(error)) }
}
