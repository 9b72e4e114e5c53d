//! The command line of `croprow run`. Every flag that is left out keeps what the last run was told.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use croprow::config::{CudnnSearch, Device, Precision, Stale, Synchronous, Vram};
use croprow::recipe::{CropFit, Decode, Keep, Labels, Nms, OnEmpty, Truncated};

use super::parse::{self, MaxFailuresOrNone, OrAuto, PathOrNone, StepOrNone, TextOrNone};
use super::until::{self, Until};

/// Work until nothing is pending.
#[derive(Args)]
#[command(after_help = "Settings are remembered in the database: after the first time, `croprow run DB` is enough.

Examples:
  croprow run photos.db --detector yolo11n.onnx --embedder dinov2-small/
  croprow run photos.db                                    go on where it was
  croprow run photos.db --until 07:00                      stop in the morning
  croprow run photos.db --box-threshold 0.5 --stale redo   other settings, finished rows again
  croprow run photos.db --where \"tag = 'holiday'\"        these images only
  croprow run photos.db --embedder none --crops crops/     detect only, write the crops as JPEG")]
pub(crate) struct RunArgs {
    /// The database.
    pub(crate) db: PathBuf,
    /// Detector: folder or .onnx file; `none` makes each whole image a region.
    #[arg(long, value_name = "MODEL|none", value_parser = parse::path_or_none)]
    pub(crate) detector: Option<PathOrNone>,
    /// Embedder: folder or .onnx file; `none` detects only.
    #[arg(long, value_name = "MODEL|none", value_parser = parse::path_or_none)]
    pub(crate) embedder: Option<PathOrNone>,
    /// auto, cpu, cuda or cuda:N [default: auto]
    #[arg(long, value_parser = parse::device)]
    pub(crate) device: Option<Device>,
    /// The ONNX Runtime library [default: ORT_DYLIB_PATH, else beside the program, else the demo's]
    #[arg(long, value_name = "FILE|none", value_parser = parse::path_or_none)]
    pub(crate) runtime: Option<PathOrNone>,
    /// Which graph of a folder with several [default: auto, fp16 on CUDA and fp32 on the CPU, or what is there]
    #[arg(long)]
    pub(crate) precision: Option<PrecisionFlag>,
    /// Labels to look for, as "a cat. a dog." or a JSON list, in images without a prompt of their own
    #[arg(long, value_name = "TEXT|none", value_parser = parse::text_or_none)]
    pub(crate) prompt: Option<TextOrNone>,
    /// Labels of text-prompted detections: those of the prompt, or all tokens above --text-threshold
    /// [default: spans]
    #[arg(long)]
    pub(crate) labels: Option<LabelsFlag>,
    /// Detections at or below this score are not kept for `select`, 0 to 1; of the others the best 300 per image are
    /// [default: 0.05]
    #[arg(long, value_name = "SHARE", value_parser = parse::share)]
    pub(crate) candidate_floor: Option<f32>,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    /// A file that ends early: failed, or used as far as it goes and marked [default: fail]
    #[arg(long)]
    pub(crate) truncated: Option<TruncatedFlag>,
    /// Larger images fail with `too_large` before anything is allocated [default: 180000000]
    #[arg(long, value_parser = parse::count)]
    pub(crate) max_pixels: Option<u64>,
    /// How a crop fills the embedder's input [default: the model's own rule]
    #[arg(long)]
    pub(crate) crop_fit: Option<CropFitFlag>,
    /// L2-normalised vectors [default: the model's own rule]
    #[arg(long)]
    pub(crate) normalize: Option<NormalizeFlag>,
    /// Write every region as JPEG below this folder
    #[arg(long, value_name = "DIR|none", value_parser = parse::path_or_none)]
    pub(crate) crops: Option<PathOrNone>,
    /// Read no file outside of this folder, whatever its path and links say: such rows fail with `outside_root`
    #[arg(long, value_name = "DIR|none", value_parser = parse::path_or_none)]
    pub(crate) root: Option<PathOrNone>,
    /// Decode JPEGs no larger than gives the results of the full size, or at full size [default: scaled]
    #[arg(long)]
    pub(crate) decode: Option<DecodeFlag>,
    /// Fill the tensors of a detector that keeps proportions up to multiples of so many pixels, so that photos of many
    /// sizes share batches; for detectors with a pixel mask [default: none]
    #[arg(long, value_name = "PX|none", value_parser = parse::step_or_none)]
    pub(crate) shape_step: Option<StepOrNone>,
    /// An image that is neither read nor decoded after so many seconds fails with `timed_out`, and the thread that hangs
    /// in it is left behind [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = parse::count)]
    pub(crate) decode_limit: Option<u64>,
    /// Images in one call of a model, or auto: what measurement finds best [default: auto]
    #[arg(long, value_name = "N|auto", value_parser = parse::count_or_auto)]
    pub(crate) batch: Option<OrAuto>,
    /// Threads that compute, or auto: as many as there are cores [default: auto]
    #[arg(long, value_name = "N|auto", value_parser = parse::count_or_auto)]
    pub(crate) threads: Option<OrAuto>,
    /// Host memory for images in flight, as 4GiB, or auto: half of what is free [default: auto]
    #[arg(long, value_name = "SIZE|auto", value_parser = parse::size_or_auto)]
    pub(crate) memory: Option<OrAuto>,
    /// GPU memory for sessions, as 6GiB or 80% [default: 80%]
    #[arg(long, value_name = "SIZE|SHARE%", value_parser = parse::vram)]
    pub(crate) vram: Option<Vram>,
    /// First all detections, then all embeddings: one model in memory at a time. By itself where both do not fit
    /// [default: auto]
    #[arg(long, value_name = "yes|auto", num_args = 0..=1, default_missing_value = "yes")]
    pub(crate) staged: Option<StagedFlag>,
    /// How cuDNN finds convolution algorithms: by rules, by trying all (slow for each new shape), its default
    /// [default: heuristic]
    #[arg(long)]
    pub(crate) cudnn_search: Option<CudnnSearchFlag>,
    /// Workspace of convolutions: small is 32 MiB, max what is fastest [default: small]
    #[arg(long)]
    pub(crate) cudnn_workspace: Option<CudnnWorkspaceFlag>,
    /// What a power cut may take back: the last commits, whose rows are done again, or nothing, where each commit waits for
    /// the disk [default: normal]
    #[arg(long)]
    pub(crate) synchronous: Option<SynchronousFlag>,
    /// Write measurements to this file each second, as JSON lines; not remembered
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Finished rows that another model or other settings made: leave them, or do them again
    #[arg(long)]
    pub(crate) stale: Option<StaleFlag>,
    /// Work on the images that meet this condition on the columns of images only, as "tag = 'holiday'"; the others stay as
    /// they are
    #[arg(long = "where", value_name = "SQL|none", value_parser = parse::condition_or_none)]
    pub(crate) condition: Option<TextOrNone>,
    /// Stop when more rows fail in this run, as 100, or more in a hundred of the last 1,000, as 5% [default: none]
    #[arg(long, value_name = "N|P%|none", value_parser = parse::max_failures_or_none)]
    pub(crate) max_failures: Option<MaxFailuresOrNone>,
    /// Stop after that many images; not remembered
    #[arg(long, value_parser = parse::count)]
    pub(crate) limit: Option<u64>,
    /// Stop at that time, as 07:00 (the next one) or 2026-12-01T07:00, in local time; not remembered
    #[arg(long, value_name = "TIME", value_parser = until::parse)]
    pub(crate) until: Option<Until>,
    /// Print the summary as one JSON object; not remembered
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which candidates become regions; the same flags for `run` and `select`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SelectionArgs {
    /// A region's score is above this, 0 to 1 [default: 0.3]
    #[arg(help_heading = "Selection", long, value_name = "SHARE", value_parser = parse::share)]
    pub(crate) box_threshold: Option<f32>,
    /// Tokens above this score make the label, 0 to 1; with --labels phrases only [default: 0.25]
    #[arg(help_heading = "Selection", long, value_name = "SHARE", value_parser = parse::share)]
    pub(crate) text_threshold: Option<f32>,
    /// Boxes that overlap more are one object, 0 to 1; 1 switches it off [default: 0.45]
    #[arg(help_heading = "Selection", long, value_name = "SHARE", value_parser = parse::share)]
    pub(crate) nms_iou: Option<f32>,
    /// Overlapping boxes of one label are one object, or those across all labels [default: label]
    #[arg(help_heading = "Selection", long)]
    pub(crate) nms: Option<NmsFlag>,
    /// Boxes with a shorter side in pixels are no regions [default: 1]
    #[arg(help_heading = "Selection", long, value_name = "PX", value_parser = parse::pixels)]
    pub(crate) min_box: Option<f32>,
    /// Widen each box by this part of its sides, on each side, 0 to 1 [default: 0]
    #[arg(help_heading = "Selection", long, value_name = "SHARE", value_parser = parse::share)]
    pub(crate) margin: Option<f32>,
    /// Regions per image, best first: all, best, or a count [default: all]
    #[arg(help_heading = "Selection", long, value_parser = parse::keep)]
    pub(crate) keep: Option<Keep>,
    /// An image without any detection: no region, or the whole image as its region [default: skip]
    #[arg(help_heading = "Selection", long)]
    pub(crate) on_empty: Option<OnEmptyFlag>,
}

macro_rules! flag {
    ($name:ident => $target:ty { $($variant:ident = $value:expr),+ $(,)? }) => {
        #[derive(Clone, Copy, Debug, ValueEnum)]
        pub(crate) enum $name { $($variant),+ }
        impl From<$name> for $target {
            fn from(flag: $name) -> Self {
                match flag { $($name::$variant => $value),+ }
            }
        }
    };
}

flag!(OnEmptyFlag => OnEmpty { Skip = OnEmpty::Skip, Whole = OnEmpty::Whole });
flag!(NmsFlag => Nms { Label = Nms::Label, Across = Nms::Across });
flag!(LabelsFlag => Labels { Spans = Labels::Spans, Phrases = Labels::Phrases });
flag!(PrecisionFlag => Precision {
    Auto = Precision::Auto, Fp32 = Precision::Fp32, Fp16 = Precision::Fp16, Int8 = Precision::Int8,
    Uint8 = Precision::Uint8, Quantized = Precision::Quantized, Q4 = Precision::Q4, Q4f16 = Precision::Q4f16,
    Bnb4 = Precision::Bnb4,
});
flag!(DecodeFlag => Decode { Scaled = Decode::Scaled, Exact = Decode::Exact });
flag!(StagedFlag => bool { Yes = true, Auto = false });
flag!(CudnnSearchFlag => CudnnSearch {
    Heuristic = CudnnSearch::Heuristic, Exhaustive = CudnnSearch::Exhaustive, Default = CudnnSearch::Default,
});
flag!(CudnnWorkspaceFlag => bool { Small = false, Max = true });
flag!(SynchronousFlag => Synchronous { Normal = Synchronous::Normal, Full = Synchronous::Full });
flag!(TruncatedFlag => Truncated { Fail = Truncated::Fail, Use = Truncated::Use });
flag!(StaleFlag => Stale { Keep = Stale::Keep, Redo = Stale::Redo });
flag!(CropFitFlag => Option<CropFit> {
    Model = None, Squash = Some(CropFit::Squash), Pad = Some(CropFit::Pad), Center = Some(CropFit::Center),
});
flag!(NormalizeFlag => Option<bool> { Model = None, Yes = Some(true), No = Some(false) });
