//! Settings of `run`: what the last run was told, what this command line says, and the defaults, in the
//! reverse order of their weight.

use std::path::{Path, PathBuf};

use croprow::config::{
    Batch, CudnnSearch, DecodeConfig, DetectConfig, Device, EmbedConfig, GpuConfig, MAX_PIXELS_DEFAULT, Precision,
    RunConfig, Stale, Vram,
};
use croprow::error::Error;
use croprow::model::{device, files, library};
use croprow::recipe::{CropFit, Decode, Keep, Labels, Nms, OnEmpty, Selection, Truncated};
use serde::{Deserialize, Serialize};

use super::memory;
use super::run_args::{RunArgs, SelectionArgs};

/// Score that a box needs, where nothing else is said.
const BOX_THRESHOLD: f32 = 0.3;

/// Score that a token needs to count for a phrase, where nothing else is said.
const TEXT_THRESHOLD: f32 = 0.25;

/// Detections below this are noise that nobody would select; they are not even kept.
const CANDIDATE_FLOOR: f32 = 0.05;

/// Shortest side of a region, where nothing else is said.
const MIN_BOX_PX: f32 = 1.0;

/// Overlap from which two boxes of a class are one object, where nothing else is said.
const NMS_IOU: f32 = 0.45;

/// GPU memory for sessions, where nothing else is said: the rest is for the display and other programs.
const VRAM: Vram = Vram::Share(0.8);

/// More images in one call are a mistake: their tensors alone would take gigabytes.
const BATCH_MOST: usize = 4096;

/// More threads than any machine has cores.
const THREADS_MOST: usize = 1024;

/// Budget where the system does not tell what is free.
const MEMORY_FALLBACK_BYTES: u64 = 2 << 30;

/// What `runs.settings` holds. A missing key has its default, so that older databases are understood.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    pub(crate) detector: Option<PathBuf>,
    pub(crate) embedder: Option<PathBuf>,
    pub(crate) device: Device,
    pub(crate) runtime: Option<PathBuf>,
    pub(crate) precision: Precision,
    pub(crate) prompt: Option<String>,
    pub(crate) labels: Labels,
    pub(crate) box_threshold: f32,
    pub(crate) text_threshold: f32,
    pub(crate) candidate_floor: f32,
    pub(crate) nms_iou: f32,
    pub(crate) nms: Nms,
    pub(crate) min_box_px: f32,
    pub(crate) margin: f32,
    pub(crate) keep: Keep,
    pub(crate) on_empty: OnEmpty,
    pub(crate) truncated: Truncated,
    pub(crate) max_pixels: u64,
    pub(crate) crop_fit: Option<CropFit>,
    pub(crate) normalize: Option<bool>,
    pub(crate) crops: Option<PathBuf>,
    /// Not `batch`, which was a number once.
    pub(crate) batch_size: Batch,
    /// Databases from before this setting were worked on at full size, and stay so.
    #[serde(default = "exact")]
    pub(crate) decode: Decode,
    /// `None`: every picture has a shape of its own, where its detector wants that.
    pub(crate) shape_step_px: Option<u32>,
    pub(crate) gpu: GpuConfig,
    pub(crate) staged: bool,
    /// `None`: as many as this machine has cores.
    pub(crate) threads: Option<usize>,
    /// `None`: half of what is free at the start.
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) stale: Option<Stale>,
    /// Rows that only another selection made are selected again.
    pub(crate) reselect: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            detector: None,
            embedder: None,
            device: Device::Auto,
            runtime: None,
            precision: Precision::Auto,
            prompt: None,
            labels: Labels::Spans,
            box_threshold: BOX_THRESHOLD,
            text_threshold: TEXT_THRESHOLD,
            candidate_floor: CANDIDATE_FLOOR,
            nms_iou: NMS_IOU,
            nms: Nms::Label,
            min_box_px: MIN_BOX_PX,
            margin: 0.0,
            keep: Keep::All,
            on_empty: OnEmpty::Skip,
            truncated: Truncated::Fail,
            max_pixels: MAX_PIXELS_DEFAULT,
            crop_fit: None,
            normalize: None,
            crops: None,
            batch_size: Batch::Auto,
            decode: Decode::Scaled,
            shape_step_px: None,
            gpu: GpuConfig { vram: VRAM, cudnn_search: CudnnSearch::Heuristic, cudnn_max_workspace: false },
            staged: false,
            threads: None,
            memory_bytes: None,
            stale: None,
            reselect: false,
        }
    }
}

impl Settings {
    /// The settings that `runs.settings` holds.
    pub(crate) fn remembered(json: Option<&str>) -> Result<Self, Error> {
        let Some(json) = json else { return Ok(Self::default()) };
        serde_json::from_str(json).map_err(|e| {
            Error::Usage(format!(
                "the settings remembered in the database cannot be read ({e}); a newer croprow wrote them"
            ))
        })
    }

    /// The same with everything that the command line says.
    pub(crate) fn overridden_by(self, args: &RunArgs) -> Self {
        Self {
            detector: args.detector.clone().map_or(self.detector, |path| path.0),
            embedder: args.embedder.clone().map_or(self.embedder, |path| path.0),
            device: args.device.unwrap_or(self.device),
            runtime: args.runtime.clone().map_or(self.runtime, |path| path.0),
            precision: args.precision.map_or(self.precision, Into::into),
            prompt: args.prompt.clone().map_or(self.prompt, |text| text.0),
            labels: args.labels.map_or(self.labels, Into::into),
            candidate_floor: args.candidate_floor.unwrap_or(self.candidate_floor),
            truncated: args.truncated.map_or(self.truncated, Into::into),
            max_pixels: args.max_pixels.unwrap_or(self.max_pixels),
            crop_fit: args.crop_fit.map_or(self.crop_fit, Into::into),
            normalize: args.normalize.map_or(self.normalize, Into::into),
            crops: args.crops.clone().map_or(self.crops, |path| path.0),
            batch_size: args.batch.map_or(self.batch_size, |n| n.0.map_or(Batch::Auto, |n| Batch::Fixed(n as usize))),
            decode: args.decode.map_or(self.decode, Into::into),
            shape_step_px: args.shape_step.map_or(self.shape_step_px, |step| step.0),
            gpu: GpuConfig {
                vram: args.vram.unwrap_or(self.gpu.vram),
                cudnn_search: args.cudnn_search.map_or(self.gpu.cudnn_search, Into::into),
                cudnn_max_workspace: args.cudnn_workspace.map_or(self.gpu.cudnn_max_workspace, Into::into),
            },
            staged: args.staged.map_or(self.staged, Into::into),
            threads: args.threads.map_or(self.threads, |n| n.0.map(|n| n as usize)),
            memory_bytes: args.memory.map_or(self.memory_bytes, |size| size.0),
            stale: args.stale.map(Into::into).or(self.stale),
            ..self
        }
        .reselected_by(&args.selection)
    }

    /// What `runs.settings` will hold.
    pub(crate) fn to_json(&self) -> Result<String, Error> {
        serde_json::to_string(self).map_err(|e| Error::Usage(format!("a setting cannot be remembered: {e}")))
    }

    /// The same with other rules of selection.
    pub(crate) fn reselected_by(self, args: &SelectionArgs) -> Self {
        Self {
            box_threshold: args.box_threshold.unwrap_or(self.box_threshold),
            text_threshold: args.text_threshold.unwrap_or(self.text_threshold),
            nms_iou: args.nms_iou.unwrap_or(self.nms_iou),
            nms: args.nms.map_or(self.nms, Into::into),
            min_box_px: args.min_box.unwrap_or(self.min_box_px),
            margin: args.margin.unwrap_or(self.margin),
            keep: args.keep.unwrap_or(self.keep),
            on_empty: args.on_empty.map_or(self.on_empty, Into::into),
            ..self
        }
    }

    /// The rule of selection.
    pub(crate) fn selection(&self) -> Selection {
        Selection {
            box_threshold: self.box_threshold,
            text_threshold: self.text_threshold,
            nms_iou: self.nms_iou,
            nms: self.nms,
            min_box_px: self.min_box_px,
            margin: self.margin,
            keep: self.keep,
            on_empty: self.on_empty,
        }
    }

    /// Everything resolved for this machine.
    pub(crate) fn resolve(&self, limit: Option<u64>, metrics: Option<PathBuf>) -> Result<RunConfig, Error> {
        if self.detector.is_none() && self.embedder.is_none() {
            return Err(Error::Usage(
                "nothing to run: give --detector MODEL, --embedder MODEL, or both (a folder or an .onnx file)".into(),
            ));
        }
        if self.detector.is_some() && self.box_threshold < self.candidate_floor {
            return Err(Error::Usage(format!(
                "--box-threshold {} is below --candidate-floor {}: detections between them are not kept; lower the floor too",
                self.box_threshold, self.candidate_floor
            )));
        }
        let threads = self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let batch = match self.batch_size {
            Batch::Auto => 1,
            Batch::Fixed(images) => images,
        };
        for (flag, value, most) in [("--threads", threads, THREADS_MOST), ("--batch", batch, BATCH_MOST)] {
            if !(1..=most).contains(&value) {
                return Err(Error::Usage(format!("{flag} {value}: give 1 to {most}")));
            }
        }
        let half_of_free = || memory::free_bytes().map(|free| free / 2);
        let precision = |model: &Option<PathBuf>| self.precision_of(model.as_deref(), threads);
        let (detect_precision, embed_precision) = (precision(&self.detector)?, precision(&self.embedder)?);
        Ok(RunConfig {
            detect: self.detector.clone().map(|model| DetectConfig {
                model,
                precision: detect_precision,
                prompt: self.prompt.clone(),
                labels: self.labels,
                candidate_floor: self.candidate_floor,
                shape_step_px: self.shape_step_px,
                selection: self.selection(),
            }),
            embed: self.embedder.clone().map(|model| EmbedConfig {
                model,
                precision: embed_precision,
                crop_fit: self.crop_fit,
                normalize: self.normalize,
            }),
            decode: DecodeConfig { max_pixels: self.max_pixels, truncated: self.truncated, mode: self.decode },
            crops: self.crops.clone(),
            limit,
            threads,
            batch: self.batch_size,
            memory_bytes: self.memory_bytes.or_else(half_of_free).unwrap_or(MEMORY_FALLBACK_BYTES),
            gpu: self.gpu,
            staged: self.staged,
            metrics,
        })
    }
}

fn exact() -> Decode {
    Decode::Exact
}

impl Settings {
    /// `--precision`, with `auto` resolved where a folder's choice depends on the device: the recipe must name the
    /// graph that will be loaded. The runtime library is loaded early only then.
    fn precision_of(&self, model: Option<&Path>, threads: usize) -> Result<Precision, Error> {
        let open = self.precision == Precision::Auto && model.is_some_and(files::depends_on_device);
        let runtime = || library::load(self.runtime.as_deref(), self.device, threads);
        Ok(if open && device::is_cuda(self.device, &self.gpu, runtime)? { Precision::Fp16 } else { self.precision })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: RunArgs,
    }

    fn args(line: &str) -> RunArgs {
        Only::parse_from(line.split_whitespace()).args
    }

    #[test]
    fn a_restart_without_flags_has_the_settings_of_the_last_run() {
        let line = "run x.db --detector /m/a.onnx --embedder /m/b --device cpu --box-threshold 0.5 --keep 3 --on-empty whole \
                    --truncated use --max-pixels 1000 --crop-fit pad --normalize yes --crops /c --batch 2 --threads 1 --memory 1GiB --vram 6GiB --decode exact --staged --shape-step 64 \
                    --cudnn-search exhaustive --cudnn-workspace max";
        let first = Settings::default().overridden_by(&args(line));
        let json = serde_json::to_string(&first).unwrap();
        let second = Settings::remembered(Some(&json)).unwrap().overridden_by(&args("run x.db"));
        assert_eq!(second, first);
        let third = second.overridden_by(&args(
            "run x.db --detector none --crop-fit model --crops none --batch auto --staged auto --shape-step none",
        ));
        assert_eq!((third.detector, third.crop_fit, third.crops), (None, None, None));
        assert_eq!((first.shape_step_px, third.shape_step_px), (Some(64), None));
        assert_eq!((third.batch_size, third.staged), (Batch::Auto, false));
    }

    #[test]
    fn settings_of_an_older_database_are_understood() {
        let settings = Settings::remembered(Some(r#"{"embedder": "/m/b", "gone": 1, "batch": 4}"#)).unwrap();
        assert_eq!((settings.embedder, settings.batch_size), (Some(PathBuf::from("/m/b")), Batch::Auto));
        assert_eq!((settings.decode, Settings::default().decode), (Decode::Exact, Decode::Scaled));
        assert_eq!(settings.shape_step_px, None);
    }
}
