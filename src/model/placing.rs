//! Where models go: which device, how its memory is divided, how many sessions each model gets.

use std::sync::Arc;

use super::device::{self, EffectiveDevice};
use super::library::Runtime;
use super::memory::HostMemory;
use super::{ModelKind, Models, detector, embedder, files, vram};
use crate::config::{Device, RunConfig};
use crate::error::Error;

/// Sessions of a model at most; with more cores than this, each computes with several.
const SESSIONS_MOST: usize = 4;

/// Memory that further sessions may take.
const SESSIONS_EXTRA_BYTES: u64 = 512 << 20;

/// A session on the host holds its weights, prepacked copies of most of them, and an arena.
const HOST_FACTOR: f64 = 2.5;

/// What is known before a model is loaded: files, device, and how its memory is divided.
pub struct Placing {
    /// Where sessions compute.
    pub device: EffectiveDevice,
    /// The driver's view of it, for a GPU.
    pub gpu: Option<Arc<vram::Gpu>>,
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
        let gpu = device.cuda_number().and_then(vram::Gpu::find).map(Arc::new);
        let total = gpu.as_ref().and_then(|gpu| gpu.total_bytes());
        let vram_bytes = device.cuda_number().and_then(|_| vram::budget_bytes(config.gpu.vram, total));
        Ok(Self { device, gpu, files: [detector, embedder], vram_bytes })
    }

    /// The device in the words under which batch sizes are remembered: the product's name for a GPU.
    pub fn batch_device(&self) -> String {
        self.gpu.as_ref().and_then(|gpu| gpu.name()).unwrap_or_else(|| self.device.word.clone())
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
            memory: HostMemory::open(runtime, &device),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sessions_of_a_model_together_have_as_many_threads_as_were_asked_for() {
        let placing = Placing { device: EffectiveDevice::cpu(None), gpu: None, files: [None, None], vram_bytes: None };
        for threads in 1..=64 {
            for weights_bytes in [0, 20 << 20, 200 << 20, 2 << 30] {
                let sessions = placing.sessions(threads, weights_bytes);
                assert!((1..=SESSIONS_MOST).contains(&sessions), "{threads} {weights_bytes}");
                assert_eq!(threads / sessions * sessions, threads, "{weights_bytes}");
            }
            assert_eq!(placing.sessions(threads, 2 << 30), 1, "a large model is held once");
        }
        assert_eq!(placing.sessions(8, 20 << 20), SESSIONS_MOST);
    }
}
