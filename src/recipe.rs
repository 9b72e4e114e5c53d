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
    /// Proportions kept, nothing cut and nothing filled: every picture has an input size of its own. The short
    /// side becomes `shortest_px`, or less where the long one would exceed `longest_px`; both are rounded down
    /// to a multiple of `multiple_px`. Hugging Face `get_size_with_aspect_ratio`, of the DETR processors and
    /// (with 16) of YOLOS.
    Scale {
        /// Short side wanted.
        shortest_px: u32,
        /// Long side allowed.
        longest_px: u32,
        /// 1 where any side will do.
        multiple_px: u32,
        /// The tensor's sides are rounded up to a multiple of this, so that pictures share a shape; beside and below the
        /// picture it is 0 after normalisation. 1 where the tensor is the picture.
        step_px: u32,
    },
    /// Scaled until it fits, put into the top left corner; the rest is 0 after normalisation. What a family of
    /// `Scale` gets where its graph has a fixed size.
    Corner,
    /// Put into the top left corner of a black square, blurred by a Gaussian where it shrinks, and
    /// sampled bilinearly in floating point: Hugging Face `Owlv2ImageProcessor`. The filter is not used.
    SquareBlur,
}

/// How pixels become numbers: `(value / 255 - mean) / std` per channel, RGB, NCHW, f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageInput {
    /// Size of the model's input; with [`Fit::Scale`] the largest of its sides, both ways.
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
    /// Size of the tensor of a picture or region of `region` pixels.
    pub fn tensor_size(&self, region: Size) -> Size {
        stepped(self.picture_size(region), self.fit)
    }

    /// Size of the part of that tensor, from its top left corner, which [`Fit::Scale`] gives to the picture; with any
    /// other fit the whole.
    pub fn picture_size(&self, region: Size) -> Size {
        match self.fit {
            Fit::Scale { shortest_px, longest_px, multiple_px, .. } => {
                scaled(region, shortest_px, longest_px, multiple_px.max(1))
            }
            Fit::Squash | Fit::Pad { .. } | Fit::Center { .. } | Fit::Corner | Fit::SquareBlur => self.size,
        }
    }

    /// Numbers in the tensor of a picture or region of `region` pixels: 3 channels.
    pub fn values(&self, region: Size) -> usize {
        3 * self.tensor_size(region).pixels() as usize
    }

    /// The largest tensor that a picture can get; with [`Fit::Scale`] it may also lie on its side.
    pub fn size_most(&self) -> Size {
        match self.fit {
            Fit::Scale { shortest_px, longest_px, .. } => stepped(Size::new(longest_px, shortest_px), self.fit),
            _ => self.size,
        }
    }

    /// The most that [`Self::values`] can be.
    pub fn values_most(&self) -> usize {
        (self.size_most().pixels() as usize).saturating_mul(3)
    }
}

/// Sides rounded up as [`Fit::Scale`] says.
fn stepped(size: Size, fit: Fit) -> Size {
    match fit {
        Fit::Scale { step_px, .. } => {
            let side = |px: u32| px.checked_next_multiple_of(step_px.max(1)).unwrap_or(px);
            Size::new(side(size.width_px), side(size.height_px))
        }
        _ => size,
    }
}

/// `get_size_with_aspect_ratio` of `transformers`, `image_transforms.py`; its arithmetic is kept step by step,
/// because a side that differs by one is another picture.
fn scaled(region: Size, shortest_px: u32, longest_px: u32, multiple_px: u32) -> Size {
    let (width, height) = (f64::from(region.width_px), f64::from(region.height_px));
    let (short, long) = (width.min(height).max(1.0), width.max(height).max(1.0));
    let (mut side, mut exact) = (f64::from(shortest_px), f64::from(shortest_px));
    if long / short * side > f64::from(longest_px) {
        exact = f64::from(longest_px) * short / long;
        // Python's `round` takes halves to the even side.
        side = exact.round_ties_even();
    }
    let other = (exact * long / short).floor();
    let (to_width, to_height) = if short == side {
        (width, height)
    } else if width < height {
        (side, other)
    } else {
        (other, side)
    };
    let whole = |length: f64| {
        let length = length as u32;
        (length - length % multiple_px).max(multiple_px)
    };
    Size::new(whole(to_width), whole(to_height))
}

/// Which candidates become regions. Nothing here needs the model again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    /// A region's score is above this.
    pub box_threshold: f32,
    /// Score of a token that counts for a label; with [`Labels::Phrases`] only.
    pub text_threshold: f32,
    /// Two boxes that overlap more than this are one object; 1 for never.
    pub nms_iou: f32,
    /// Between which boxes.
    pub nms: Nms,
    /// Boxes with a shorter side, in pixels of the upright image, are no regions.
    pub min_box_px: f32,
    /// What is added around a box on each side, in parts of its width and height.
    pub margin: f32,
    /// How many per image, best first.
    pub keep: Keep,
    /// What an image without any becomes.
    pub on_empty: OnEmpty,
}

/// Which overlapping boxes are one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Nms {
    /// Those of one label.
    Label,
    /// All, whatever their labels.
    Across,
}

/// `--labels`: where the label of a text-prompted detection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Labels {
    /// The label of the prompt that holds the best token.
    Spans,
    /// All tokens above the text threshold, decoded: the reference's rule. May be no label of the prompt.
    Phrases,
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

/// `--decode`: at what size JPEGs are decoded. Grey and three-component JPEGs only; all else, and what
/// [`Fit::SquareBlur`] prepares, is decoded at full size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decode {
    /// No more than is used: at the smallest of 1, 1/2, 1/4 and 1/8 at which results are those of the full size. See
    /// [`Self::detector_spare`] and [`Self::embedder_spare`].
    #[default]
    Scaled,
    /// Everything at full size.
    Exact,
}

impl Decode {
    /// Pixels that a picture has per pixel of a detector's input, along a side and at least; `None` for full size. With
    /// 1, 51 of 53 boxes of a YOLOv3-tiny in photos of 2 to 12 MP kept an IoU of 0.95 with those of the exact decode; with
    /// 2, 46 of 46, at 0.987 or more.
    pub fn detector_spare(self) -> Option<u32> {
        match self {
            Self::Scaled => Some(2),
            Self::Exact => None,
        }
    }

    /// The same of an embedder's input; `patches` says that it begins by cutting its input into patches of 8 pixels or
    /// more. Least cosine with the vectors of the exact decode, over photos of 2 to 24 MP with grain: a trained ViT-S/14
    /// keeps 0.9996 with 1.2 and 0.99997 with 1.7; an EfficientNet-Lite0 0.992 with 1, 0.9993 with 2 and 0.9996 with 4.
    pub fn embedder_spare(self, patches: bool) -> Option<u32> {
        match (self, patches) {
            (Self::Scaled, true) => Some(1),
            (Self::Scaled, false) => Some(4),
            (Self::Exact, _) => None,
        }
    }
}

/// Everything that decides what `detect` stores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetectRecipe {
    /// SHA-256 over the model's files, in hex.
    pub model_digest: String,
    /// Version of this program's reading of outputs; raised when results change.
    pub adapter_version: u32,
    /// Labels of images that have no prompt of their own.
    pub prompt: Option<String>,
    /// Where labels come from.
    pub labels: Labels,
    /// Detections at or below this score are forgotten.
    pub candidate_floor: f32,
    /// What a file that ends early becomes.
    pub truncated: Truncated,
    /// At what size JPEGs are decoded.
    #[serde(default = "exact", skip_serializing_if = "is_exact")]
    pub decode: Decode,
    /// `--shape-step`, where it is used. Recipes without the key are from before it, and without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape_step_px: Option<u32>,
    /// Which candidates become regions.
    pub selection: Selection,
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
    /// At what size JPEGs are decoded.
    #[serde(default = "exact", skip_serializing_if = "is_exact")]
    pub decode: Decode,
}

/// Recipes without the key are from before there was a choice.
fn exact() -> Decode {
    Decode::Exact
}

fn is_exact(decode: &Decode) -> bool {
    *decode == Decode::Exact
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

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(shortest_px: u32, longest_px: u32, multiple_px: u32) -> ImageInput {
        ImageInput {
            size: Size::new(longest_px, longest_px),
            filter: Filter::Bilinear,
            fit: Fit::Scale { shortest_px, longest_px, multiple_px, step_px: 1 },
            mean: [0.0; 3],
            std: [1.0; 3],
        }
    }

    #[test]
    fn sides_are_those_of_the_reference() {
        // Taken from `GroundingDinoImageProcessor` of transformers 5.24.
        for ((width, height), (to_width, to_height)) in [
            ((810, 1080), (800, 1066)),
            ((1280, 720), (1333, 750)),
            ((640, 427), (1199, 800)),
            ((512, 512), (800, 800)),
            ((600, 400), (1200, 800)),
            ((451, 300), (1202, 800)),
            ((200, 1200), (222, 1333)),
            ((1600, 240), (1333, 200)),
            ((321, 213), (1205, 800)),
        ] {
            let to = scale(800, 1333, 1).tensor_size(Size::new(width, height));
            assert_eq!(to, Size::new(to_width, to_height), "{width}x{height}");
        }
    }

    #[test]
    fn a_multiple_rounds_down_and_leaves_a_side() {
        assert_eq!(scale(512, 1333, 16).tensor_size(Size::new(640, 427)), Size::new(752, 512));
        assert_eq!(scale(512, 1333, 16).tensor_size(Size::new(30_000, 3)), Size::new(1328, 16));
        assert_eq!(scale(800, 1333, 1).tensor_size(Size::new(1, 9000)), Size::new(1, 1333));
    }

    fn stepped_by(step_px: u32) -> ImageInput {
        let fit = Fit::Scale { shortest_px: 800, longest_px: 1333, multiple_px: 1, step_px };
        ImageInput { fit, ..scale(800, 1333, 1) }
    }

    #[test]
    fn no_picture_needs_more_than_the_most() {
        for input in [1, 64, 100, 512].map(stepped_by) {
            for (width, height) in [(1, 1), (1333, 800), (3000, 1800), (799, 1333), (5, 4)] {
                assert!(input.values(Size::new(width, height)) <= input.values_most(), "{width}x{height}");
            }
        }
    }

    #[test]
    fn a_step_rounds_the_tensors_sides_up_and_leaves_the_picture_its_own() {
        let region = Size::new(640, 427);
        assert_eq!(stepped_by(64).tensor_size(region), Size::new(1216, 832));
        assert_eq!(stepped_by(64).picture_size(region), Size::new(1199, 800));
        assert_eq!(stepped_by(50).tensor_size(Size::new(300, 200)), Size::new(1200, 800), "nothing to round");
        assert_eq!(stepped_by(64).size_most(), Size::new(1344, 832));
    }

    #[test]
    fn a_step_leaves_few_shapes_of_many() {
        // Sides of photos as cameras, telephones and hands that crop give them.
        let photos = (0..400_u32).map(|n| Size::new(1200 + n * 37 % 1900, 900 + n * 53 % 1600));
        let shapes = |input: &ImageInput| {
            let all: std::collections::BTreeSet<_> =
                photos.clone().map(|photo| input.tensor_size(photo)).map(|s| (s.width_px, s.height_px)).collect();
            all.len()
        };
        let counts = [1, 32, 64, 128].map(|step| shapes(&stepped_by(step)));
        assert!(counts[0] > 200 && counts[2] <= 24 && counts.is_sorted_by(|a, b| a > b), "{counts:?}");
    }
}
