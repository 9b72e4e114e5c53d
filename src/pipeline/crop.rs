//! `select + crop`: detections to regions, regions to tensors, on the pool. An image's small regions are cut from a
//! second decode of its file.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use super::assemble::Assembly;
use super::budget::Reservation;
use super::crop_file::write_crop;
use super::desk::Desk;
use super::message::{Crop, Image, Located, NoCrop, Opened, Origin, failed, finished};
use super::progress::Step;
use super::scale::{Group, by_scale};
use super::stop::AbortOnPanic;
use super::{Job, Shapes};
use crate::candidate::{Candidate, Kept};
use crate::error::Error;
use crate::fault::{self, Hang};
use crate::geometry::{BoxPx, Placement, Scale, Size};
use crate::model;
use crate::model::boxes::regions_of;
use crate::pixels::decode::{Redecoded, decode_region};
use crate::pixels::header::Probed;
use crate::pixels::picture::Picture;
use crate::pixels::tensor;
use crate::recipe::{ImageInput, Selection};
use crate::row::{Finished, ImageId, Outcome, Raw, Region, RowError, Stage};

/// Where crops go.
pub(super) struct Exits {
    pub(super) embed: Option<Sender<Crop>>,
    pub(super) assembly: Arc<Assembly>,
    pub(super) commit: Sender<Finished>,
    /// Closed when no more is cut.
    pub(super) _pool: Sender<Infallible>,
}

/// Everything that cutting regions needs.
#[derive(Clone, Copy)]
struct Cropping<'a, 'j> {
    job: &'j Job<'j>,
    shapes: &'a Shapes,
    desk: &'a Desk<'j>,
    exits: &'a Exits,
}

/// Works until `located` is closed.
///
/// # Errors
/// A crop file cannot be written, or stored values are damaged: not the image's fault.
pub(super) fn run<'j>(
    job: &'j Job<'j>,
    shapes: &Shapes,
    desk: &Desk<'j>,
    located: &Receiver<Located>,
    exits: &Exits,
) -> Result<(), Error> {
    let cropping = Cropping { job, shapes, desk, exits };
    let fault = Mutex::new(None);
    job.pool.in_place_scope(|scope| {
        while let Ok(located) = job.progress.recv(Step::Crop, located) {
            let fault = &fault;
            scope.spawn(move |_| {
                let _abort = AbortOnPanic(job.stop);
                if job.stop.is_ending() {
                    return;
                }
                if let Err(error) = cropping.work(located) {
                    fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    job.stop.abort();
                }
            });
        }
    });
    fault.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

impl<'j> Cropping<'_, 'j> {
    /// Takes one image to the embedder, or to its end.
    fn work(&self, located: Located) -> Result<(), Error> {
        let Located { image, found } = located;
        self.job.progress.flights.at(Step::Crop, [image.claim.id]);
        let selected = {
            let _cores = self.job.cores.one();
            self.job.progress.timed(Step::Crop, || select(self.job, &image, found))
        };
        let (raw, mut regions) = selected?;
        if !self.write_crops(&image, &mut regions)? {
            return Ok(());
        }
        let (Some(input), Some(embed)) = (&self.shapes.embed, &self.exits.embed) else {
            let outcome = Outcome::Done { raw, regions, embed: None };
            self.end(finished(&image.claim, image.facts, outcome));
            return Ok(());
        };
        if regions.iter().all(|r| r.embedded) {
            let outcome = Outcome::Done { raw, regions, embed: Some(Ok(())) };
            self.end(finished(&image.claim, image.facts, outcome));
            return Ok(());
        }
        self.cut_all(image, raw, regions, input, embed);
        Ok(())
    }

    fn end(&self, finished: Finished) {
        // A closed channel means that the run is ending; the row is released.
        self.job.progress.send(Step::Crop, Step::Commit, &self.exits.commit, finished);
    }

    /// Writes every region that has no file yet, at full size whatever the models see. False where the image has its
    /// outcome.
    fn write_crops(&self, image: &Image, regions: &mut [Region]) -> Result<bool, Error> {
        let job = self.job;
        let Some(folder) = &job.config.crops else { return Ok(true) };
        // A file has its name only when all of it is there.
        let is_written = |region: &Region| region.crop.as_ref().is_some_and(|name| folder.join(name).is_file());
        let mut wanting: Vec<&mut Region> = regions.iter_mut().filter(|region| !is_written(region)).collect();
        let Some(all) = wanting.iter().map(|region| region.bbox).reduce(BoxPx::around) else { return Ok(true) };
        let decoded;
        let picture = match &image.picture {
            Some(picture) if picture.scale == Scale::FULL => picture,
            _ => match self.decode_for_files(image, all) {
                None => return Ok(false),
                Some(Ok(picture)) => {
                    decoded = picture;
                    &decoded
                }
                Some(Err(ended)) => {
                    self.end(*ended);
                    return Ok(false);
                }
            },
        };
        let _cores = job.cores.one();
        job.progress.timed(Step::Crop, || {
            for region in &mut wanting {
                region.crop = write_crop(folder, &image.claim, region, picture)?;
            }
            Ok(true)
        })
    }

    /// `None` where the image was given up meanwhile.
    fn decode_for_files(&self, image: &Image, all: BoxPx) -> Option<Result<Picture, Box<Finished>>> {
        let (claim, seat) = (image.claim.clone(), image.held.seat());
        let (progress, commit) = (self.job.progress, self.exits.commit.clone());
        let give_up = move |error: RowError| {
            seat.leave();
            progress.send(Step::Crop, Step::Commit, &commit, failed(&claim, error.into()));
        };
        let decode = || {
            again(self.job, &image.probed, Scale::FULL, all).map_err(|no_crop| {
                Box::new(match no_crop {
                    NoCrop::Refused(refused) => failed(&image.claim, refused),
                    NoCrop::FileChanged => finished(&image.claim, None, Outcome::FileChanged),
                })
            })
        };
        self.overseen(image.claim.id, &image.claim.path, give_up, decode)
    }

    /// Makes a tensor of each region that wants a vector and hands it on, one after the other: where the embedder is
    /// slow, this is where its images wait.
    fn cut_all(&self, image: Image, raw: Option<Raw>, regions: Vec<Region>, input: &ImageInput, embed: &Sender<Crop>) {
        let job = self.job;
        let Image { claim, facts, probed, picture, mut held, .. } = image;
        let base = picture.as_ref().map(|p| p.scale);
        let id = claim.id;
        let groups = by_scale(&probed, base, &regions, input, self.shapes.embed_spare);
        let boxes: Vec<BoxPx> = regions.iter().map(|r| r.bbox).collect();
        // The second decodes that are really wanted, at last.
        let further = groups.iter().filter(|s| Some(s.scale) != base);
        let again_bytes = further.filter_map(|s| Some(probed.region_bytes(s.scale, around(&boxes, s)?))).max();
        held.shrink_to(picture.as_ref().map_or(0, Picture::bytes) + again_bytes.unwrap_or(0));
        self.exits.assembly.open(Opened { claim, facts, raw, regions });
        let mut first = picture;
        for group in &groups {
            // Each picture is gone before the next is decoded.
            let picture = match first.take().filter(|picture| picture.scale == group.scale) {
                Some(picture) => Ok(picture),
                None => {
                    let window = around(&boxes, group).unwrap_or(BoxPx::whole(probed.upright));
                    let decode = || again(job, &probed, group.scale, window);
                    match self.overseen(id, &probed.path, self.giving_up_assembled(id, &held), decode) {
                        Some(picture) => picture,
                        None => return,
                    }
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

    /// Its crops may be on their way already, so that the outcome is made where they come together.
    fn giving_up_assembled(&self, id: ImageId, held: &Reservation) -> impl FnOnce(RowError) + Send + use<'j> {
        let (seat, assembly) = (held.seat(), Arc::clone(&self.exits.assembly));
        let (progress, commit) = (self.job.progress, self.exits.commit.clone());
        move |error| {
            seat.leave();
            if let Some(ended) = assembly.give_up(id, error.into()) {
                progress.send(Step::Crop, Step::Commit, &commit, ended);
            }
        }
    }

    /// Decodes with a permit, and not for ever. `None` where the image was given up meanwhile.
    fn overseen<T>(
        &self,
        id: ImageId,
        path: &Path,
        give_up: impl FnOnce(RowError) + Send + 'j,
        decode: impl FnOnce() -> T,
    ) -> Option<T> {
        let ticket = self.desk.begin(id, path, self.job.cores.one(), give_up);
        let decoded = self.job.progress.timed(Step::Crop, || {
            fault::hang(Hang::Again, path);
            decode()
        });
        ticket.finish().map(|_permit| decoded)
    }
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
