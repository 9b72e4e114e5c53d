//! Calls of a session, and what to do when one is refused: smaller batches for bad images, less memory for short
//! memory, the end of the run for a lost device.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::cores::Cores;
use super::progress::{Progress, Step, Wait};
use super::tune::Tuner;
use crate::error::Error;
use crate::geometry::Size;
use crate::model::{Loaded, ModelError};
use crate::row::{RowCode, RowError};

/// One batch and the session that is to answer it.
pub trait Attempt {
    /// What an image gets.
    type Answer;

    /// The model that is called.
    fn model(&mut self) -> &mut dyn Loaded;

    /// Calls it with these images of the batch; one answer for each.
    ///
    /// # Errors
    /// The call failed as a whole.
    fn call(&mut self, images: Range<usize>) -> Result<Vec<Result<Self::Answer, RowError>>, ModelError>;

    /// True where it answers an input that cannot be at fault.
    fn blank(&mut self) -> bool;
}

/// What a session said of a batch.
pub enum Answer<T> {
    /// One answer per image.
    Given(Vec<Result<T, RowError>>),
    /// The run is ending; the rows are released.
    Terminated,
}

/// All calls of one session.
pub struct Calls<'a> {
    progress: &'a Progress,
    cores: &'a Cores,
    threads: usize,
    step: Step,
    tuner: &'a Mutex<Tuner>,
}

impl<'a> Calls<'a> {
    /// `step` gets the time they take; on the host each computes with so many `threads`. Sessions of one model share
    /// their `tuner`.
    pub fn new(progress: &'a Progress, cores: &'a Cores, threads: usize, step: Step, tuner: &'a Mutex<Tuner>) -> Self {
        Self { progress, cores, threads, step, tuner }
    }

    /// Images of the next call with that shape.
    pub fn images(&self, shape: Size) -> usize {
        self.tuner().images(shape)
    }

    /// Calls the session with the whole batch of `images` tensors of `shape`, or with the parts that are allowed now: the
    /// size may have come down since the batch was made. Where one is refused, with its halves, down to single images.
    ///
    /// Short memory: the batch size stays halved and the session gives memory back; where one image is still too much
    /// the session is opened anew, and where that does not help either, the run ends. No image is marked for it.
    ///
    /// An image that is refused alone for another reason fails with code `model`. Where every image is refused, a blank
    /// one decides whether it is the model that failed and not the images.
    ///
    /// # Errors
    /// The model refuses everything, memory does not suffice for one image, or the device is gone.
    pub fn answer<A: Attempt>(&self, attempt: &mut A, images: usize, shape: Size) -> Result<Answer<A::Answer>, Error> {
        let mut answers: Vec<Result<A::Answer, RowError>> = Vec::with_capacity(images);
        let (mut refused_alone, mut opened_anew) = (0, false);
        let most = self.images(shape).max(1);
        let parts = (0..images).step_by(most).map(|first| first..(first + most).min(images));
        let mut waiting: Vec<Range<usize>> = parts.rev().collect();
        while let Some(range) = waiting.pop() {
            match self.call(attempt, range.clone(), shape) {
                Ok(given) => answers.extend(given),
                Err(ModelError::Terminated) => return Ok(Answer::Terminated),
                Err(ModelError::DeviceLost(reason)) => return Err(Error::DeviceLost(reason)),
                Err(ModelError::OutOfMemory(reason)) if range.len() > 1 => {
                    log::warn!("no memory for a batch of {}, trying halves: {reason}", range.len());
                    attempt.model().give_back_memory();
                    split(&mut waiting, range);
                }
                Err(ModelError::OutOfMemory(reason)) => {
                    if opened_anew {
                        return Err(Error::OutOfMemory(reason));
                    }
                    opened_anew = true;
                    log::warn!("no memory for a single image, opening the session anew: {reason}");
                    attempt.model().reopen().map_err(|e| Error::OutOfMemory(format!("{reason}; then {e}")))?;
                    waiting.push(range);
                }
                Err(ModelError::Failed(reason)) if range.len() > 1 => {
                    log::warn!("a batch of {} was refused, trying halves: {reason}", range.len());
                    split(&mut waiting, range);
                }
                Err(ModelError::Failed(reason)) => {
                    refused_alone += 1;
                    let message = format!("the model refused this image alone: {reason}");
                    answers.push(Err(RowError::new(RowCode::Model, message)));
                    if refused_alone == images && !attempt.blank() {
                        return Err(Error::Model(format!("every image is refused: {reason}")));
                    }
                }
            }
        }
        Ok(Answer::Given(answers))
    }

    fn tuner(&self) -> MutexGuard<'_, Tuner> {
        self.tuner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One call, timed, on the cores it needs; the tuner learns how it went.
    fn call<A: Attempt>(
        &self,
        attempt: &mut A,
        range: Range<usize>,
        shape: Size,
    ) -> Result<Vec<Result<A::Answer, RowError>>, ModelError> {
        let images = range.len();
        let cores = self.progress.waits(self.step, Wait::Input, || self.cores.several(self.threads));
        let began = Instant::now();
        let called = self.progress.timed(self.step, || attempt.call(range));
        drop(cores);
        let learnt = match &called {
            Ok(_) => self.tuner().worked(shape, images, began.elapsed()),
            Err(ModelError::OutOfMemory(_)) => self.tuner().refused(shape, images),
            Err(_) => None,
        };
        if let Some(learnt) = learnt {
            self.progress.learn(learnt);
        }
        called
    }
}

/// The first half is on top of the stack, so that answers keep their order.
fn split(waiting: &mut Vec<Range<usize>>, range: Range<usize>) {
    let middle = range.start + range.len() / 2;
    waiting.push(middle..range.end);
    waiting.push(range.start..middle);
}

/// Images in a row that gave NaN, after which it is the model and not the images.
const NAN_IN_A_ROW: usize = 8;

/// Tells single images that give NaN from a model that gives nothing else.
#[derive(Default)]
pub struct NanWatch(usize);

impl NanWatch {
    /// Looks at the answers of a batch.
    ///
    /// # Errors
    /// Too many images in a row gave NaN; none of this batch should be marked for it.
    pub fn look<T>(&mut self, answers: &[Result<T, RowError>]) -> Result<(), Error> {
        for answer in answers {
            match answer {
                Err(error) if error.code == RowCode::NanOutput => self.0 += 1,
                _ => self.0 = 0,
            }
        }
        if self.0 < NAN_IN_A_ROW {
            return Ok(());
        }
        Err(Error::Model(format!(
            "{} images in a row gave NaN, infinity or nothing but zeros: take the fp32 model",
            self.0
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Batch;
    use crate::model::Terminator;
    use crate::recipe::{Filter, Fit, ImageInput};
    use crate::row::Stage;

    const SHAPE: Size = Size::new(8, 8);

    /// A session with so much memory, in images.
    struct Fake {
        input: ImageInput,
        holds: usize,
        /// What it holds after it was opened anew.
        holds_afterwards: usize,
        bad: Vec<usize>,
        lost: bool,
        sound: bool,
        calls: Vec<usize>,
        given_back: usize,
        opened_anew: usize,
    }

    impl Fake {
        fn new(holds: usize) -> Self {
            let input =
                ImageInput { size: SHAPE, filter: Filter::Bilinear, fit: Fit::Squash, mean: [0.0; 3], std: [1.0; 3] };
            let (bad, calls) = (Vec::new(), Vec::new());
            Self {
                input,
                holds,
                holds_afterwards: holds,
                bad,
                lost: false,
                sound: true,
                calls,
                given_back: 0,
                opened_anew: 0,
            }
        }
    }

    impl Loaded for Fake {
        fn input(&self) -> &ImageInput {
            &self.input
        }
        fn fixed_batch(&self) -> Option<usize> {
            None
        }
        fn take_one_by_one(&mut self) {}
        fn terminator(&self) -> Terminator {
            Terminator::default()
        }
        fn give_back_memory(&mut self) {
            self.given_back += 1;
        }
        fn reopen(&mut self) -> Result<(), Error> {
            self.opened_anew += 1;
            self.holds = self.holds_afterwards;
            Ok(())
        }
    }

    impl Attempt for Fake {
        type Answer = usize;
        fn model(&mut self) -> &mut dyn Loaded {
            self
        }
        fn call(&mut self, images: Range<usize>) -> Result<Vec<Result<usize, RowError>>, ModelError> {
            self.calls.push(images.len());
            if self.lost {
                return Err(ModelError::DeviceLost("CUDA error 719".into()));
            }
            if images.len() > self.holds {
                return Err(ModelError::OutOfMemory("Failed to allocate memory".into()));
            }
            if images.clone().any(|i| self.bad.contains(&i)) {
                return Err(ModelError::Failed("refused".into()));
            }
            Ok(images.map(Ok).collect())
        }
        fn blank(&mut self) -> bool {
            self.sound
        }
    }

    fn answer(fake: &mut Fake, images: usize) -> (Result<Answer<usize>, Error>, usize) {
        let (progress, cores) = (Progress::default(), Cores::new(1, false, 1));
        let tuner = Mutex::new(Tuner::new(Stage::Embed, Batch::Fixed(images), images, usize::MAX, &[]));
        let calls = Calls::new(&progress, &cores, 1, Step::Embed, &tuner);
        let answer = calls.answer(fake, images, SHAPE);
        (answer, calls.images(SHAPE))
    }

    #[test]
    fn an_image_that_is_refused_alone_fails_and_its_neighbours_keep_their_answers() {
        let mut fake = Fake { bad: vec![2, 5], ..Fake::new(9) };
        let (Ok(Answer::Given(answers)), 7) = answer(&mut fake, 7) else { panic!() };
        let codes: Vec<_> = answers.iter().map(|a| a.as_ref().map_err(|e| e.code).copied()).collect();
        let bad = Err(RowCode::Model);
        assert_eq!(codes, [Ok(0), Ok(1), bad, Ok(3), Ok(4), bad, Ok(6)]);
    }

    #[test]
    fn a_model_that_refuses_everything_ends_the_run() {
        let mut fake = Fake { bad: vec![0, 1], sound: false, ..Fake::new(9) };
        assert!(matches!(answer(&mut fake, 2).0, Err(Error::Model(_))));
        let mut fake = Fake { sound: true, ..fake };
        let (Ok(Answer::Given(answers)), _) = answer(&mut fake, 2) else { panic!() };
        assert!(answers.iter().all(Result::is_err), "two bad images are two failed rows while the model is sound");
    }

    #[test]
    fn short_memory_halves_the_batch_for_good_and_fails_no_image() {
        let mut fake = Fake::new(3);
        let (Ok(Answer::Given(answers)), size) = answer(&mut fake, 8) else { panic!() };
        assert_eq!(answers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
        assert_eq!((size, fake.calls, fake.opened_anew), (2, vec![8, 4, 2, 2, 4, 2, 2], 0));
        assert_eq!(fake.given_back, 3);
    }

    #[test]
    fn a_batch_that_was_made_before_memory_ran_short_is_not_tried_as_a_whole() {
        let (progress, cores) = (Progress::default(), Cores::new(1, false, 1));
        let tuner = Mutex::new(Tuner::new(Stage::Embed, Batch::Fixed(8), 8, usize::MAX, &[]));
        let calls = Calls::new(&progress, &cores, 1, Step::Embed, &tuner);
        let mut fake = Fake::new(3);
        for batch in [8, 8, 5] {
            let Ok(Answer::Given(answers)) = calls.answer(&mut fake, batch, SHAPE) else { panic!() };
            assert_eq!(answers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), (0..batch).collect::<Vec<_>>());
        }
        assert_eq!(fake.calls[7..], [2, 2, 2, 2, 2, 2, 1]);
    }

    #[test]
    fn a_session_that_cannot_take_one_image_is_opened_anew() {
        let mut fake = Fake { holds_afterwards: 2, ..Fake::new(0) };
        let (Ok(Answer::Given(answers)), 1) = answer(&mut fake, 2) else { panic!() };
        assert_eq!((answers.len(), fake.opened_anew), (2, 1));
    }

    #[test]
    fn memory_that_never_suffices_ends_the_run_and_marks_no_image() {
        let mut fake = Fake::new(0);
        let (Err(error), _) = answer(&mut fake, 4) else { panic!() };
        assert!(matches!(error, Error::OutOfMemory(_)) && error.exit_code() == 75, "{error}");
        assert_eq!((fake.calls, fake.opened_anew), (vec![4, 2, 1, 1], 1));
    }

    #[test]
    fn a_lost_device_marks_no_image_and_is_not_called_again() {
        let mut fake = Fake { lost: true, ..Fake::new(9) };
        assert!(matches!(answer(&mut fake, 8).0, Err(Error::DeviceLost(_))));
        assert_eq!(fake.calls, [8]);
    }

    #[test]
    fn a_model_that_gives_nothing_but_nan_ends_the_run_and_single_images_do_not() {
        let nan = || Err::<(), _>(RowError::new(RowCode::NanOutput, "NaN"));
        let mut watch = NanWatch::default();
        for _ in 0..20 {
            assert!(watch.look(&[nan(), nan(), nan(), Ok(())]).is_ok());
        }
        assert!(watch.look(&[nan(), nan(), nan(), nan()]).is_ok());
        assert!(watch.look(&[nan(), nan(), nan(), nan()]).unwrap_err().to_string().contains("fp32"));
    }
}
