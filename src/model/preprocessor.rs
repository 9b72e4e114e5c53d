//! `preprocessor_config.json`, as Hugging Face image processors write it. What cannot be followed exactly is
//! refused with a hint to `croprow.toml`, because a nearly right input gives nearly right vectors.
//!
//! Source of the rules: `transformers`, `image_processing_utils.py` (`get_size_dict`) and the processors of
//! ViT, CLIP and BiT (DINOv2).

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::input::Draft;
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::{Filter, Fit};

/// The keys that decide; others (names of classes, packing) do not matter.
#[derive(Debug, Default, Deserialize)]
struct Config {
    size: Option<Value>,
    crop_size: Option<Value>,
    do_resize: Option<bool>,
    do_center_crop: Option<bool>,
    do_rescale: Option<bool>,
    rescale_factor: Option<f64>,
    do_normalize: Option<bool>,
    do_pad: Option<bool>,
    crop_pct: Option<f64>,
    resample: Option<u8>,
    image_mean: Option<[f64; 3]>,
    image_std: Option<[f64; 3]>,
}

/// Reads the file.
///
/// # Errors
/// It cannot be read or followed; the message names the file and the key.
pub(super) fn read(path: &Path) -> Result<Draft, Error> {
    let refuse = |why: String| Error::StartUp(format!("{}: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
    parse(&text).map_err(|why| refuse(format!("{why}; say how the model is fed in croprow.toml beside it")))
}

fn parse(text: &str) -> Result<Draft, String> {
    let config: Config = serde_json::from_str(text).map_err(|e| e.to_string())?;
    if config.crop_pct.is_some() {
        return Err("crop_pct is not supported".to_owned());
    }
    if config.do_pad == Some(true) {
        return Err("do_pad is not supported".to_owned());
    }
    let (size, fit) = geometry(&config)?;
    let filter = match config.resample {
        Some(0) => Filter::Nearest,
        Some(1) => Filter::Lanczos3,
        Some(2) => Filter::Bilinear,
        Some(3) => Filter::Bicubic,
        other => {
            return Err(format!("resample is {other:?}; known are 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic"));
        }
    };
    let (mean, std) = numbers(&config)?;
    Ok(Draft { size: Some(size), filter: Some(filter), fit: Some(fit), mean: Some(mean), std: Some(std) })
}

/// `size` or `crop_size`.
enum Sides {
    Shortest(u32),
    Both(Size),
}

fn geometry(config: &Config) -> Result<(Size, Fit), String> {
    if config.do_resize == Some(false) {
        return Err("do_resize is false: regions have no fixed size".to_owned());
    }
    let cuts = config.do_center_crop.unwrap_or(false);
    let size = sides(config.size.as_ref().ok_or("size is missing")?, "size", !cuts)?;
    if !cuts {
        return match size {
            Sides::Both(size) => Ok((size, Fit::Squash)),
            Sides::Shortest(_) => Err("size.shortest_edge without do_center_crop gives no fixed size".to_owned()),
        };
    }
    let crop = match sides(config.crop_size.as_ref().ok_or("crop_size is missing")?, "crop_size", true)? {
        Sides::Both(size) => size,
        Sides::Shortest(side) => Size::new(side, side),
    };
    match size {
        Sides::Shortest(resize_shortest_px) => Ok((crop, Fit::Center { resize_shortest_px })),
        Sides::Both(size) if size == crop => Ok((crop, Fit::Squash)),
        Sides::Both(_) => Err("size of two sides with another crop_size is not supported".to_owned()),
    }
}

/// One number is a square for processors that stretch, and the short side for those that cut the middle out
/// (`default_to_square` in `get_size_dict`).
fn sides(value: &Value, key: &str, number_is_square: bool) -> Result<Sides, String> {
    let side = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0);
    let unknown = || format!("{key} is {value}; known are a number, shortest_edge, or height and width");
    if let Some(n) = side(value) {
        return Ok(if number_is_square { Sides::Both(Size::new(n, n)) } else { Sides::Shortest(n) });
    }
    let object = value.as_object().ok_or_else(unknown)?;
    let get = |name: &str| object.get(name).and_then(side);
    match (object.len(), get("shortest_edge"), get("height"), get("width")) {
        (1, Some(shortest), None, None) => Ok(Sides::Shortest(shortest)),
        (2, None, Some(height), Some(width)) => Ok(Sides::Both(Size::new(width, height))),
        _ => Err(unknown()),
    }
}

/// Mean and standard deviation for values divided by 255. The file's hold for values times `rescale_factor`:
/// `(v * f - m) / s = (v / 255 - m / (255 f)) / (s / (255 f))`.
fn numbers(config: &Config) -> Result<([f32; 3], [f32; 3]), String> {
    let factor = if config.do_rescale.unwrap_or(true) { config.rescale_factor.unwrap_or(1.0 / 255.0) } else { 1.0 };
    let per_unit = 255.0 * factor;
    if !per_unit.is_finite() || per_unit <= 0.0 {
        return Err(format!("rescale_factor is {factor}"));
    }
    let (mean, std) = if config.do_normalize.unwrap_or(true) {
        (config.image_mean.ok_or("image_mean is missing")?, config.image_std.ok_or("image_std is missing")?)
    } else {
        ([0.0; 3], [1.0; 3])
    };
    if std.contains(&0.0) {
        return Err("image_std has a 0".to_owned());
    }
    // 255 * (1 / 255) is 1 only nearly; the common case must keep the file's own numbers.
    let scaled = |v: f64| {
        if (per_unit - 1.0).abs() < 1e-6 { v as f32 } else { (v / per_unit) as f32 }
    };
    Ok((mean.map(scaled), std.map(scaled)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DINOV2: &str = r#"{"crop_size": {"height": 224, "width": 224}, "do_center_crop": true, "do_convert_rgb": true,
        "do_normalize": true, "do_rescale": true, "do_resize": true, "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "BitImageProcessor", "image_std": [0.229, 0.224, 0.225], "resample": 3,
        "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 256}}"#;

    #[test]
    fn dinov2_resizes_the_short_side_and_cuts_the_middle_out() {
        let draft = parse(DINOV2).unwrap();
        assert_eq!(draft.size, Some(Size::new(224, 224)));
        assert_eq!(draft.fit, Some(Fit::Center { resize_shortest_px: 256 }));
        assert_eq!(draft.filter, Some(Filter::Bicubic));
        assert_eq!((draft.mean, draft.std), (Some([0.485, 0.456, 0.406]), Some([0.229, 0.224, 0.225])));
    }

    #[test]
    fn a_number_is_a_square_for_vit_and_the_short_side_for_clip() {
        let vit =
            parse(r#"{"size": 224, "resample": 2, "image_mean": [0.5,0.5,0.5], "image_std": [0.5,0.5,0.5]}"#).unwrap();
        assert_eq!((vit.size, vit.fit), (Some(Size::new(224, 224)), Some(Fit::Squash)));
        let clip = parse(
            r#"{"size": 224, "crop_size": 224, "do_center_crop": true, "resample": 3,
                "image_mean": [0.5,0.5,0.5], "image_std": [0.5,0.5,0.5]}"#,
        )
        .unwrap();
        assert_eq!(clip.fit, Some(Fit::Center { resize_shortest_px: 224 }));
    }

    #[test]
    fn height_and_width_do_not_change_places() {
        let draft = parse(r#"{"size": {"height": 384, "width": 128}, "resample": 1, "do_normalize": false}"#).unwrap();
        assert_eq!(draft.size, Some(Size::new(128, 384)));
        assert_eq!((draft.filter, draft.mean, draft.std), (Some(Filter::Lanczos3), Some([0.0; 3]), Some([1.0; 3])));
    }

    #[test]
    fn other_scales_are_brought_to_values_from_0_to_1() {
        let raw = parse(
            r#"{"size": 8, "resample": 0, "do_rescale": false, "image_mean": [127.5,127.5,127.5], "image_std": [255,255,255]}"#,
        )
        .unwrap();
        assert_eq!((raw.mean, raw.std), (Some([0.5; 3]), Some([1.0; 3])));
        let bare = parse(r#"{"size": 8, "resample": 0, "do_rescale": false, "do_normalize": false}"#).unwrap();
        assert_eq!(bare.std, Some([1.0 / 255.0; 3]));
    }

    #[test]
    fn what_cannot_be_followed_exactly_is_refused() {
        let base = r#""image_mean": [0.5,0.5,0.5], "image_std": [0.5,0.5,0.5]"#;
        for (keys, word) in [
            (r#""size": {"shortest_edge": 224}, "resample": 3"#, "no fixed size"),
            (r#""size": {"longest_edge": 224}, "resample": 3"#, "longest_edge"),
            (r#""size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3"#, "crop_pct"),
            (r#""size": 224, "resample": 3, "do_resize": false"#, "do_resize"),
            (r#""size": 224"#, "resample"),
            (r#""size": 224, "resample": 5"#, "resample"),
            (r#""resample": 3"#, "size is missing"),
            (
                r#""size": {"height": 256, "width": 256}, "crop_size": 224, "do_center_crop": true, "resample": 3"#,
                "another crop_size",
            ),
            (r#""size": 224, "resample": 3, "rescale_factor": 0.0"#, "rescale_factor"),
        ] {
            let text = parse(&format!("{{{keys}, {base}}}")).unwrap_err();
            assert!(text.contains(word), "{keys}: {text}");
        }
        assert!(parse(r#"{"size": 224, "resample": 3}"#).unwrap_err().contains("image_mean is missing"));
        assert!(parse("not json").is_err());
    }
}
