//! `pretrained_cfg`, as timm writes it into `config.json`.

use serde_json::Value;

use super::geometry::{both, center_of, sides};
use super::{Draft, channels, filter_of};
use crate::recipe::Fit;

/// `DEFAULT_CROP_PCT` of timm.
const TIMM_CROP_PCT: f64 = 0.875;

/// `pretrained_cfg` of timm: `transforms_imagenet_eval`. Its `center` cuts out of a short side of
/// `floor(side / crop_pct)`.
pub(super) fn draft(said: &Value) -> Result<Draft, String> {
    let size = match said.get("input_size").and_then(Value::as_array).map(Vec::as_slice) {
        Some([channels, height, width]) if channels.as_u64() == Some(3) => {
            sides(&Value::from(vec![height.clone(), width.clone()]), "input_size", true, None).and_then(both)?
        }
        _ => return Err("pretrained_cfg has no input_size of three channels".to_owned()),
    };
    let crop_pct = said.get("crop_pct").and_then(Value::as_f64).unwrap_or(TIMM_CROP_PCT);
    let (size, fit) = match said.get("crop_mode").and_then(Value::as_str).unwrap_or("center") {
        "center" if size.width_px == size.height_px => center_of(size, crop_pct)?,
        "squash" if (crop_pct - 1.0).abs() < 1e-9 => (size, Fit::Squash),
        other => return Err(format!("crop_mode {other} with input_size of timm is not supported")),
    };
    Ok(Draft {
        size: Some(size),
        filter: Some(filter_of(said.get("interpolation").unwrap_or(&Value::from("bicubic")))?),
        fit: Some(fit),
        mean: Some(channels(said.get("mean"), "mean", None)?.map(|v| v as f32)),
        std: Some(channels(said.get("std"), "std", None)?.map(|v| v as f32)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Filter;

    #[test]
    fn timm_cuts_the_middle_out_or_stretches() {
        let of = |keys: &str| {
            let text = format!(r#"{{"input_size": [3, 224, 224], "mean": [0.5,0.5,0.5], "std": [0.5,0.5,0.5]{keys}}}"#);
            draft(&serde_json::from_str(&text).unwrap())
        };
        assert_eq!(
            of(r#", "crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic""#).unwrap().fit,
            Some(Fit::Center { resize_shortest_px: 248 })
        );
        let squash = of(r#", "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear""#).unwrap();
        assert_eq!((squash.fit, squash.filter), (Some(Fit::Squash), Some(Filter::Bilinear)));
        assert!(of(r#", "crop_pct": 0.9, "crop_mode": "border""#).unwrap_err().contains("crop_mode border"));
        assert!(of(r#", "interpolation": "random""#).unwrap_err().contains("resample is \"random\""));
    }
}
