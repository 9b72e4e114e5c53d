//! Numbers to meaning: sessions of ONNX Runtime and the reading of their outputs. One adapter per output
//! contract. Knows nothing of files of images, of rows or of threads; whoever owns a session calls it.

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
mod grounding_dino;
mod hub;
mod input;
mod labels;
mod layout;
pub mod library;
mod onnx_file;
mod owl;
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

use ndarray::Array4;

use self::device::EffectiveDevice;
use self::facts::Facts;
use self::library::Runtime;
use crate::candidate::{Candidate, Vocabulary};
use crate::config::{Device, RunConfig};
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

    /// Candidates above `floor` for each image of `batch` (`[n, 3, height, width]`), in input pixels, not
    /// clipped, before any suppression, in the order of the graph's output. Outputs are copied to the host
    /// before this returns. An image with NaN in its output fails alone with code `nan_output`, one whose prompt
    /// cannot be used with `prompt`.
    ///
    /// # Errors
    /// The call failed as a whole.
    fn detect(
        &mut self,
        batch: &Array4<f32>,
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

    /// One vector of `dim` numbers for each image of `batch` (`[n, 3, height, width]`), L2-normalised where
    /// the model or the user says so. A vector that is not finite or all zero fails alone with `nan_output`.
    ///
    /// # Errors
    /// The call failed as a whole.
    fn embed(&mut self, batch: &Array4<f32>) -> Result<Vec<Result<Vec<f32>, RowError>>, ModelError>;
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

/// What is known before a model is loaded: files, device, and how its memory is divided.
pub struct Placing {
    /// Where sessions compute.
    pub device: EffectiveDevice,
    /// The driver's view of it, for a GPU.
    pub gpu: Option<vram::Gpu>,
    files: [Option<files::ModelFiles>; 2],
    vram_bytes: Option<u64>,
}

impl Placing {
    /// Chooses the device and finds the models' files.
    ///
    /// # Errors
    /// A file or the device cannot be had.
    pub fn of(config: &RunConfig, device: Device, runtime: &Runtime) -> Result<Self, Error> {
        let device = device::choose(runtime, device, &config.gpu)?;
        let half = device.is_cuda();
        let detector = config.detect.as_ref().map(|d| files::locate(&d.model, d.precision, half)).transpose()?;
        let embedder = config.embed.as_ref().map(|e| files::locate(&e.model, e.precision, half)).transpose()?;
        let gpu = device.cuda_number().and_then(vram::Gpu::find);
        let total = gpu.as_ref().and_then(vram::Gpu::total_bytes);
        let vram_bytes = device.cuda_number().and_then(|_| vram::budget_bytes(config.gpu.vram, total));
        Ok(Self { device, gpu, files: [detector, embedder], vram_bytes })
    }

    /// The device in the words under which batch sizes are remembered: the product's name for a GPU.
    pub fn batch_device(&self) -> String {
        self.gpu.as_ref().and_then(vram::Gpu::name).unwrap_or_else(|| self.device.word.clone())
    }

    /// Why both models cannot be in memory at once, where they cannot.
    pub fn must_be_staged(&self, host_free_bytes: Option<u64>) -> Option<String> {
        let weights: Vec<u64> = self.files.iter().flatten().map(files::ModelFiles::weights_bytes).collect();
        if weights.len() < 2 {
            return None;
        }
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        if self.device.is_cuda() {
            let small = vram::arenas(self.vram_bytes?, &weights).err()?;
            return Some(format!(
                "both need {} of GPU memory, --vram gives {}",
                mib(small.needed_bytes),
                mib(small.budget_bytes)
            ));
        }
        let needed = (HOST_FACTOR * weights.iter().sum::<u64>() as f64) as u64;
        let free = host_free_bytes.filter(|free| needed > *free)?;
        Some(format!("both need about {} of memory, {} are free", mib(needed), mib(free)))
    }

    /// Loads the models of those kinds, of the ones that the run has, and calls each with blank images: what is broken
    /// fails here, before a row is touched.
    ///
    /// # Errors
    /// A graph cannot be used, or there is no memory for it.
    pub fn load(&self, config: &RunConfig, runtime: &Runtime, kinds: &[ModelKind]) -> Result<Models, Error> {
        let files = |kind: ModelKind| self.files[kind as usize].as_ref().filter(|_| kinds.contains(&kind));
        let wanted = || [ModelKind::Detector, ModelKind::Embedder].into_iter().filter_map(files);
        let weights: Vec<u64> = wanted().map(files::ModelFiles::weights_bytes).collect();
        let arena = match self.vram_bytes.map(|budget| vram::arenas(budget, &weights)) {
            None => None,
            Some(Ok(arenas)) => arenas.first().copied(),
            Some(Err(small)) => {
                return Err(Error::Usage(format!(
                    "--vram gives {} MiB and the models need {} MiB at least: give more, or take a smaller or fp16 model",
                    small.budget_bytes >> 20,
                    small.needed_bytes >> 20
                )));
            }
        };
        let sessions = self.sessions(config.threads, weights.iter().sum());
        let threads_per_session = config.threads / sessions;
        let device = self.device.with_arena(arena).with_own_threads((sessions > 1).then_some(threads_per_session));
        let mut models = Models {
            detector: None,
            embedder: None,
            more_detectors: Vec::new(),
            more_embedders: Vec::new(),
            threads_per_session,
            device: device.clone(),
            notes: Vec::new(),
        };
        if let (Some(detect), Some(files)) = (&config.detect, files(ModelKind::Detector)) {
            let (detector, note) = detector::load(files, detect, runtime, &device)?;
            models.detector = Some(detector);
            models.notes.extend(note);
            for _ in 1..sessions {
                models.more_detectors.push(detector::load(files, detect, runtime, &device)?.0);
            }
        }
        if let (Some(embed), Some(files)) = (&config.embed, files(ModelKind::Embedder)) {
            let (embedder, note) = embedder::VectorModel::load(files, embed, runtime, &device)?;
            models.embedder = Some(Box::new(embedder));
            models.notes.extend(note);
            for _ in 1..sessions {
                models.more_embedders.push(Box::new(embedder::VectorModel::load(files, embed, runtime, &device)?.0));
            }
        }
        Ok(models)
    }
}

impl Placing {
    /// How many sessions each model gets. On the host, calls with one thread each side by side leave no core waiting for
    /// another inside an operator, which costs a call with all cores a sixth of its time; every session holds the weights
    /// once more, so that large models get one. A GPU works on one call at a time.
    fn sessions(&self, threads: usize, weights_bytes: u64) -> usize {
        if self.device.is_cuda() {
            return 1;
        }
        let each = (HOST_FACTOR * weights_bytes as f64) as u64;
        let affordable = 1 + usize::try_from(SESSIONS_EXTRA_BYTES / each.max(1)).unwrap_or(SESSIONS_MOST);
        let most = affordable.min(SESSIONS_MOST).min(threads).max(1);
        // No thread is left over.
        (1..=most).rev().find(|sessions| threads.is_multiple_of(*sessions)).unwrap_or(1)
    }
}

/// Sessions of a model at most; with more cores than this, each computes with several.
const SESSIONS_MOST: usize = 4;

/// Memory that further sessions may take.
const SESSIONS_EXTRA_BYTES: u64 = 512 << 20;

/// A session on the host holds its weights, prepacked copies of most of them, and an arena.
const HOST_FACTOR: f64 = 2.5;

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
