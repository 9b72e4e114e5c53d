//! What an image processor of Hugging Face does where its file is silent, by its class.
//!
//! Source: `transformers` 5.24, the class attributes of `image_processing_*.py`.

use crate::recipe::Filter;

/// `IMAGENET_DEFAULT_MEAN` and `_STD`.
const IMAGENET: Numbers = Numbers { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };

/// `IMAGENET_STANDARD_MEAN` and `_STD`.
const HALVES: Numbers = Numbers { mean: [0.5; 3], std: [0.5; 3] };

/// `OPENAI_CLIP_MEAN` and `_STD`.
const OPENAI: Numbers =
    Numbers { mean: [0.481_454_66, 0.457_827_5, 0.408_210_73], std: [0.268_629_54, 0.261_302_58, 0.275_777_11] };

/// Mean and standard deviation per channel, for values from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Numbers {
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

/// What becomes of a picture's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Resized to two sides, or to a short one and the middle cut out.
    Plain,
    /// `crop_pct`: a part is cut out of what is smaller than 384, and the rest is stretched.
    Part,
    /// Resized within a short and a long side, to multiples of that many pixels; `do_pad` fills a batch only.
    Scaled { multiple_px: u32 },
    /// Padded to a square, then resized with a blur.
    SquareBlur,
}

/// `size` in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sides {
    Both { height_px: u32, width_px: u32 },
    Shortest(u32),
    Within { shortest_px: u32, longest_px: u32 },
}

/// A class of processors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Habit {
    pub filter: Filter,
    pub numbers: Numbers,
    pub do_normalize: bool,
    pub size: Sides,
    pub center_crop: Option<u32>,
    /// One number for `size` is a square, and else the short side.
    pub number_is_square: bool,
    pub shape: Shape,
}

const fn square(side_px: u32) -> Sides {
    Sides::Both { height_px: side_px, width_px: side_px }
}

const VIT: Habit = Habit {
    filter: Filter::Bilinear,
    numbers: HALVES,
    do_normalize: true,
    size: square(224),
    center_crop: None,
    number_is_square: true,
    shape: Shape::Plain,
};

const CLIP: Habit = Habit {
    filter: Filter::Bicubic,
    numbers: OPENAI,
    size: Sides::Shortest(224),
    center_crop: Some(224),
    number_is_square: false,
    ..VIT
};

const DETR: Habit = Habit {
    numbers: IMAGENET,
    size: Sides::Within { shortest_px: 800, longest_px: 1333 },
    number_is_square: false,
    shape: Shape::Scaled { multiple_px: 1 },
    ..VIT
};

impl Habit {
    /// The habit of the class of that name: `CLIPImageProcessor`, and the same with `Fast`, `Pil`, or as
    /// `CLIPFeatureExtractor`.
    pub(super) fn of_class(name: &str) -> Option<Self> {
        let family = ["ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor"]
            .iter()
            .find_map(|ending| name.strip_suffix(ending))?;
        Some(match family {
            "ViT" | "Swin" => VIT,
            "DeiT" => Self { filter: Filter::Bicubic, size: square(256), center_crop: Some(224), ..VIT },
            "Beit" => Self { filter: Filter::Bicubic, ..VIT },
            "DPT" => Self { filter: Filter::Bicubic, size: square(384), ..VIT },
            "DINOv3ViT" => Self { numbers: IMAGENET, ..VIT },
            "Pvt" => Self { filter: Filter::Bicubic, numbers: IMAGENET, ..VIT },
            "Segformer" => Self { numbers: IMAGENET, size: square(512), ..VIT },
            "CLIP" | "Bit" | "ChineseCLIP" => CLIP,
            "Siglip" => Self { filter: Filter::Bicubic, number_is_square: false, ..VIT },
            "Blip" => Self { filter: Filter::Bicubic, numbers: OPENAI, size: square(384), ..VIT },
            "MobileNetV1" | "MobileNetV2" => {
                Self { size: Sides::Shortest(256), center_crop: Some(224), number_is_square: false, ..VIT }
            }
            "ConvNext" => Self {
                filter: Filter::Bicubic,
                size: Sides::Shortest(384),
                number_is_square: false,
                shape: Shape::Part,
                ..VIT
            },
            "Detr" | "ConditionalDetr" | "DeformableDetr" | "GroundingDino" => DETR,
            "Yolos" => Self { shape: Shape::Scaled { multiple_px: 16 }, ..DETR },
            "RTDetr" => Self { do_normalize: false, size: square(640), ..DETR },
            "OwlViT" => Self { filter: Filter::Bicubic, numbers: OPENAI, size: square(768), ..VIT },
            "Owlv2" => Self { numbers: OPENAI, size: square(960), shape: Shape::SquareBlur, ..VIT },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_known_by_all_its_names() {
        for name in ["CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil", "CLIPFeatureExtractor"] {
            assert_eq!(Habit::of_class(name), Some(CLIP), "{name}");
        }
        for name in ["CLIPProcessor", "CLIP", "Siglip2ImageProcessor", ""] {
            assert_eq!(Habit::of_class(name), None, "{name}");
        }
    }
}
