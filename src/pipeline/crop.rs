//! `select + crop`: detections to regions, regions to tensors, on the pool. An image's small regions are cut from a
//! second decode of its file.

use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use super::assemble::Assembly;
use super::crop_file::write_crop;
use super::message::{Crop, Image, Located, NoCrop, Opened, Origin, failed, finished};
use super::progress::Step;
use super::scale::{Group, by_scale};
use super::stop::AbortOnPanic;
use super::{Job, Shapes};
use crate::candidate::{Candidate, Kept};
use crate::error::Error;
use crate::fault;
use crate::geometry::{BoxPx, Placement, Scale, Size};
use crate::model;
use crate::model::boxes::regions_of;
use crate::pixels::decode::{Redecoded, decode_region};
use crate::pixels::header::Probed;
use crate::pixels::picture::Picture;
use crate::pixels::tensor;
use crate::recipe::{ImageInput, Selection};
use crate::row::{Finished, Outcome, Raw, Region, Stage};

/// Where crops go.
pub(super) struct Exits {
    pub(super) embed: Option<Sender<Crop>>,
    pub(super) assembly: Arc<Assembly>,
    pub(super) commit: Sender<Finished>,
}

/// Works until `located` is closed.
///
/// # Errors
/// A crop file cannot be written, or stored values are damaged: not the image's fault.
pub(super) fn run(job: &Job<'_>, shapes: &Shapes, located: &Receiver<Located>, exits: &Exits) -> Result<(), Error> {
    let fault = Mutex::new(None);
    job.pool.in_place_scope(|scope| {
        while let Ok(located) = job.progress.recv(Step::Crop, located) {
            let fault = &fault;
            scope.spawn(move |_| {
                let _abort = AbortOnPanic(job.stop);
                if job.stop.is_ending() {
                    return;
                }
                if let Err(error) = work(job, shapes, located, exits) {
                    fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    job.stop.abort();
                }
            });
        }
    });
    fault.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Takes one image to the embedder, or to its end.
fn work(job: &Job<'_>, shapes: &Shapes, located: Located, exits: &Exits) -> Result<(), Error> {
    let Located { image, found } = located;
    job.progress.flights.at(Step::Crop, [image.claim.id]);
    let cores = job.cores.one();
    let selected = job.progress.timed(Step::Crop, || select(job, &image, found));
    let (raw, mut regions) = selected?;
    if job.config.crops.is_some() {
        match job.progress.timed(Step::Crop, || write_crops(job, &image, &mut regions))? {
            Ok(()) => {}
            Err(NoCrop::Refused(refused)) => {
                end(job, exits, failed(&image.claim, refused));
                return Ok(());
            }
            Err(NoCrop::FileChanged) => {
                end(job, exits, finished(&image.claim, None, Outcome::FileChanged));
                return Ok(());
            }
        }
    }
    let (Some(input), Some(embed)) = (&shapes.embed, &exits.embed) else {
        let outcome = Outcome::Done { raw, regions, embed: None };
        end(job, exits, finished(&image.claim, image.facts, outcome));
        return Ok(());
    };
    if regions.iter().all(|r| r.embedded) {
        let outcome = Outcome::Done { raw, regions, embed: Some(Ok(())) };
        end(job, exits, finished(&image.claim, image.facts, outcome));
        return Ok(());
    }
    drop(cores);
    cut_all(job, image, raw, regions, (input, shapes.embed_spare), (&exits.assembly, embed));
    Ok(())
}

fn end(job: &Job<'_>, exits: &Exits, finished: Finished) {
    // A closed channel means that the run is ending; the row is released.
    job.progress.send(Step::Crop, Step::Commit, &exits.commit, finished);
}

fn select(job: &Job<'_>, image: &Image, found: Origin) -> Result<(Option<Raw>, Vec<Region>), Error> {
    let upright = image.facts.as_ref().map_or(image.probed.upright, |facts| facts.upright);
    Ok(match (found, &job.config.detect) {
        (Origin::Stored(regions), _) => (None, regions),
        (Origin::Raw(found, placement), Some(config)) => {
            let (raw, regions) = to_regions(found, placement, &config.selection, upright)?;
            (Some(raw), regions)
        }
        (Origin::Whole | Origin::Raw(..), _) => (None, vec![Region::whole(upright)]),
    })
}

/// Writes every region that has no file yet, at full size whatever the models see. The inner error is the image's.
fn write_crops(job: &Job<'_>, image: &Image, regions: &mut [Region]) -> Result<Result<(), NoCrop>, Error> {
    let Some(folder) = &job.config.crops else { return Ok(Ok(())) };
    // A file has its name only when all of it is there.
    let is_written = |region: &Region| region.crop.as_ref().is_some_and(|name| folder.join(name).is_file());
    let mut wanting: Vec<&mut Region> = regions.iter_mut().filter(|region| !is_written(region)).collect();
    let Some(all) = wanting.iter().map(|region| region.bbox).reduce(BoxPx::around) else { return Ok(Ok(())) };
    let decoded;
    let picture = match &image.picture {
        Some(picture) if picture.scale == Scale::FULL => picture,
        _ => match again(job, &image.probed, Scale::FULL, all) {
            Ok(picture) => {
                decoded = picture;
                &decoded
            }
            Err(error) => return Ok(Err(error)),
        },
    };
    for region in &mut wanting {
        region.crop = write_crop(folder, &image.claim, region, picture)?;
    }
    Ok(Ok(()))
}

/// Makes a tensor of each region that wants a vector and hands it on, one after the other: where the embedder is slow,
/// this is where its images wait.
fn cut_all(
    job: &Job<'_>,
    image: Image,
    raw: Option<Raw>,
    regions: Vec<Region>,
    (input, spare): (&ImageInput, Option<u32>),
    (assembly, embed): (&Assembly, &Sender<Crop>),
) {
    let Image { claim, facts, probed, picture, mut held, .. } = image;
    let base = picture.as_ref().map(|p| p.scale);
    let id = claim.id;
    let groups = by_scale(&probed, base, &regions, input, spare);
    let boxes: Vec<BoxPx> = regions.iter().map(|r| r.bbox).collect();
    // The second decodes that are really wanted, at last.
    let further = groups.iter().filter(|s| Some(s.scale) != base);
    let again_bytes = further.filter_map(|s| Some(probed.region_bytes(s.scale, around(&boxes, s)?))).max();
    held.shrink_to(picture.as_ref().map_or(0, Picture::bytes) + again_bytes.unwrap_or(0));
    assembly.open(Opened { claim, facts, raw, regions });
    let mut first = picture;
    for group in &groups {
        // Each picture is gone before the next is decoded.
        let picture = match first.take().filter(|picture| picture.scale == group.scale) {
            Some(picture) => Ok(picture),
            None => {
                let _cores = job.cores.one();
                let window = around(&boxes, group).unwrap_or(BoxPx::whole(probed.upright));
                job.progress.timed(Step::Crop, || again(job, &probed, group.scale, window))
            }
        };
        for &region in &group.regions {
            let tensor = {
                let _cores = job.cores.one();
                let cut = |picture| job.progress.timed(Step::Crop, || cut(picture, boxes[region], input));
                picture.as_ref().map_err(Clone::clone).and_then(cut)
            };
            let crop = Crop { image: id, region, tensor };
            if !job.progress.send(Step::Crop, Step::Embed, embed, crop) {
                return;
            }
        }
    }
    fault::point("crop.cut");
    held.came_to(Stage::Embed);
}

/// A second decode, of one part of the image.
fn again(job: &Job<'_>, probed: &Probed, scale: Scale, region: BoxPx) -> Result<Picture, NoCrop> {
    job.progress.decoded(scale);
    match decode_region(probed, &job.config.decode, scale, region) {
        Ok(Redecoded::Picture(picture)) => Ok(picture),
        Ok(Redecoded::FileChanged) => Err(NoCrop::FileChanged),
        Err(error) => Err(NoCrop::Refused(job.progress.places.doubt(&probed.path, error))),
    }
}

fn cut(picture: &Picture, region: BoxPx, input: &ImageInput) -> Result<Vec<f32>, NoCrop> {
    let mut values = vec![0.0; 3 * input.size.pixels() as usize];
    tensor::fill(picture, region, input, &mut values)?;
    Ok(values)
}

fn around(boxes: &[BoxPx], group: &Group) -> Option<BoxPx> {
    group.regions.iter().map(|&i| boxes[i]).reduce(BoxPx::around)
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
