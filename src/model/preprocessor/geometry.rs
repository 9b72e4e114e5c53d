//! Size and shape: what of a preprocessor's file becomes the input's size and a [`Fit`].

use serde_json::Value;

use super::Config;
use super::habit::{Habit, Shape, Sides};
use crate::geometry::Size;
use crate::recipe::Fit;

/// From this short side on, ConvNeXT's processor stretches and cuts nothing out.
const STRETCHED_FROM_PX: u32 = 384;

/// `crop_pct` of ConvNeXT's processor where none is given.
const CROP_PCT_DEFAULT: f64 = 224.0 / 256.0;

/// The long side of DETR's processors where a `size` without one is given.
const LONGEST_PX_DEFAULT: u32 = 1333;

/// Size and fit of a file, where the habit of its class fills the gaps.
///
/// # Errors
/// A shape that cannot be had exactly; names the key.
pub(super) fn geometry(config: &Config, habit: Option<&Habit>) -> Result<(Size, Fit), String> {
    if config.do_resize == Some(false) {
        return Err("do_resize is false: regions have no fixed size".to_owned());
    }
    let cuts = config.do_center_crop.unwrap_or(habit.is_some_and(|h| h.center_crop.is_some()));
    let is_square = config.default_to_square.unwrap_or(habit.map_or(!cuts, |h| h.number_is_square));
    let shape = habit.map_or(Shape::Plain, |h| h.shape);
    let longest_px = match shape {
        Shape::Scaled { .. } => Some(config.max_size.unwrap_or(LONGEST_PX_DEFAULT)),
        _ => config.max_size,
    };
    let size = match (&config.size, habit) {
        (Some(value), _) => sides(value, "size", is_square, longest_px)?,
        (None, Some(habit)) => habit.size,
        (None, None) => return Err("size is missing".to_owned()),
    };
    let pads = config.do_pad.unwrap_or(matches!(shape, Shape::SquareBlur));
    match (shape, pads) {
        (Shape::Plain | Shape::Part, true) => Err("do_pad is not supported".to_owned()),
        (Shape::SquareBlur, false) => Err("do_pad is false, which is not supported".to_owned()),
        (Shape::SquareBlur, true) => Ok((both(size)?, Fit::SquareBlur)),
        (Shape::Scaled { multiple_px }, _) => match size {
            Sides::Within { .. } => Ok(within(size, multiple_px)),
            Sides::Both { .. } => Ok((both(size)?, Fit::Squash)),
            Sides::Shortest(_) => Err("size has a shortest_edge without a longest_edge".to_owned()),
        },
        (Shape::Part, false) => part(config, size),
        (Shape::Plain, false) if config.crop_pct.is_some() => Err("crop_pct is not supported".to_owned()),
        (Shape::Plain, false) if cuts => middle(config, habit, size),
        (Shape::Plain, false) => match size {
            Sides::Within { .. } => Ok(within(size, 1)),
            Sides::Both { .. } => Ok((both(size)?, Fit::Squash)),
            Sides::Shortest(_) => Err("size.shortest_edge without do_center_crop gives no fixed size".to_owned()),
        },
    }
}

/// Resized, then the middle is cut out.
fn middle(config: &Config, habit: Option<&Habit>, size: Sides) -> Result<(Size, Fit), String> {
    let crop = match (&config.crop_size, habit.and_then(|h| h.center_crop)) {
        (Some(value), _) => match sides(value, "crop_size", true, None)? {
            Sides::Shortest(side) => Size::new(side, side),
            other => both(other)?,
        },
        (None, Some(side)) => Size::new(side, side),
        (None, None) => return Err("crop_size is missing".to_owned()),
    };
    match size {
        Sides::Shortest(resize_shortest_px) => Ok((crop, Fit::Center { resize_shortest_px })),
        Sides::Both { .. } if both(size)? == crop => Ok((crop, Fit::Squash)),
        _ => Err("size of two sides with another crop_size is not supported".to_owned()),
    }
}

/// `ConvNextImageProcessor.resize`.
fn part(config: &Config, size: Sides) -> Result<(Size, Fit), String> {
    let Sides::Shortest(side) = size else {
        return Err("size of this class must be a shortest_edge".to_owned());
    };
    let whole = Size::new(side, side);
    if side >= STRETCHED_FROM_PX {
        return Ok((whole, Fit::Squash));
    }
    let crop_pct = config.crop_pct.unwrap_or(CROP_PCT_DEFAULT);
    center_of(whole, crop_pct)
}

/// The short side that leaves `crop_pct` of itself when `whole` is cut out.
pub(super) fn center_of(whole: Size, crop_pct: f64) -> Result<(Size, Fit), String> {
    if !(crop_pct > 0.01 && crop_pct <= 1.0) {
        return Err(format!("crop_pct is {crop_pct}"));
    }
    let resize_shortest_px = (f64::from(whole.width_px) / crop_pct).floor() as u32;
    Ok((whole, Fit::Center { resize_shortest_px }))
}

fn within(size: Sides, multiple_px: u32) -> (Size, Fit) {
    let (shortest_px, longest_px) = match size {
        Sides::Within { shortest_px, longest_px } => (shortest_px, longest_px),
        Sides::Shortest(side) => (side, side),
        Sides::Both { height_px, width_px } => (height_px.min(width_px), height_px.max(width_px)),
    };
    (Size::new(longest_px, longest_px), Fit::Scale { shortest_px, longest_px, multiple_px, step_px: 1 })
}

pub(super) fn both(size: Sides) -> Result<Size, String> {
    match size {
        Sides::Both { height_px, width_px } => Ok(Size::new(width_px, height_px)),
        _ => Err("size must have a height and a width here".to_owned()),
    }
}

/// One number is a square for processors that stretch, and the short side for those that cut the middle out
/// (`default_to_square` in `get_size_dict`), with `longest_px` where that is known; a list is height, width.
pub(super) fn sides(
    value: &Value,
    key: &str,
    number_is_square: bool,
    longest_px: Option<u32>,
) -> Result<Sides, String> {
    let side = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0);
    let unknown = || {
        format!("{key} is {value}; known are a number, shortest_edge with or without longest_edge, or height and width")
    };
    if let Some(n) = side(value) {
        return Ok(match longest_px {
            _ if number_is_square => Sides::Both { height_px: n, width_px: n },
            Some(longest_px) => Sides::Within { shortest_px: n, longest_px },
            None => Sides::Shortest(n),
        });
    }
    if let Some([height, width]) = value.as_array().map(Vec::as_slice) {
        let (height_px, width_px) = side(height).zip(side(width)).ok_or_else(unknown)?;
        return Ok(Sides::Both { height_px, width_px });
    }
    let object = value.as_object().ok_or_else(unknown)?;
    let said = object.iter().filter(|(_, v)| !v.is_null()).count();
    let get = |name: &str| object.get(name).and_then(side);
    match (said, get("shortest_edge"), get("longest_edge"), get("height").zip(get("width"))) {
        (1, Some(shortest), None, None) => Ok(Sides::Shortest(shortest)),
        (2, Some(shortest_px), Some(longest_px), None) => Ok(Sides::Within { shortest_px, longest_px }),
        (2, None, None, Some((height_px, width_px))) => Ok(Sides::Both { height_px, width_px }),
        _ => Err(unknown()),
    }
}

#[cfg(test)]
pub(in crate::model::preprocessor) mod tests {
    use super::super::tests::{of_class, parsed};
    use super::*;
    use crate::recipe::Filter;

    pub(in crate::model::preprocessor) fn square(side: u32) -> Option<Size> {
        Some(Size::new(side, side))
    }

    pub(in crate::model::preprocessor) fn scale(shortest_px: u32, longest_px: u32, multiple_px: u32) -> Option<Fit> {
        Some(Fit::Scale { shortest_px, longest_px, multiple_px, step_px: 1 })
    }

    const DINOV2: &str = r#"{"crop_size": {"height": 224, "width": 224}, "do_center_crop": true, "do_convert_rgb": true,
        "do_normalize": true, "do_rescale": true, "do_resize": true, "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "BitImageProcessor", "image_std": [0.229, 0.224, 0.225], "resample": 3,
        "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 256}}"#;

    #[test]
    fn dinov2_resizes_the_short_side_and_cuts_the_middle_out() {
        let draft = parsed(DINOV2).unwrap();
        assert_eq!(draft.size, Some(Size::new(224, 224)));
        assert_eq!(draft.fit, Some(Fit::Center { resize_shortest_px: 256 }));
        assert_eq!(draft.filter, Some(Filter::Bicubic));
        assert_eq!((draft.mean, draft.std), (Some([0.485, 0.456, 0.406]), Some([0.229, 0.224, 0.225])));
    }

    #[test]
    fn a_number_is_a_square_for_vit_and_the_short_side_for_clip() {
        let vit =
            parsed(r#"{"size": 224, "resample": 2, "image_mean": [0.5,0.5,0.5], "image_std": [0.5,0.5,0.5]}"#).unwrap();
        assert_eq!((vit.size, vit.fit), (Some(Size::new(224, 224)), Some(Fit::Squash)));
        let clip = parsed(
            r#"{"size": 224, "crop_size": 224, "do_center_crop": true, "resample": 3,
                "image_mean": [0.5,0.5,0.5], "image_std": [0.5,0.5,0.5]}"#,
        )
        .unwrap();
        assert_eq!(clip.fit, Some(Fit::Center { resize_shortest_px: 224 }));
    }

    #[test]
    fn height_and_width_do_not_change_places() {
        let draft = parsed(r#"{"size": {"height": 384, "width": 128}, "resample": 1, "do_normalize": false}"#).unwrap();
        assert_eq!(draft.size, Some(Size::new(128, 384)));
        assert_eq!((draft.filter, draft.mean, draft.std), (Some(Filter::Lanczos3), Some([0.0; 3]), Some([1.0; 3])));
    }

    #[test]
    fn detectors_scale_within_two_sides_in_the_forms_of_all_years() {
        for (keys, expected) in [
            (r#""size": {"shortest_edge": 512, "longest_edge": 864}, "do_pad": true"#, scale(512, 864, 16)),
            (r#""size": 512, "max_size": 864"#, scale(512, 864, 16)),
            (r#""size": 512"#, scale(512, 1333, 16)),
            (
                r#""size": {"shortest_edge": 512, "longest_edge": 864, "height": null}, "pad_size": null"#,
                scale(512, 864, 16),
            ),
            (r#""size": {"height": 512, "width": 864}"#, Some(Fit::Squash)),
        ] {
            assert_eq!(of_class("YolosImageProcessor", keys).unwrap().fit, expected, "{keys}");
        }
        let list =
            of_class("OwlViTFeatureExtractor", r#""size": [768, 384], "do_center_crop": false, "crop_size": 768"#);
        assert_eq!(list.unwrap().size, Some(Size::new(384, 768)));
    }

    #[test]
    fn a_part_is_cut_out_below_384_and_nothing_from_there_on() {
        for (keys, side, fit) in [
            (r#""size": 224"#, 224, Fit::Center { resize_shortest_px: 256 }),
            (r#""size": {"shortest_edge": 224}, "crop_pct": 0.875"#, 224, Fit::Center { resize_shortest_px: 256 }),
            (r#""size": {"shortest_edge": 288}, "crop_pct": 0.95"#, 288, Fit::Center { resize_shortest_px: 303 }),
            (r#""size": {"shortest_edge": 384}, "crop_pct": 0.875"#, 384, Fit::Squash),
        ] {
            let draft = of_class("ConvNextFeatureExtractor", keys).unwrap();
            assert_eq!((draft.size, draft.fit), (square(side), Some(fit)), "{keys}");
        }
    }
}
