//! Numbers to meaning: sessions of ONNX Runtime and the reading of their outputs. One adapter per output
//! contract. Knows nothing of files of images, of rows or of threads; whoever owns a session calls it.

mod bound;
pub mod boxes;
mod card;
mod constants;
pub mod detector;
mod detr;
pub mod device;
mod digest;
mod elf;
pub mod embedder;
pub mod facts;
mod failure;
pub mod files;
mod folder;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod grounding_dino;
mod hub;
mod input;
mod labels;
mod layout;
pub mod library;
pub mod memory;
mod onnx_file;
mod owl;
pub mod placing;
mod pooling;
mod port;
mod preprocessor;
mod prompt;
pub mod self_test;
mod session;
mod text;
mod transformer;
pub mod vram;
mod weights;
mod yolo;

use std::sync::Arc;

use self::device::EffectiveDevice;
use self::facts::Facts;
use self::memory::{HostMemory, ImageBatch};
use crate::candidate::{Candidate, Vocabulary};
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::ImageInput;
use crate::row::RowError;

/// What any model that is loaded can, whatever it is for. One thread owns it.
pub trait Loaded: Send {
    /// What its input wants. Constant.
    fn input(&self) -> &ImageInput;

    /// Images per call that the graph demands; `None` where any number will do. Fewer are filled with blank
    /// images inside the call, more are refused.
    fn fixed_batch(&self) -> Option<usize>;

    /// From now on the graph is given one image at a time, whatever it would take.
    fn take_one_by_one(&mut self);

    /// Memory was short in the last call: the next one gives back what it does not need.
    fn give_back_memory(&mut self);

    /// Closes the session and opens it again, to get back memory that it does not give.
    ///
    /// # Errors
    /// It cannot be opened; no call will succeed any more.
    fn reopen(&mut self) -> Result<(), Error>;

    /// Ends the call in flight, from any thread.
    fn terminator(&self) -> Terminator;

    /// What only this model knows of itself, for people: inputs and outputs, family, labels, pooling.
    fn describe(&self) -> Facts {
        Facts::new()
    }
}

/// [`Loaded`] for a struct with the fields `graph` and `input`, and a method `own_facts`.
macro_rules! loaded_graph {
    ($model:ty) => {
        impl $crate::model::Loaded for $model {
            fn input(&self) -> &$crate::recipe::ImageInput {
                &self.input
            }

            fn fixed_batch(&self) -> Option<usize> {
                self.graph.fixed_batch
            }

            fn take_one_by_one(&mut self) {
                self.graph.fixed_batch = Some(1);
            }

            fn give_back_memory(&mut self) {
                self.graph.give_back_memory();
            }

            fn reopen(&mut self) -> Result<(), $crate::error::Error> {
                self.graph.reopen()
            }

            fn terminator(&self) -> $crate::model::Terminator {
                self.graph.terminator()
            }

            fn describe(&self) -> $crate::model::facts::Facts {
                let mut facts = $crate::model::facts::of_graph(&self.graph);
                facts.extend(self.own_facts());
                facts
            }
        }
    };
}
use loaded_graph;

/// A detector that is loaded.
pub trait Detector: Loaded {
    /// True where an image needs a prompt: its own, or the one of the run.
    fn takes_prompts(&self) -> bool;

    /// Candidates above `floor` for each image of `batch`, in input pixels, not
    /// clipped, before any suppression, in the order of the graph's output. Outputs are copied to the host
    /// before this returns. An image with NaN in its output fails alone with code `nan_output`, one whose prompt
    /// cannot be used with `prompt`.
    ///
    /// # Errors
    /// The call failed as a whole.
    fn detect(
        &mut self,
        batch: &dyn ImageBatch,
        asked: &[Asked<'_>],
        floor: f32,
    ) -> Result<Vec<Result<Found, RowError>>, ModelError>;
}

/// What is asked of one image of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The row's own prompt; without it the run's.
    pub prompt: Option<&'a str>,
    /// The part of the tensor, from its top left corner, that the picture fills.
    pub valid: Size,
}

/// What a detector found in one image.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// In input pixels.
    pub candidates: Vec<Candidate>,
    /// What their labels mean.
    pub vocabulary: Arc<Vocabulary>,
}

/// An embedder that is loaded.
pub trait Embedder: Loaded {
    /// Length of a vector. Constant.
    fn dim(&self) -> usize;

    /// True where it begins by cutting its input into patches of 8 pixels or more, as ViTs do: then it hardly notices how
    /// its input was made smaller.
    fn has_patches(&self) -> bool {
        false
    }

    /// One vector of `dim` numbers for each image of `batch`, L2-normalised where
    /// the model or the user says so. A vector that is not finite or all zero fails alone with `nan_output`.
    ///
    /// # Errors
    /// The call failed as a whole.
    fn embed(&mut self, batch: &dyn ImageBatch) -> Result<Vec<Result<Vec<f32>, RowError>>, ModelError>;
}

/// What a run computes with.
pub struct Models {
    /// The detector, where one is used.
    pub detector: Option<Box<dyn Detector>>,
    /// The embedder, where one is used.
    pub embedder: Option<Box<dyn Embedder>>,
    /// Further sessions of the detector, which work side by side with the first.
    pub more_detectors: Vec<Box<dyn Detector>>,
    /// Further sessions of the embedder.
    pub more_embedders: Vec<Box<dyn Embedder>>,
    /// Threads that compute in one call, on the host.
    pub threads_per_session: usize,
    /// Where they compute.
    pub device: EffectiveDevice,
    /// Where the tensors of calls should lie.
    pub memory: HostMemory,
    /// Lines for the user about the models, to be logged by the caller.
    pub notes: Vec<String>,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// The detector.
    Detector,
    /// The embedder.
    Embedder,
}

impl Models {
    /// Tests the model of that kind, which was loaded from `files`.
    ///
    /// # Errors
    /// It cannot be trusted; see [`self_test`].
    pub fn self_test(&mut self, kind: ModelKind, files: &files::ModelFiles) -> Result<self_test::Verdict, Error> {
        match (kind, &mut self.detector, &mut self.embedder) {
            (ModelKind::Detector, Some(detector), _) => self_test::detector(detector.as_mut(), files),
            (ModelKind::Embedder, _, Some(embedder)) => self_test::embedder(embedder.as_mut(), files),
            _ => Ok(self_test::Verdict::default()),
        }
    }

    /// From now on the model of that kind is given one image at a time.
    pub fn take_one_by_one(&mut self, kind: ModelKind) {
        match (kind, &mut self.detector, &mut self.embedder) {
            (ModelKind::Detector, Some(detector), _) => {
                detector.take_one_by_one();
                self.more_detectors.iter_mut().for_each(|d| d.take_one_by_one());
            }
            (ModelKind::Embedder, _, Some(embedder)) => {
                embedder.take_one_by_one();
                self.more_embedders.iter_mut().for_each(|e| e.take_one_by_one());
            }
            _ => {}
        }
    }
}

/// A call of a session failed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The call was ended by a stop.
    #[error("terminated")]
    Terminated,
    /// Host or device memory ran out.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The device is gone or poisoned; every later call fails too.
    #[error("device lost: {0}")]
    DeviceLost(String),
    /// Anything else the runtime says.
    #[error("{0}")]
    Failed(String),
}

/// Ends the call in flight of a session, from any thread. Cheap to clone.
#[derive(Clone, Default)]
pub struct Terminator(Option<Arc<dyn Fn() + Send + Sync>>);

impl Terminator {
    /// A terminator that calls `f`.
    pub fn new(f: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(f)))
    }

    /// Ends the call in flight, and all later ones.
    pub fn terminate(&self) {
        if let Some(f) = &self.0 {
            f();
        }
    }
}
