//! Batch sizes by measurement: starts small, doubles while images per second grow, comes down when memory is short
//! and creeps up again. Pure; one per model.

use std::time::Duration;

use super::learn::Learnt;
use crate::config::Batch;
use crate::geometry::Size;
use crate::row::Stage;

/// Calls at one batch size before it is judged; the first, which makes room for it, is left out.
const CALLS_PER_SIZE: usize = 4;

/// A larger batch must be faster by this factor to be worth its memory.
const WORTH: f64 = 1.05;

/// Full calls after running out of memory, before twice the size is tried again.
const CALLS_BEFORE_CREEPING: u32 = 100;

/// Shapes that are told apart; of more, the later ones take the size of the nearest and learn nothing.
const SHAPES_MOST: usize = 64;

/// Decides how many images the next call gets.
pub struct Tuner {
    stage: Stage,
    batch: Batch,
    /// Numbers that the tensor of one call may have.
    values_most: usize,
    images_most: usize,
    curves: Vec<Curve>,
}

/// What is known of one shape.
struct Curve {
    shape: Size,
    /// Images of the next call.
    images: usize,
    best: Option<(usize, f64)>,
    /// Nothing above this was found worth it, or fitted into memory.
    cap: usize,
    growing: bool,
    /// Images per second of calls at `images`.
    rates: Vec<f64>,
    /// Full calls since memory ran out.
    calm: Option<u32>,
}

impl Tuner {
    /// For the session of `stage`. A call gets at most `images_most` images and `values_most` numbers. `learnt` are
    /// sizes that earlier runs found; they are tried first.
    pub fn new(stage: Stage, batch: Batch, images_most: usize, values_most: usize, learnt: &[Learnt]) -> Self {
        let mut tuner = Self { stage, batch, values_most, images_most: images_most.max(1), curves: Vec::new() };
        for known in learnt.iter().filter(|l| l.stage == stage).take(SHAPES_MOST) {
            let images = known.images.clamp(1, tuner.most(known.shape));
            tuner.curves.push(Curve {
                images,
                best: Some((images, known.per_s)),
                growing: false,
                ..tuner.fresh(known.shape)
            });
        }
        tuner
    }

    /// Images of the next call with that shape.
    pub fn images(&self, shape: Size) -> usize {
        match self.batch {
            Batch::Fixed(images) => match self.curve(shape) {
                // Memory has the last word.
                Some(curve) if curve.calm.is_some() => images.min(curve.images),
                _ => images.min(self.images_most),
            },
            Batch::Auto => self.curve(shape).map_or_else(|| self.start(shape), |c| c.images),
        }
    }

    /// The most that [`Self::images`] may become.
    pub fn most(&self, shape: Size) -> usize {
        match self.batch {
            Batch::Fixed(images) => images.min(self.images_most),
            Batch::Auto => (self.values_most / (3 * shape.pixels() as usize).max(1)).clamp(1, self.images_most),
        }
    }

    /// A call of `images` images took that long. What was learnt, where that is settled now.
    pub fn worked(&mut self, shape: Size, images: usize, took: Duration) -> Option<Learnt> {
        let (stage, most, fixed) = (self.stage, self.most(shape), self.batch != Batch::Auto);
        let curve = self.curve_mut(shape)?;
        if images != curve.images {
            return None;
        }
        if let Some(calm) = &mut curve.calm {
            *calm += 1;
            if *calm >= CALLS_BEFORE_CREEPING && curve.images < most {
                let images = (2 * curve.images).min(most);
                log::info!("trying batches of {images} again");
                (curve.images, curve.cap, curve.growing, curve.calm) = (images, images, false, Some(0));
                curve.rates.clear();
                return None;
            }
        }
        if fixed || !curve.growing {
            return None;
        }
        curve.rates.push(images as f64 / took.as_secs_f64().max(1e-9));
        if curve.rates.len() < CALLS_PER_SIZE {
            return None;
        }
        let rate = median(&mut curve.rates.split_off(1));
        curve.rates.clear();
        curve.judge(rate, most).map(|(images, per_s)| Learnt { stage, shape, images, per_s })
    }

    /// Memory did not suffice for `images` images: half of that from now on. What is to be remembered.
    pub fn refused(&mut self, shape: Size, images: usize) -> Option<Learnt> {
        let stage = self.stage;
        let curve = self.curve_mut(shape)?;
        let images = (images / 2).max(1);
        (curve.images, curve.cap, curve.growing, curve.calm) = (images, images, false, Some(0));
        curve.rates.clear();
        let per_s = curve.best.map_or(0.0, |(_, rate)| rate);
        curve.best = Some((images, per_s));
        Some(Learnt { stage, shape, images, per_s })
    }

    fn curve(&self, shape: Size) -> Option<&Curve> {
        self.curves.iter().find(|c| c.shape == shape)
    }

    /// `None` where there are too many shapes already.
    fn curve_mut(&mut self, shape: Size) -> Option<&mut Curve> {
        if let Some(place) = self.curves.iter().position(|c| c.shape == shape) {
            return self.curves.get_mut(place);
        }
        if self.curves.len() >= SHAPES_MOST {
            return None;
        }
        let images = self.images(shape);
        self.curves.push(Curve { images, ..self.fresh(shape) });
        self.curves.last_mut()
    }

    fn fresh(&self, shape: Size) -> Curve {
        let cap = self.most(shape);
        Curve { shape, images: 1, best: None, cap, growing: true, rates: Vec::new(), calm: None }
    }

    /// A new shape begins with what the nearest one has settled at, else with one image.
    fn start(&self, shape: Size) -> usize {
        let far = |c: &&Curve| c.shape.pixels().abs_diff(shape.pixels());
        let nearest = self.curves.iter().filter(|c| !c.growing).min_by_key(far);
        nearest.map_or(1, |c| c.images).min(self.most(shape))
    }
}

impl Curve {
    /// `rate` is what `images` reached. The settled size, once there is one.
    fn judge(&mut self, rate: f64, most: usize) -> Option<(usize, f64)> {
        if self.best.is_none_or(|(_, best)| rate > best * WORTH) {
            self.best = Some((self.images, rate));
            let next = (2 * self.images).min(self.cap).min(most);
            if next > self.images {
                self.images = next;
                return None;
            }
        }
        self.growing = false;
        let best = self.best?;
        self.images = best.0;
        Some(best)
    }
}

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Size = Size::new(100, 100);

    fn auto(most: usize, learnt: &[Learnt]) -> Tuner {
        Tuner::new(Stage::Embed, Batch::Auto, most, usize::MAX, learnt)
    }

    /// Calls until something is learnt; `seconds(n)` is the time of a call with `n` images.
    fn settle(tuner: &mut Tuner, seconds: impl Fn(usize) -> f64) -> Option<Learnt> {
        (0..100).find_map(|_| {
            let images = tuner.images(SHAPE);
            tuner.worked(SHAPE, images, Duration::from_secs_f64(seconds(images)))
        })
    }

    #[test]
    fn a_batch_grows_while_it_pays() {
        // A fixed cost per call: larger is better, up to a point.
        let learnt = settle(&mut auto(64, &[]), |n| 1.0 + 0.1 * n as f64).unwrap();
        assert_eq!((learnt.images, learnt.shape, learnt.stage), (64, SHAPE, Stage::Embed));
        let learnt = settle(&mut auto(64, &[]), |n| 0.3 + n as f64).unwrap();
        assert_eq!(learnt.images, 4, "1: 0.77/s, 2: 0.87/s, 4: 0.93/s, 8: 0.96/s");
    }

    #[test]
    fn a_batch_that_does_not_pay_is_not_taken() {
        let mut tuner = auto(64, &[]);
        assert_eq!(settle(&mut tuner, |n| n as f64).unwrap().images, 1);
        assert_eq!(tuner.images(SHAPE), 1);
    }

    #[test]
    fn what_was_learnt_is_tried_first() {
        let known = Learnt { stage: Stage::Embed, shape: SHAPE, images: 16, per_s: 9.0 };
        assert_eq!(auto(64, &[known]).images(SHAPE), 16);
        assert_eq!(auto(8, &[known]).images(SHAPE), 8, "no more than may be");
        let other = Learnt { stage: Stage::Detect, ..known };
        assert_eq!(auto(64, &[other]).images(SHAPE), 1);
        assert_eq!(auto(64, &[known]).images(Size::new(90, 100)), 16, "the nearest shape");
    }

    #[test]
    fn memory_bounds_the_size() {
        let tuner = Tuner::new(Stage::Detect, Batch::Auto, 64, 10 * 3 * 100 * 100, &[]);
        assert_eq!((tuner.most(SHAPE), tuner.most(Size::new(1000, 1000))), (10, 1));
    }

    #[test]
    fn short_memory_halves_the_size_and_it_creeps_up_again() {
        for (batch, start) in [(Batch::Fixed(8), 8), (Batch::Auto, 1)] {
            let mut tuner = Tuner::new(Stage::Embed, batch, 64, usize::MAX, &[]);
            assert_eq!(tuner.images(SHAPE), start);
            assert_eq!(tuner.refused(SHAPE, 8).unwrap().images, 4);
            assert_eq!(tuner.images(SHAPE), 4);
            for _ in 0..CALLS_BEFORE_CREEPING {
                assert_eq!(tuner.images(SHAPE), 4);
                tuner.worked(SHAPE, 4, Duration::from_secs(1));
            }
            assert_eq!(tuner.images(SHAPE), 8, "{batch:?}");
            tuner.refused(SHAPE, 8);
            assert_eq!(tuner.images(SHAPE), 4);
        }
    }

    #[test]
    fn partial_batches_teach_nothing() {
        let mut tuner = auto(64, &[Learnt { stage: Stage::Embed, shape: SHAPE, images: 16, per_s: 1.0 }]);
        for _ in 0..50 {
            assert_eq!(tuner.worked(SHAPE, 3, Duration::from_secs(1)), None);
        }
        assert_eq!(tuner.images(SHAPE), 16);
    }

    #[test]
    fn a_fixed_size_stays() {
        let mut tuner = Tuner::new(Stage::Embed, Batch::Fixed(4), 64, 0, &[]);
        for _ in 0..50 {
            assert_eq!(tuner.worked(SHAPE, 4, Duration::from_secs(1)), None);
        }
        assert_eq!(tuner.images(SHAPE), 4);
    }
}
