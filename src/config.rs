//! Validated settings of a run, one part per stage. Nothing here is an `Option` that means "default":
//! `None` always means "not used".

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recipe::{CropFit, Decode, Labels, Selection, Truncated};

/// Images bigger than this are refused unless `--max-pixels` says otherwise. Pillow's limit for
/// decompression bombs, rounded up.
pub const MAX_PIXELS_DEFAULT: u64 = 180_000_000;

/// After the first signal, work that ends within this time is kept.
pub const STOP_GRACE: Duration = Duration::from_secs(8);

/// After the first signal the process is gone within this time, whatever still hangs.
pub const STOP_LIMIT: Duration = Duration::from_millis(9_500);

/// A run in which no image ended for so long is told to stand still, once for each. Shorter times would be false alarms: a
/// batch on a slow processor takes half a minute.
pub const STALLED_AFTER: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(300)];

/// Everything `pipeline::run` needs to know.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The detector, where one is used.
    pub detect: Option<DetectConfig>,
    /// The embedder, where one is used.
    pub embed: Option<EmbedConfig>,
    /// Reading and decoding.
    pub decode: DecodeConfig,
    /// A file that gives no answer for so long is given up, and the thread that hangs in it.
    pub decode_limit: Duration,
    /// No file is read that does not lie below this folder; absolute and without links. `None`: all are.
    pub root: Option<Arc<Path>>,
    /// Crops as files, where they are wanted.
    pub crops: Option<PathBuf>,
    /// Stop after that many images.
    pub limit: Option<u64>,
    /// Stop when more fail. `None`: any number may.
    pub max_failures: Option<MaxFailures>,
    /// Busy compute threads.
    pub threads: usize,
    /// Images in one call of a session, where the graph does not fix it.
    pub batch: Batch,
    /// Bytes of host memory that images in flight may hold.
    pub memory_bytes: u64,
    /// What sessions may take of a GPU.
    pub gpu: GpuConfig,
    /// First all detections, then all embeddings: only one model is in memory at a time.
    pub staged: bool,
    /// Measurements of the run as JSON lines, where they are wanted.
    pub metrics: Option<PathBuf>,
}

/// `--max-failures`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaxFailures {
    /// So many rows of this run may fail.
    Rows(u64),
    /// So many in a hundred of the latest outcomes, 0 to 100.
    Percent(f32),
}

impl fmt::Display for MaxFailures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(rows) => rows.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// `--batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Batch {
    /// As many as measurement finds best.
    Auto,
    /// That many, while memory allows.
    Fixed(usize),
}

/// Memory and algorithms of CUDA sessions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuConfig {
    /// How much of the device's memory.
    pub vram: Vram,
    /// `--cudnn-search`.
    pub cudnn_search: CudnnSearch,
    /// Convolutions may take whatever workspace is fastest; otherwise 32 MiB.
    pub cudnn_max_workspace: bool,
}

/// `--vram`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vram {
    /// A part of the device's memory, 0 to 1.
    Share(f32),
    /// So many bytes.
    Bytes(u64),
}

/// How cuDNN finds its convolution algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CudnnSearch {
    /// By rules; at once.
    Heuristic,
    /// By trying all of them, for each new shape: up to a second each, and much memory.
    Exhaustive,
    /// cuDNN's default, whatever the shape.
    Default,
}

/// The `detect` stage.
#[derive(Clone, Debug)]
pub struct DetectConfig {
    /// Folder or `.onnx` file.
    pub model: PathBuf,
    /// Which graph of a folder with several.
    pub precision: Precision,
    /// Labels of images that have no prompt of their own.
    pub prompt: Option<String>,
    /// Where labels come from.
    pub labels: Labels,
    /// Detections at or below this score are forgotten.
    pub candidate_floor: f32,
    /// Sides of tensors that follow the picture are rounded up to a multiple of this; `None` for the model's own sides.
    pub shape_step_px: Option<u32>,
    /// Which candidates become regions.
    pub selection: Selection,
}

/// The `embed` stage.
#[derive(Clone, Debug)]
pub struct EmbedConfig {
    /// Folder or `.onnx` file.
    pub model: PathBuf,
    /// Which graph of a folder with several.
    pub precision: Precision,
    /// Overrides the model's own rule.
    pub crop_fit: Option<CropFit>,
    /// Overrides the model's own rule.
    pub normalize: Option<bool>,
}

/// Reading and decoding.
#[derive(Clone, Copy, Debug)]
pub struct DecodeConfig {
    /// Bigger images are refused before anything is allocated.
    pub max_pixels: u64,
    /// What a file that ends early becomes.
    pub truncated: Truncated,
    /// At which size pictures are decoded.
    pub mode: Decode,
}

/// `--precision`: which of a folder's graphs is taken, by the suffixes of the hub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// fp16 on CUDA and fp32 on the CPU, or what is there.
    #[default]
    Auto,
    /// `model.onnx`.
    Fp32,
    /// `model_fp16.onnx`.
    Fp16,
    /// `model_int8.onnx`.
    Int8,
    /// `model_uint8.onnx`.
    Uint8,
    /// `model_quantized.onnx`.
    Quantized,
    /// `model_q4.onnx`.
    Q4,
    /// `model_q4f16.onnx`.
    Q4f16,
    /// `model_bnb4.onnx`.
    Bnb4,
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// CUDA where it can be had, else the CPU with one line that says why.
    Auto,
    /// The CPU.
    Cpu,
    /// That CUDA device, or no start.
    Cuda(u32),
}

/// `--synchronous`: what a power cut may take back. The database is sound after it in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Synchronous {
    /// The last commits, whose rows are then done again.
    #[default]
    Normal,
    /// Nothing: each commit waits for the disk.
    Full,
}

/// `--stale`: what becomes of finished rows that another recipe made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stale {
    /// They stay as they are, beside new rows made by the recipe in force.
    Keep,
    /// They are pending again.
    Redo,
}
