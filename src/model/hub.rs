//! `config.json` as Hugging Face writes it: what family a model is of, and the few facts that an adapter needs.

use std::fs;

use serde_json::Value;

use super::files::{CONFIG, ModelFiles};
use crate::error::Error;
use crate::printable;

/// The keys that matter.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HubConfig {
    /// `model_type`, as `grounding-dino`; of a composite model the whole's.
    pub model_type: Option<String>,
    /// The first of `architectures`, as `CLIPVisionModelWithProjection`.
    pub architecture: Option<String>,
    /// Labels by class index.
    pub labels: Option<Vec<String>>,
    /// `max_text_len` of GroundingDINO.
    pub max_text_tokens: Option<usize>,
    /// `num_register_tokens` of DINOv2 and DINOv3.
    pub register_tokens: Option<usize>,
    /// `patch_size`, of a composite model its vision part's.
    pub patch_px: Option<usize>,
}

impl HubConfig {
    /// Reads the file; an empty one where there is none.
    ///
    /// # Errors
    /// It cannot be read or is no JSON object.
    pub(super) fn read(files: &ModelFiles) -> Result<Self, Error> {
        let Some(path) = files.companion(CONFIG) else { return Ok(Self::default()) };
        let refuse = |why: String| Error::StartUp(format!("{}: {why}", printable::path(path)));
        let text = fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
        Self::parse(&text).map_err(refuse)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let config: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let word = |value: &Value| value.as_str().map(str::to_owned);
        let count = |key: &str| config[key].as_u64().and_then(|n| usize::try_from(n).ok());
        Ok(Self {
            model_type: word(&config["model_type"]),
            architecture: word(&config["architectures"][0]),
            labels: labels(&config["id2label"])?,
            max_text_tokens: count("max_text_len"),
            register_tokens: count("num_register_tokens"),
            patch_px: count("patch_size")
                .or_else(|| config["vision_config"]["patch_size"].as_u64().and_then(|n| usize::try_from(n).ok())),
        })
    }
}

/// `{"0": "cat", "2": "dog"}` by number. Some models leave numbers out (COCO has 91 with gaps): those are "N/A", as
/// in their own lists.
fn labels(map: &Value) -> Result<Option<Vec<String>>, String> {
    let Some(map) = map.as_object().filter(|m| !m.is_empty()) else { return Ok(None) };
    let mut labels = Vec::new();
    for (key, label) in map {
        let index: usize = key.parse().map_err(|_| format!("id2label has the key {key:?}, which is no number"))?;
        let label = label.as_str().ok_or_else(|| format!("id2label of {key} is no text"))?;
        if index > 1_000_000 {
            return Err(format!("id2label has the number {index}"));
        }
        if labels.len() <= index {
            labels.resize(index + 1, "N/A".to_owned());
        }
        label.clone_into(&mut labels[index]);
    }
    Ok(Some(labels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_and_labels_are_read_in_the_order_of_numbers() {
        let config = HubConfig::parse(
            r#"{"model_type": "detr", "architectures": ["DetrForObjectDetection"],
                "id2label": {"10": "k", "0": "a", "2": "c"}, "max_text_len": 256}"#,
        )
        .unwrap();
        assert_eq!(config.model_type.as_deref(), Some("detr"));
        assert_eq!(config.max_text_tokens, Some(256));
        let labels = config.labels.unwrap();
        assert_eq!((labels.len(), labels[10].as_str(), labels[1].as_str()), (11, "k", "N/A"));
    }

    #[test]
    fn what_is_no_config_is_refused() {
        assert!(HubConfig::parse("[").is_err());
        assert!(HubConfig::parse(r#"{"id2label": {"x": "a"}}"#).unwrap_err().contains("no number"));
        assert_eq!(HubConfig::parse("{}").unwrap(), HubConfig::default());
        let registers = HubConfig::parse(r#"{"num_register_tokens": 4}"#).unwrap().register_tokens;
        assert_eq!(registers, Some(4));
    }
}
