//! `decode`: admits claims by their worst case in bytes, and decodes them on the pool.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};

use super::budget::{Budget, Reservation};
use super::message::{Decoded, Located, Origin, failed, finished};
use super::progress::Place;
use super::stop::Stop;
use super::{Job, Shapes};
use crate::error::Error;
use crate::geometry::{BoxPx, Scale};
use crate::pixels::decode::{Upright, decode};
use crate::pixels::header::{Probed, probe};
use crate::pixels::tensor;
use crate::recipe::ImageInput;
use crate::row::{Claim, Finished, Outcome, RowError, Stage};

/// Where decoded images go.
pub(super) struct Exits {
    pub(super) detect: Option<Sender<Decoded>>,
    pub(super) crop: Sender<Located>,
    pub(super) commit: Sender<Finished>,
}

/// Admits one image after the other; the pool decodes them in any order. Channels behind it hold as many
/// images as the budget admits, so that no thread of the pool ever waits on a channel.
pub(super) fn run(
    job: &Job<'_>,
    shapes: &Shapes,
    budget: &Arc<Budget>,
    claimed: &Receiver<Claim>,
    exits: &Exits,
) -> Result<(), Error> {
    job.pool.in_place_scope(|scope| {
        for claim in claimed {
            if job.stop.is_asked() {
                // Not begun yet: it is given back.
                continue;
            }
            if let Some(regions) = claim.regions.as_ref().filter(|r| r.iter().all(|r| r.embedded)) {
                // Nothing was found in it, or all of it has its vector: there is nothing to embed.
                let outcome = Outcome::Done { raw: None, regions: regions.clone(), embed: Some(Ok(())) };
                let _ = exits.commit.send(finished(&claim, None, outcome));
                continue;
            }
            let probed = match probe(&claim.path, &job.config.decode) {
                Ok(probed) => probed,
                Err(error) => {
                    fail(&claim, error, exits);
                    continue;
                }
            };
            let detector_input = if claim.stage == Stage::Detect { shapes.detect.as_ref() } else { None };
            let tensor_bytes = detector_input.map_or(0, |input| 4 * input.values(probed.upright) as u64);
            let bytes = probed.worst_bytes(Scale::FULL) + tensor_bytes;
            if budget.exceeded_by(bytes) {
                log::warn!(
                    "{}: needs {} MiB, more than --memory: it is worked on alone",
                    claim.path.display(),
                    bytes >> 20
                );
            }
            let Some(held) = budget.admit(bytes, job.stop) else { continue };
            scope.spawn(move |_| {
                let _abort = AbortOnPanic(job.stop);
                if !job.stop.is_ending() {
                    job.progress.timed(Place::Decode, || work(job, claim, &probed, detector_input, held, exits));
                }
            });
        }
    });
    Ok(())
}

fn work(
    job: &Job<'_>,
    claim: Claim,
    probed: &Probed,
    input: Option<&ImageInput>,
    mut held: Reservation,
    exits: &Exits,
) {
    let upright = match decode(probed, &job.config.decode, Scale::FULL) {
        Ok(upright) => upright,
        Err(error) => return fail(&claim, error, exits),
    };
    if claim.regions.is_some() && claim.seen.is_some_and(|seen| seen != upright.facts.stamp) {
        // Its regions are those of another picture.
        let _ = exits.commit.send(finished(&claim, None, Outcome::FileChanged));
        return;
    }
    let Upright { picture: pixels, facts } = upright;
    let pixels_bytes = pixels.bytes();
    // A closed channel means that the run is ending; the row is released.
    match (input, &exits.detect) {
        (Some(input), Some(detect)) => {
            let size = input.tensor_size(facts.upright);
            let mut values = vec![0.0; input.values(facts.upright)];
            held.shrink_to(pixels_bytes + 4 * values.len() as u64);
            match tensor::fill(&pixels, BoxPx::whole(facts.upright), input, &mut values) {
                Ok(placed) => {
                    let _ = detect.send(Decoded { claim, facts, pixels, tensor: values, size, placed, held });
                }
                Err(error) => fail(&claim, error, exits),
            }
        }
        _ => {
            held.shrink_to(pixels_bytes);
            let found = claim.regions.clone().map_or(Origin::Whole, Origin::Stored);
            let _ = exits.crop.send(Located { claim, facts, pixels, found, held });
        }
    }
}

fn fail(claim: &Claim, error: RowError, exits: &Exits) {
    let _ = exits.commit.send(failed(claim, error));
}

/// The pool keeps a panic to itself until all its work is done, and `read` would wait for the lost image.
struct AbortOnPanic<'a>(&'a Stop);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort();
        }
    }
}
