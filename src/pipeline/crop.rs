//! `select + crop`: detections to regions, regions to crops, crops of several images to full batches.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use ndarray::Array4;
use rayon::prelude::*;

use super::crop_file::write_crop;
use super::message::{EmbedBatch, Located, Opened, Origin, Picture, Piece, Slot, finished};
use super::progress::Place;
use super::{Job, Shapes};
use crate::candidate::{Candidate, Kept};
use crate::error::Error;
use crate::geometry::{BoxPx, Placement, Size};
use crate::model;
use crate::model::boxes::regions_of;
use crate::pixels::tensor;
use crate::recipe::{ImageInput, Selection};
use crate::row::{Finished, ImageId, Outcome, Raw, Region};

/// Where crops go.
pub(super) struct Exits {
    pub(super) embed: Option<Sender<EmbedBatch>>,
    pub(super) commit: Sender<Finished>,
}

/// Works until `located` is closed. A partial batch goes when no more images are waiting.
pub(super) fn run(job: &Job<'_>, shapes: &Shapes, located: &Receiver<Located>, exits: &Exits) -> Result<(), Error> {
    let mut gathering = Gathering::default();
    loop {
        let next = match located.try_recv() {
            Ok(next) => next,
            Err(TryRecvError::Empty) => {
                gathering.flush(job, shapes, exits);
                match located.recv() {
                    Ok(next) => next,
                    Err(_) => return Ok(()),
                }
            }
            Err(TryRecvError::Disconnected) => {
                gathering.flush(job, shapes, exits);
                return Ok(());
            }
        };
        if !job.stop.is_ending() {
            open(job, shapes, next, &mut gathering, exits)?;
        }
    }
}

/// Crops that wait for a full batch.
#[derive(Default)]
struct Gathering {
    opened: Vec<Opened>,
    pieces: Vec<Piece>,
}

impl Gathering {
    fn flush(&mut self, job: &Job<'_>, shapes: &Shapes, exits: &Exits) {
        let (Some(shape), Some(embed)) = (&shapes.embed, &exits.embed) else { return };
        if self.pieces.is_empty() {
            return;
        }
        let pieces = std::mem::take(&mut self.pieces);
        let (slots, tensor) = job.pool.install(|| job.progress.timed(Place::Decode, || cut(pieces, shape)));
        // A closed channel means that the run is ending; the rows are released.
        let _ = embed.send(EmbedBatch { opened: std::mem::take(&mut self.opened), slots, tensor });
    }
}

/// Makes the crops of a batch. Each picture is given back with its last piece.
fn cut(pieces: Vec<Piece>, input: &ImageInput) -> (Vec<Slot>, Array4<f32>) {
    let each = 3 * input.size.pixels() as usize;
    let mut values = vec![0.0; pieces.len() * each];
    let rows = pieces.len();
    let slots = pieces
        .into_par_iter()
        .zip(values.par_chunks_exact_mut(each))
        .map(|(Piece { picture, mut slot, bbox }, out)| {
            slot.error = tensor::fill(&picture.pixels, bbox, input, out).err();
            slot
        })
        .collect();
    let shape = (rows, 3, input.size.height_px as usize, input.size.width_px as usize);
    let tensor = Array4::from_shape_vec(shape, values).unwrap_or_else(|_| Array4::zeros(shape));
    (slots, tensor)
}

fn open(
    job: &Job<'_>,
    shapes: &Shapes,
    located: Located,
    gathering: &mut Gathering,
    exits: &Exits,
) -> Result<(), Error> {
    let Located { claim, facts, pixels, found, held } = located;
    let (raw, mut regions) = match (found, &job.config.detect) {
        (Origin::Stored(regions), _) => (None, regions),
        (Origin::Raw(found, placement), Some(config)) => {
            let (raw, regions) = to_regions(found, placement, &config.selection, facts.upright)?;
            (Some(raw), regions)
        }
        (Origin::Whole | Origin::Raw(..), _) => (None, vec![Region::whole(facts.upright)]),
    };
    if let Some(folder) = &job.config.crops {
        job.pool.install(|| {
            regions.par_iter_mut().try_for_each(|region| -> Result<(), Error> {
                region.crop = write_crop(folder, &claim, region, &pixels)?;
                Ok(())
            })
        })?;
    }
    if shapes.embed.is_none() || regions.iter().all(|r| r.embedded) {
        let embed = shapes.embed.as_ref().map(|_| Ok(()));
        let _ = exits.commit.send(finished(&claim, Some(facts), Outcome::Done { raw, regions, embed }));
        return Ok(());
    }
    let id: ImageId = claim.id;
    let picture = Arc::new(Picture { pixels, held });
    let wanting = regions.iter().enumerate().filter(|(_, r)| !r.embedded);
    let boxes: Vec<(usize, BoxPx)> = wanting.map(|(place, r)| (place, r.bbox)).collect();
    gathering.opened.push(Opened { claim, facts, raw, regions });
    for (region, bbox) in boxes {
        let slot = Slot { image: id, region, error: None };
        gathering.pieces.push(Piece { picture: Arc::clone(&picture), slot, bbox });
        if gathering.pieces.len() >= shapes.embed_batch {
            gathering.flush(job, shapes, exits);
        }
    }
    Ok(())
}

/// What is kept of `found`, and the regions that the rule makes of what is kept: of the stored, rounded values, so
/// that selecting again later gives the same.
fn to_regions(
    found: model::Found,
    placement: Placement,
    rule: &Selection,
    upright: Size,
) -> Result<(Raw, Vec<Region>), Error> {
    let model::Found { candidates, vocabulary } = found;
    let in_image = candidates.into_iter().map(|c| Candidate { bbox: placement.to_image(c.bbox), ..c }).collect();
    let kept = Kept::of(in_image, vocabulary.naming, upright);
    let regions = regions_of(&kept.packed, &vocabulary, rule, upright)?;
    Ok((Raw { kept, vocabulary }, regions))
}
