//! What decides a result. Two runs with the same recipe give the same results; a recipe is stored as
//! canonical JSON and compared by its text.

use serde::{Deserialize, Serialize};

use crate::geometry::Size;

/// Resampling filter. Downscaling is antialiased, as Pillow does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// No interpolation.
    Nearest,
    /// Triangle, support 1.
    Bilinear,
    /// Cubic convolution with a = -0.5, support 2.
    Bicubic,
    /// Windowed sinc, support 3.
    Lanczos3,
}

/// How a region fills a model's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// Both sides stretched to the input's size; proportions are lost, nothing is cut.
    Squash,
    /// Scaled until it fits, centred, the rest filled with the grey level `fill`. The rounding rule is
    /// Ultralytics' `LetterBox`: new side = round(side * r), offset = round((free) / 2 - 0.1).
    Pad {
        /// Grey level 0..=255 of the filling, before normalisation.
        fill: u8,
    },
    /// The short side is scaled to `resize_shortest_px`, the middle of the input's size is cut out:
    /// Hugging Face `do_resize` with `shortest_edge`, then `do_center_crop`. The borders are lost.
    Center {
        /// Short side after resizing.
        resize_shortest_px: u32,
    },
}

/// How pixels become numbers: `(value / 255 - mean) / std` per channel, RGB, NCHW, f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageInput {
    /// Size of the model's input.
    pub size: Size,
    /// Resampling filter.
    pub filter: Filter,
    /// How a region fills the input.
    pub fit: Fit,
    /// Per channel, after division by 255.
    pub mean: [f32; 3],
    /// Per channel, after division by 255.
    pub std: [f32; 3],
}

impl ImageInput {
    /// Numbers in one image's tensor: 3 channels of `size`.
    pub fn values(&self) -> usize {
        3 * self.size.pixels() as usize
    }
}

/// Which detections become regions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    /// Lowest score that is kept.
    pub box_threshold: f32,
    /// Two boxes of one class that overlap more than this are one object.
    pub nms_iou: f32,
    /// How many per image, best first.
    pub keep: Keep,
    /// What an image without any becomes.
    pub on_empty: OnEmpty,
}

/// How many regions of an image are kept, best score first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// All.
    All,
    /// At most that many; `best` on the command line is 1.
    Best(u32),
}

/// What an image without any detection becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnEmpty {
    /// Done with zero regions.
    Skip,
    /// The whole image is its region.
    Whole,
}

/// What a file that ends early becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// Failed with code `truncated`.
    Fail,
    /// Used as far as it goes, and marked in `images.truncated`.
    Use,
}

/// Everything that decides what `detect` stores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetectRecipe {
    /// SHA-256 over the model's files, in hex.
    pub model_digest: String,
    /// Version of this program's reading of outputs; raised when results change.
    pub adapter_version: u32,
    /// Which detections become regions.
    pub selection: Selection,
    /// What a file that ends early becomes.
    pub truncated: Truncated,
}

/// Everything that decides what `embed` stores for a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbedRecipe {
    /// SHA-256 over the model's files, in hex.
    pub model_digest: String,
    /// Version of this program's preprocessing and pooling; raised when results change.
    pub adapter_version: u32,
    /// `--crop-fit`, where it overrides the model's own rule.
    pub crop_fit: Option<CropFit>,
    /// L2 normalisation, where it overrides the model's own rule.
    pub normalize: Option<bool>,
}

/// `--crop-fit`: how a crop fills the embedder's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CropFit {
    /// Stretched.
    Squash,
    /// Padded to a square with black.
    Pad,
    /// Short side scaled, middle cut out.
    Center,
}
