//! `select + crop`: detections to regions, regions to crops, crops of several images to full batches.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use ndarray::Array4;
use rayon::prelude::*;

use super::crop_file::write_crop;
use super::message::{EmbedBatch, Found, Located, Opened, Picture, Piece, Slot, finished};
use super::progress::Place;
use super::{Job, Shapes};
use crate::config::DetectConfig;
use crate::error::Error;
use crate::geometry::{BoxPx, Placement, Size};
use crate::model::boxes::select;
use crate::pixels::tensor;
use crate::recipe::{ImageInput, OnEmpty};
use crate::row::{Detection, Finished, ImageId, Outcome, Region};

/// Boxes with a shorter side are no regions.
const MIN_SIDE_PX: f32 = 1.0;

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
    let mut values = vec![0.0; pieces.len() * input.values()];
    let rows = pieces.len();
    let slots = pieces
        .into_par_iter()
        .zip(values.par_chunks_exact_mut(input.values()))
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
    let mut regions = match found {
        Found::Stored(regions) => regions,
        Found::Whole => vec![whole(facts.upright)],
        Found::Detections(detections, placement) => match &job.config.detect {
            Some(config) => to_regions(detections, placement, config, &shapes.labels, facts.upright),
            None => Vec::new(),
        },
    };
    if let Some(folder) = &job.config.crops {
        job.pool.install(|| {
            regions.par_iter_mut().try_for_each(|region| -> Result<(), Error> {
                region.crop = write_crop(folder, &claim, region, &pixels)?;
                Ok(())
            })
        })?;
    }
    if shapes.embed.is_none() || regions.is_empty() {
        let embed = shapes.embed.as_ref().map(|_| Ok(()));
        let _ = exits.commit.send(finished(&claim, Some(facts), Outcome::Done { regions, embed }));
        return Ok(());
    }
    let id: ImageId = claim.id;
    let picture = Arc::new(Picture { pixels, held });
    let boxes: Vec<BoxPx> = regions.iter().map(|r| r.bbox).collect();
    gathering.opened.push(Opened { claim, facts, regions });
    for (region, bbox) in boxes.into_iter().enumerate() {
        let slot = Slot { image: id, region, error: None };
        gathering.pieces.push(Piece { picture: Arc::clone(&picture), slot, bbox });
        if gathering.pieces.len() >= shapes.embed_batch {
            gathering.flush(job, shapes, exits);
        }
    }
    Ok(())
}

fn whole(size: Size) -> Region {
    Region { bbox: BoxPx::whole(size), label: None, score: None, crop: None, vector: None }
}

/// The selection rule on detections brought back to the upright image.
fn to_regions(
    detections: Vec<Detection>,
    placement: Placement,
    config: &DetectConfig,
    labels: &[String],
    upright: Size,
) -> Vec<Region> {
    let in_image: Vec<Detection> =
        detections.into_iter().map(|d| Detection { bbox: placement.to_image(d.bbox), ..d }).collect();
    let selected = select(&in_image, &config.selection, upright, MIN_SIDE_PX);
    if selected.is_empty() && config.selection.on_empty == OnEmpty::Whole {
        return vec![whole(upright)];
    }
    let label = |index: usize| labels.get(index).cloned().unwrap_or_else(|| format!("class {index}"));
    selected
        .into_iter()
        .map(|d| Region {
            bbox: d.bbox,
            label: Some(label(d.class_index)),
            score: Some(d.score),
            crop: None,
            vector: None,
        })
        .collect()
}
