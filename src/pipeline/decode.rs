//! `decode`: looks at headers ahead, admits images by their worst case in bytes, and decodes them on the pool.

use std::convert::Infallible;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded, never, select};

use super::apart::Word;
use super::budget::{Budget, Reservation};
use super::desk::Desk;
use super::message::{Decoded, Image, Located, Origin, failed, finished};
use super::progress::{Step, Wait};
use super::scale::by_scale;
use super::stop::AbortOnPanic;
use super::{Job, Shapes};
use crate::error::Error;
use crate::fault::{self, Hang};
use crate::geometry::{BoxPx, Scale};
use crate::pixels::decode::{Upright, decode};
use crate::pixels::header::{Probed, probe_below};
use crate::pixels::tensor;
use crate::printable;
use crate::recipe::ImageInput;
use crate::row::{Claim, Finished, Outcome, Region, RowError, Stage};

/// Headers that are looked at ahead, for each thread of the pool: files on a slow disk are then opened side by side.
const PROBES_PER_THREAD: usize = 2;

/// Where decoded images go.
pub(super) struct Exits {
    pub(super) detect: Option<Sender<Decoded>>,
    pub(super) crop: Sender<Located>,
    pub(super) commit: Sender<Finished>,
    /// Closed when no more is decoded.
    pub(super) _pool: Sender<Infallible>,
}

/// Everything that decoding an image needs.
#[derive(Clone, Copy)]
struct Decoding<'a, 'j> {
    job: &'j Job<'j>,
    shapes: &'a Shapes,
    desk: &'a Desk<'j>,
    exits: &'a Exits,
}

/// Admits one image after the other; the pool decodes them in any order. Channels behind it hold as many
/// images as the budget admits, so that no thread of the pool ever waits on a channel.
pub(super) fn run<'j>(
    job: &'j Job<'j>,
    shapes: &Shapes,
    (budget, desk): (&Arc<Budget>, &Desk<'j>),
    claimed: &Receiver<Claim>,
    exits: &Exits,
) -> Result<(), Error> {
    let decoding = Decoding { job, shapes, desk, exits };
    let ahead_most = PROBES_PER_THREAD * job.config.threads;
    let (probed_tx, probed_rx) = bounded(ahead_most);
    let none = never();
    job.pool.in_place_scope(|scope| {
        let (mut ahead, mut open) = (0, true);
        while open || ahead > 0 {
            let claims = if open && ahead < ahead_most { claimed } else { &none };
            let next = job.progress.waits(Step::Decode, Wait::Input, || {
                select! {
                    recv(claims) -> claim => Next::Claim(claim.ok()),
                    recv(probed_rx) -> probed => Next::Probed(probed.ok().flatten()),
                }
            });
            match next {
                Next::Claim(None) => open = false,
                Next::Claim(Some(claim)) => {
                    job.progress.taken(Step::Decode);
                    // Not begun yet where a stop was asked for: it is given back.
                    if !job.stop.is_asked() && !decoding.has_nothing_to_do(&claim) {
                        ahead += 1;
                        job.progress.flights.begin(claim.id, &claim.path);
                        job.tell(Word::Begins(claim.id));
                        fault::point("decode.begun");
                        let probed_tx = probed_tx.clone();
                        scope.spawn(move |_| {
                            let _abort = AbortOnPanic(job.stop);
                            decoding.probe(claim, &probed_tx);
                        });
                    }
                }
                Next::Probed(probed) => {
                    ahead -= 1;
                    if let Some(admitted) = probed.and_then(|found| decoding.admit(found.claim, found.probed, budget)) {
                        scope.spawn(move |_| {
                            let _abort = AbortOnPanic(job.stop);
                            if !job.stop.is_ending() {
                                decoding.work(admitted);
                            }
                        });
                    }
                }
            }
        }
    });
    Ok(())
}

enum Next {
    Claim(Option<Claim>),
    /// `None`: it has its outcome.
    Probed(Option<Found>),
}

/// An image whose header was read.
struct Found {
    claim: Claim,
    probed: Probed,
}

/// An image with its memory.
struct Admitted {
    claim: Claim,
    probed: Probed,
    /// The scale at which it is decoded as a whole, if at all.
    scale: Option<Scale>,
    again_bytes: u64,
    held: Reservation,
}

impl<'a, 'j> Decoding<'a, 'j> {
    /// Looks at a header, and says so whatever becomes of it: one more may be looked at ahead.
    fn probe(&self, claim: Claim, probed_tx: &Sender<Option<Found>>) {
        let (give_up, next) = (self.giving_up(&claim), probed_tx.clone());
        let ticket = self.desk.begin(claim.id, &claim.path, self.job.cores.none(), move |error| {
            give_up(error);
            let _ = next.send(None);
        });
        fault::hang(Hang::Probe, &claim.path);
        let config = self.job.config;
        let probed = probe_below(&claim.path, config.root.as_ref(), &config.decode);
        let places = &self.job.progress.places;
        let probed = probed.map_err(|error| failed(&claim, places.doubt(&claim.path, error)));
        probed.iter().for_each(|probed| places.was_read(probed));
        if ticket.finish().is_none() {
            return;
        }
        let found = match probed {
            Ok(probed) => Some(Found { claim, probed }),
            Err(ended) => {
                self.end(ended);
                None
            }
        };
        // As many may wait in it as are looked at ahead.
        let _ = probed_tx.send(found);
    }

    /// What the desk does where a thread hangs in this file.
    fn giving_up(&self, claim: &Claim) -> impl FnOnce(RowError) + Send + use<'j> {
        let (progress, commit, claim) = (self.job.progress, self.exits.commit.clone(), claim.clone());
        move |error| {
            progress.send(Step::Decode, Step::Commit, &commit, failed(&claim, error.into()));
        }
    }

    fn detector_input(&self, claim: &Claim) -> Option<&'a ImageInput> {
        self.shapes.detect.as_ref().filter(|_| claim.stage == Stage::Detect)
    }

    /// Ends a claim in which nothing was found, or all of which has its vector, and its crop where crops are wanted.
    fn has_nothing_to_do(&self, claim: &Claim) -> bool {
        let for_crops = self.job.config.crops.is_some();
        let has_all = |region: &Region| region.embedded && (region.crop.is_some() || !for_crops);
        let Some(regions) = claim.regions.as_ref().filter(|r| r.iter().all(has_all)) else { return false };
        let outcome = Outcome::Done { raw: None, regions: regions.clone(), embed: Some(Ok(())) };
        self.end(finished(claim, None, outcome));
        true
    }

    /// A closed channel means that the run is ending; the row is released.
    fn end(&self, finished: Finished) {
        self.job.progress.send(Step::Decode, Step::Commit, &self.exits.commit, finished);
    }

    /// Decides at which scale it is decoded and reserves its memory to the end. `None` when the run is ending, or the
    /// image has its outcome already.
    fn admit(&self, claim: Claim, probed: Probed, budget: &Arc<Budget>) -> Option<Admitted> {
        if claim.regions.is_some() && claim.seen.is_some_and(|seen| seen != probed.stamp) {
            // Its regions are those of another picture.
            self.end(finished(&claim, None, Outcome::FileChanged));
            return None;
        }
        let (scale, again) = self.scales(&claim, &probed);
        let input = self.detector_input(&claim);
        let tensor_bytes = input.map_or(0, |input| 4 * input.values(probed.upright) as u64);
        let again_bytes = again.map_or(0, |scale| probed.worst_bytes(scale));
        let picture_bytes = scale.map_or(0, |scale| probed.pixels_bytes(scale));
        let first = scale.map_or(0, |scale| probed.worst_bytes(scale)) + tensor_bytes;
        let bytes = first.max(picture_bytes + again_bytes);
        if budget.exceeded_by(bytes) {
            log::warn!(
                "{}: needs {} MiB, more than --memory: it is worked on alone",
                printable::path(&claim.path),
                bytes >> 20
            );
        }
        let (detects, embeds) = (input.is_some(), self.shapes.embed.is_some());
        let stages: &[Stage] = match (detects, embeds) {
            (true, true) => &Stage::ALL,
            (true, false) => &[Stage::Detect],
            (false, true) => &[Stage::Embed],
            (false, false) => &[],
        };
        let progress = self.job.progress;
        let held = progress.waits(Step::Decode, Wait::Output, || budget.admit(bytes, stages, self.job.stop))?;
        Some(Admitted { claim, probed, scale, again_bytes, held })
    }

    /// The scale of the first decode, and that of the finest second one that may follow.
    fn scales(&self, claim: &Claim, probed: &Probed) -> (Option<Scale>, Option<Scale>) {
        let mode = self.job.config.decode.mode;
        let enough = |input: &ImageInput, spare: Option<u32>| {
            spare.map_or(Scale::FULL, |spare| probed.scale_for(tensor::wanted(probed.upright, input, spare)))
        };
        let for_crops = self.job.config.crops.is_some();
        let (first, regions_may_need) = match (self.detector_input(claim), &claim.regions, &self.shapes.embed) {
            (Some(input), _, embed) => {
                (Some(enough(input, mode.detector_spare())), embed.is_some().then_some(Scale::FULL))
            }
            (None, Some(regions), Some(embed)) => {
                let base = claim.scale.unwrap_or(Scale::FULL);
                let groups = by_scale(probed, Some(base), regions, embed, self.shapes.embed_spare);
                let finest = groups.iter().map(|s| s.scale).filter(|s| *s != base).min_by_key(|s| s.denominator());
                (groups.iter().any(|s| s.scale == base).then_some(base), finest)
            }
            (None, None, Some(embed)) => (Some(enough(embed, self.shapes.embed_spare)), None),
            (None, _, None) => (Some(Scale::FULL), None),
        };
        let again = if for_crops { Some(Scale::FULL) } else { regions_may_need };
        (first, again.filter(|again| first.is_none_or(|first| again.denominator() < first.denominator())))
    }

    fn work(&self, admitted: Admitted) {
        let Admitted { claim, probed, scale, again_bytes, mut held } = admitted;
        let Some(scale) = scale else {
            held.shrink_to(again_bytes);
            return self.locate(Image { claim, facts: None, probed, picture: None, again_bytes, held });
        };
        let (give_up, seat) = (self.giving_up(&claim), held.seat());
        let ticket = self.desk.begin(claim.id, &claim.path, self.job.cores.one(), move |error| {
            seat.leave();
            give_up(error);
        });
        let decoded = self.job.progress.timed(Step::Decode, || {
            fault::hang(Hang::Decode, &claim.path);
            let places = &self.job.progress.places;
            decode(&probed, &self.job.config.decode, scale)
                .map_err(|error| Box::new(failed(&claim, places.doubt(&claim.path, error))))
        });
        let Some(cores) = ticket.finish() else { return };
        let Upright { picture, facts } = match decoded {
            Ok(upright) => upright,
            Err(ended) => return self.end(*ended),
        };
        self.job.progress.decoded(scale);
        fault::poison(&claim.path);
        fault::point("decode.done");
        if claim.regions.is_some() && claim.seen.is_some_and(|seen| seen != facts.stamp) {
            return self.end(finished(&claim, None, Outcome::FileChanged));
        }
        let input = self.detector_input(&claim);
        let (upright, stamp) = (facts.upright, Some(facts.stamp));
        let picture_bytes = picture.bytes();
        let mut image = Image { claim, facts: Some(facts), probed, picture: Some(picture), again_bytes, held };
        let (Some(input), Some(detect), Some(picture)) = (input, &self.exits.detect, &image.picture) else {
            image.shrink();
            drop(cores);
            return self.locate(image);
        };
        let mut tensor = vec![0.0; input.values(upright)];
        image.held.shrink_to(picture_bytes + again_bytes.max(4 * tensor.len() as u64));
        let filled =
            self.job.progress.timed(Step::Decode, || tensor::fill(picture, BoxPx::whole(upright), input, &mut tensor));
        drop(cores);
        match filled {
            Ok(placed) => {
                let decoded = Decoded { image, tensor, size: input.tensor_size(upright), placed };
                self.job.progress.send(Step::Decode, Step::Detect, detect, decoded);
            }
            Err(error) => {
                self.end(Finished { stamp, ..finished(&image.claim, None, Outcome::Failed(error)) });
            }
        }
    }

    fn locate(&self, image: Image) {
        let found = image.claim.regions.clone().map_or(Origin::Whole, Origin::Stored);
        self.job.progress.send(Step::Decode, Step::Crop, &self.exits.crop, Located { image, found });
    }
}
