//! `preprocessor_config.json` and `processor_config.json`, as Hugging Face image processors of all years write them,
//! and the `pretrained_cfg` of timm. What cannot be followed exactly is refused with a hint to `croprow.toml`,
//! because a nearly right input gives nearly right vectors.
//!
//! Source of the rules: `transformers` 5.24, `image_processing_utils.py` (`get_size_dict`) and the classes that
//! [`Habit`] names; `timm`, `data/transforms_factory.py`.

mod geometry;
mod habit;
mod timm;

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use self::geometry::geometry;
use self::habit::{Habit, Numbers};
use super::files::{CONFIG, ModelFiles, PREPROCESSOR, PROCESSOR};
use super::input::Draft;
use crate::error::Error;
use crate::printable;
use crate::recipe::Filter;

/// The keys that decide; others (names of classes, packing, kinds of annotations) do not matter.
#[derive(Debug, Default, Deserialize)]
struct Config {
    image_processor_type: Option<String>,
    feature_extractor_type: Option<String>,
    size: Option<Value>,
    max_size: Option<u32>,
    crop_size: Option<Value>,
    default_to_square: Option<bool>,
    do_resize: Option<bool>,
    do_center_crop: Option<bool>,
    do_rescale: Option<bool>,
    rescale_factor: Option<f64>,
    do_normalize: Option<bool>,
    do_pad: Option<bool>,
    pad_size: Option<Value>,
    crop_pct: Option<f64>,
    resample: Option<Value>,
    image_mean: Option<Value>,
    image_std: Option<Value>,
    // Of some classes only, and refused where they are switched on.
    do_flip_channel_order: Option<bool>,
    keep_aspect_ratio: Option<bool>,
    ensure_multiple_of: Option<u32>,
    do_thumbnail: Option<bool>,
    max_num_patches: Option<u32>,
}

/// A file that says how a model is fed.
struct Source<'a> {
    path: &'a Path,
    said: Value,
    is_timm: bool,
}

/// What the model's files say of its input; `None` where no file says anything.
///
/// # Errors
/// A file cannot be read or followed; the message names the file and the key.
pub(super) fn read(files: &ModelFiles) -> Result<Option<Draft>, Error> {
    let Some(Source { path, said, is_timm }) = source(files)? else { return Ok(None) };
    let draft = if is_timm { timm::draft(&said) } else { transformers(&said) };
    draft.map(Some).map_err(|why| refuse(path, &format!("{why}; say how the model is fed in croprow.toml beside it")))
}

/// The name of the file that [`read`] follows.
///
/// # Errors
/// A file cannot be read.
pub(super) fn source_name(files: &ModelFiles) -> Result<Option<String>, Error> {
    let source = source(files)?;
    Ok(source.and_then(|s| s.path.file_name().map(|n| n.to_string_lossy().into_owned())))
}

/// The first of the places where hubs put it.
fn source(files: &ModelFiles) -> Result<Option<Source<'_>>, Error> {
    for name in [PREPROCESSOR, PROCESSOR, CONFIG] {
        let Some(path) = files.companion(name) else { continue };
        let text = fs::read_to_string(path).map_err(|e| refuse(path, &e.to_string()))?;
        let mut all: Value = serde_json::from_str(&text).map_err(|e| refuse(path, &e.to_string()))?;
        let part = |all: &mut Value, key: &str| all.get_mut(key).map(Value::take).filter(Value::is_object);
        if let Some(said) = part(&mut all, "pretrained_cfg") {
            return Ok(Some(Source { path, said, is_timm: true }));
        }
        let said = match name {
            PREPROCESSOR => Some(all),
            // Processors of text alone write the file too.
            PROCESSOR => part(&mut all, "image_processor"),
            _ => None,
        };
        if let Some(said) = said {
            return Ok(Some(Source { path, said, is_timm: false }));
        }
    }
    Ok(None)
}

fn refuse(path: &Path, why: &str) -> Error {
    Error::StartUp(format!("{}: {why}", printable::path(path)))
}

fn transformers(said: &Value) -> Result<Draft, String> {
    let config = Config::deserialize(said).map_err(|e| e.to_string())?;
    let class = config.image_processor_type.as_deref().or(config.feature_extractor_type.as_deref());
    let habit = match class {
        Some(name) => {
            Some(Habit::of_class(name).ok_or_else(|| format!("image processors of the class {name} are not known"))?)
        }
        None => None,
    };
    for (key, is_on) in [
        ("do_flip_channel_order", config.do_flip_channel_order == Some(true)),
        ("keep_aspect_ratio", config.keep_aspect_ratio == Some(true)),
        ("ensure_multiple_of", config.ensure_multiple_of.is_some_and(|n| n > 1)),
        ("do_thumbnail", config.do_thumbnail == Some(true)),
        ("max_num_patches", config.max_num_patches.is_some()),
        ("pad_size", config.pad_size.is_some()),
    ] {
        if is_on {
            return Err(format!("{key} is not supported"));
        }
    }
    let (size, fit) = geometry(&config, habit.as_ref())?;
    let filter = match (&config.resample, &habit) {
        (Some(resample), _) => filter_of(resample)?,
        (None, Some(habit)) => habit.filter,
        (None, None) => return Err("resample is missing".to_owned()),
    };
    let (mean, std) = numbers(&config, habit.as_ref())?;
    Ok(Draft { size: Some(size), filter: Some(filter), fit: Some(fit), mean: Some(mean), std: Some(std) })
}

/// A number of Pillow, or the name of one of its filters or of torchvision's.
fn filter_of(resample: &Value) -> Result<Filter, String> {
    let name = resample.as_str().map(|text| text.rsplit('.').next().unwrap_or(text).to_ascii_lowercase());
    match (resample.as_u64(), name.as_deref()) {
        (Some(0), _) | (_, Some("nearest")) => Ok(Filter::Nearest),
        (Some(1), _) | (_, Some("lanczos")) => Ok(Filter::Lanczos3),
        (Some(2), _) | (_, Some("bilinear")) => Ok(Filter::Bilinear),
        (Some(3), _) | (_, Some("bicubic")) => Ok(Filter::Bicubic),
        _ => Err(format!("resample is {resample}; known are 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic")),
    }
}

/// Mean and standard deviation for values divided by 255. The file's hold for values times `rescale_factor`:
/// `(v * f - m) / s = (v / 255 - m / (255 f)) / (s / (255 f))`.
fn numbers(config: &Config, habit: Option<&Habit>) -> Result<([f32; 3], [f32; 3]), String> {
    let factor = if config.do_rescale.unwrap_or(true) { config.rescale_factor.unwrap_or(1.0 / 255.0) } else { 1.0 };
    let per_unit = 255.0 * factor;
    if !per_unit.is_finite() || per_unit <= 0.0 {
        return Err(format!("rescale_factor is {factor}"));
    }
    let own = habit.map(|h| h.numbers);
    let Numbers { mean, std } = if config.do_normalize.unwrap_or(habit.is_none_or(|h| h.do_normalize)) {
        Numbers {
            mean: channels(config.image_mean.as_ref(), "image_mean", own.map(|n| n.mean))?,
            std: channels(config.image_std.as_ref(), "image_std", own.map(|n| n.std))?,
        }
    } else {
        Numbers { mean: [0.0; 3], std: [1.0; 3] }
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

/// Three numbers, or one for all channels.
fn channels(value: Option<&Value>, key: &str, own: Option<[f64; 3]>) -> Result<[f64; 3], String> {
    let Some(value) = value else { return own.ok_or_else(|| format!("{key} is missing")) };
    let one = value.as_f64().map(|v| [v; 3]);
    one.or_else(|| <[f64; 3]>::deserialize(value).ok())
        .ok_or_else(|| format!("{key} is {value}; wanted are three numbers"))
}

#[cfg(test)]
mod tests {
    use super::geometry::tests::{scale, square};
    use super::*;
    use crate::recipe::Fit;

    pub(super) fn parsed(text: &str) -> Result<Draft, String> {
        transformers(&serde_json::from_str(text).map_err(|e| e.to_string())?)
    }

    pub(super) fn of_class(class: &str, keys: &str) -> Result<Draft, String> {
        let comma = if keys.is_empty() { "" } else { ", " };
        parsed(&format!(r#"{{"image_processor_type": "{class}"{comma}{keys}}}"#))
    }

    #[test]
    fn other_scales_are_brought_to_values_from_0_to_1() {
        let raw = parsed(
            r#"{"size": 8, "resample": 0, "do_rescale": false, "image_mean": [127.5,127.5,127.5], "image_std": [255,255,255]}"#,
        )
        .unwrap();
        assert_eq!((raw.mean, raw.std), (Some([0.5; 3]), Some([1.0; 3])));
        let bare = parsed(r#"{"size": 8, "resample": 0, "do_rescale": false, "do_normalize": false}"#).unwrap();
        assert_eq!(bare.std, Some([1.0 / 255.0; 3]));
    }

    #[test]
    fn a_silent_file_means_the_habit_of_its_class() {
        let center = |resize_shortest_px| Some(Fit::Center { resize_shortest_px });
        for (class, size, fit, filter, mean) in [
            ("ViTFeatureExtractor", square(224), Some(Fit::Squash), Filter::Bilinear, 0.5),
            ("CLIPImageProcessorFast", square(224), center(224), Filter::Bicubic, 0.481_454_66),
            ("SiglipImageProcessor", square(224), Some(Fit::Squash), Filter::Bicubic, 0.5),
            ("ConvNextImageProcessor", square(384), Some(Fit::Squash), Filter::Bicubic, 0.5),
            ("DINOv3ViTImageProcessorFast", square(224), Some(Fit::Squash), Filter::Bilinear, 0.485),
            ("OwlViTImageProcessor", square(768), Some(Fit::Squash), Filter::Bicubic, 0.481_454_66),
            ("Owlv2ImageProcessor", square(960), Some(Fit::SquareBlur), Filter::Bilinear, 0.481_454_66),
            ("RTDetrImageProcessor", square(640), Some(Fit::Squash), Filter::Bilinear, 0.0),
            ("DetrFeatureExtractor", square(1333), scale(800, 1333, 1), Filter::Bilinear, 0.485),
            ("GroundingDinoImageProcessor", square(1333), scale(800, 1333, 1), Filter::Bilinear, 0.485),
            ("YolosFeatureExtractor", square(1333), scale(800, 1333, 16), Filter::Bilinear, 0.485),
        ] {
            let draft = of_class(class, "").unwrap();
            assert_eq!((draft.size, draft.fit, draft.filter), (size, fit, Some(filter)), "{class}");
            assert_eq!(draft.mean.unwrap()[0], mean, "{class}");
        }
    }

    #[test]
    fn a_filter_has_a_number_or_a_name() {
        for (resample, filter) in [
            ("3", Filter::Bicubic),
            (r#""bicubic""#, Filter::Bicubic),
            (r#""PILImageResampling.LANCZOS""#, Filter::Lanczos3),
            ("null", Filter::Bilinear),
        ] {
            let draft = of_class("ViTImageProcessor", &format!(r#""resample": {resample}"#)).unwrap();
            assert_eq!(draft.filter, Some(filter));
        }
        assert!(
            of_class("ViTImageProcessor", r#""resample": "box""#)
                .unwrap_err()
                .contains("resample is \"box\"; known are")
        );
    }

    #[test]
    fn classes_and_switches_that_change_pixels_otherwise_are_refused() {
        for (class, keys, words) in [
            ("Siglip2ImageProcessor", "", "the class Siglip2ImageProcessor are not known"),
            ("LevitImageProcessor", r#""size": 224, "resample": 3"#, "are not known"),
            ("DeiTImageProcessor", "", "another crop_size"),
            ("DPTImageProcessor", r#""keep_aspect_ratio": true"#, "keep_aspect_ratio"),
            ("DPTImageProcessor", r#""ensure_multiple_of": 14"#, "ensure_multiple_of"),
            ("ViTImageProcessor", r#""do_pad": true"#, "do_pad"),
            ("Owlv2ImageProcessor", r#""do_pad": false"#, "do_pad is false"),
            ("DetrImageProcessor", r#""pad_size": {"height": 800, "width": 800}"#, "pad_size"),
            ("DetrImageProcessor", r#""size": {"shortest_edge": 800}"#, "without a longest_edge"),
            ("CLIPImageProcessor", r#""do_center_crop": false"#, "no fixed size"),
            ("ConvNextImageProcessor", r#""size": {"height": 224, "width": 224}"#, "must be a shortest_edge"),
            ("ConvNextImageProcessor", r#""size": 224, "crop_pct": 0.0"#, "crop_pct is 0"),
            ("ViTImageProcessor", r#""image_mean": [0.5]"#, "image_mean is [0.5]"),
        ] {
            let text = of_class(class, keys).unwrap_err();
            assert!(text.contains(words), "{class} {keys}: {text}");
        }
    }

    #[test]
    fn the_file_of_pictures_comes_before_that_of_pictures_and_text_and_both_before_timms() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let side = || {
            let companions = [CONFIG, PREPROCESSOR, PROCESSOR].map(|n| dir.path().join(n));
            let companions = companions.into_iter().filter(|p| p.is_file()).collect();
            let onnx = dir.path().join("model.onnx");
            let files = ModelFiles { onnx, others: Vec::new(), companions, weights: Vec::new() };
            (read(&files).unwrap().map(|d| d.size.unwrap().width_px), source_name(&files).unwrap())
        };
        assert_eq!(side(), (None, None));
        put(CONFIG, r#"{"model_type": "clip"}"#);
        assert_eq!(side(), (None, None));
        let cfg = r#"{"pretrained_cfg": {"input_size": [3, 240, 240], "mean": [0.5,0.5,0.5], "std": [0.5,0.5,0.5]}}"#;
        put(CONFIG, cfg);
        assert_eq!(side(), (Some(240), Some(CONFIG.to_owned())));
        put(PROCESSOR, r#"{"processor_class": "CLIPProcessor"}"#);
        assert_eq!(side().0, Some(240));
        put(
            PROCESSOR,
            r#"{"image_processor": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 256, "width": 256}}}"#,
        );
        assert_eq!(side(), (Some(256), Some(PROCESSOR.to_owned())));
        put(PREPROCESSOR, r#"{"image_processor_type": "ViTImageProcessor", "size": 32}"#);
        assert_eq!(side(), (Some(32), Some(PREPROCESSOR.to_owned())));
    }

    #[test]
    fn what_cannot_be_followed_exactly_is_refused() {
        let base = r#""image_mean": [0.5,0.5,0.5], "image_std": [0.5,0.5,0.5]"#;
        for (keys, word) in [
            (r#""size": {"shortest_edge": 224}, "resample": 3"#, "no fixed size"),
            (r#""size": {"longest_edge": 224}, "resample": 3"#, "longest_edge"),
            (
                r#""size": {"shortest_edge": 224}, "do_center_crop": true, "crop_size": 224, "crop_pct": 0.875, "resample": 3"#,
                "crop_pct",
            ),
            (r#""size": 224, "resample": 3, "do_resize": false"#, "do_resize"),
            (r#""size": 224"#, "resample is missing"),
            (r#""size": 224, "resample": 5"#, "resample is 5"),
            (r#""resample": 3"#, "size is missing"),
            (
                r#""size": {"height": 256, "width": 256}, "crop_size": 224, "do_center_crop": true, "resample": 3"#,
                "another crop_size",
            ),
            (r#""size": 224, "resample": 3, "rescale_factor": 0.0"#, "rescale_factor"),
        ] {
            let text = parsed(&format!("{{{keys}, {base}}}")).unwrap_err();
            assert!(text.contains(word), "{keys}: {text}");
        }
        assert!(parsed(r#"{"size": 224, "resample": 3}"#).unwrap_err().contains("image_mean is missing"));
        assert!(parsed("not json").is_err());
    }
}
