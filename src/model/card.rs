//! `croprow.toml` beside a graph: how croprow feeds it and reads it, where the graph does not say so itself.
//! Unknown keys are refused, because a misspelt one would silently change every result.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::files::{CARD, ModelFiles};
use crate::error::Error;
use crate::printable;
use crate::recipe::{CropFit, Filter};

/// The whole file. Absent parts leave the decision to the graph.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Card {
    #[serde(skip)]
    pub path: PathBuf,
    #[serde(default)]
    pub input: InputCard,
    #[serde(default)]
    pub detector: DetectorCard,
    #[serde(default)]
    pub embedder: EmbedderCard,
}

/// `[input]`: how pixels become the graph's input.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InputCard {
    /// Name of the graph's input.
    pub name: Option<String>,
    /// Pixels; with `height`.
    pub width: Option<u32>,
    /// Pixels; with `width`.
    pub height: Option<u32>,
    /// Resampling filter.
    pub resize: Option<Filter>,
    /// How a region fills the input.
    pub crop_fit: Option<CropFit>,
    /// Short side in pixels before the middle is cut out; with `crop_fit = "center"`.
    pub resize_shortest: Option<u32>,
    /// Grey level 0..=255; with `crop_fit = "pad"`.
    pub pad_fill: Option<u8>,
    /// Per channel, after division by 255.
    pub mean: Option<[f32; 3]>,
    /// Per channel, after division by 255.
    pub std: Option<[f32; 3]>,
}

/// `[detector]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DetectorCard {
    /// Name of the graph's output.
    pub output: Option<String>,
    /// Which contract the graph follows.
    pub family: Option<Family>,
    /// How the output is laid out.
    pub layout: Option<Layout>,
    /// How logits become scores.
    pub scores: Option<Scores>,
    /// Labels by class index.
    pub labels: Option<Vec<String>>,
}

/// `[embedder]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EmbedderCard {
    /// Name of the graph's output.
    pub output: Option<String>,
    /// How the output becomes one vector.
    pub pooling: Option<Pooling>,
    /// Tokens before those of the picture's parts (class, registers), which `mean` leaves out.
    pub prefix_tokens: Option<usize>,
    /// L2 normalisation.
    pub normalize: Option<bool>,
}

/// Contracts of detectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Family {
    /// One output of boxes and class scores, as Ultralytics exports it.
    Yolo,
    /// `logits` and `pred_boxes` of fixed classes.
    Detr,
    /// A sentence of labels in, scores of tokens out.
    GroundingDino,
    /// A text per label in, scores of labels out.
    Owl,
}

/// How logits of fixed classes become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Scores {
    /// All classes and a last one for "no object" share one.
    Softmax,
    /// Each class by itself.
    Sigmoid,
}

/// Layouts of YOLO outputs; `nc` classes, `n` places. Boxes are in pixels of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Layout {
    /// `[b, n, 5 + nc]`: cx cy w h objectness, class scores. Score = objectness * class.
    V5,
    /// `[b, 4 + nc, n]`: cx cy w h, class scores.
    V8,
    /// `[b, n, 6]`: x0 y0 x1 y1 score class, after suppression.
    End2End,
}

impl Layout {
    /// The word in `croprow.toml`.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::V5 => "v5",
            Self::V8 => "v8",
            Self::End2End => "end2end",
        }
    }
}

/// How an output becomes one vector per image. Without `output`, the word also chooses the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Pooling {
    /// `[b, d]` as it is.
    Vector,
    /// `[b, d]` that the graph pooled itself, mostly `pooler_output`; also `[b, d, 1, 1]`.
    Pooled,
    /// `[b, d]` in the space that pictures and texts share, mostly `image_embeds`.
    Projected,
    /// `[b, tokens, d]`: the first token.
    Cls,
    /// `[b, tokens, d]`: mean over the tokens of the picture's parts, without those of class and registers where
    /// `config.json` or `prefix_tokens` tells of them; `[b, d, h, w]`: mean over space.
    Mean,
}

impl Pooling {
    /// The word in `croprow.toml`.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Vector => "vector",
            Self::Pooled => "pooled",
            Self::Projected => "projected",
            Self::Cls => "cls",
            Self::Mean => "mean",
        }
    }
}

impl Card {
    /// Reads the card of a model; an empty one where there is none.
    ///
    /// # Errors
    /// The file cannot be read, or a key or value in it is not understood. Names the file, the line and the key.
    pub(super) fn read(files: &ModelFiles) -> Result<Self, Error> {
        let Some(path) = files.companion(CARD) else {
            return Ok(Self::default());
        };
        let text = fs::read_to_string(path).map_err(|e| refuse(path, &e.to_string()))?;
        let mut card = Self::parse(&text).map_err(|why| refuse(path, &why))?;
        card.path = path.to_path_buf();
        Ok(card)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let card: Self = toml::from_str(text).map_err(|e| located(text, &e))?;
        let input = &card.input;
        if input.width.is_some() != input.height.is_some() {
            return Err("[input] width and height belong together".to_owned());
        }
        if input.width == Some(0) || input.height == Some(0) || input.resize_shortest == Some(0) {
            return Err("[input] a size of 0 pixels".to_owned());
        }
        if input.std.is_some_and(|s| s.iter().any(|v| !v.is_finite() || *v == 0.0)) {
            return Err("[input] std must be finite and not 0".to_owned());
        }
        if input.mean.is_some_and(|m| m.iter().any(|v| !v.is_finite())) {
            return Err("[input] mean must be finite".to_owned());
        }
        Ok(card)
    }

    /// An error about this file.
    pub(super) fn refuse(&self, why: &str) -> Error {
        refuse(&self.path, why)
    }
}

fn refuse(path: &Path, why: &str) -> Error {
    Error::StartUp(format!("{}: {why}", printable::path(path)))
}

/// The line where the reader stopped, with what stands on it: the key is there even where the reader does not
/// name it.
fn located(text: &str, error: &toml::de::Error) -> String {
    let Some(span) = error.span() else {
        return error.message().to_owned();
    };
    let before = text.get(..span.start).unwrap_or(text);
    let number = before.matches('\n').count() + 1;
    let line = text.lines().nth(number - 1).unwrap_or_default().trim();
    format!("line {number}, `{line}`: {}", error.message())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_card_is_read() {
        let card = Card::parse(
            r#"
            [embedder]
            output = "embedding"
            pooling = "cls"
            prefix_tokens = 5
            normalize = true
            [detector]
            layout = "end2end"
            labels = ["cat", "dog"]
            [input]
            name = "images"
            width = 224
            height = 192
            resize = "lanczos3"
            crop_fit = "center"
            resize_shortest = 256
            mean = [0.5, 0.4, 0.3]
            std = [0.2, 0.2, 0.1]
            "#,
        )
        .unwrap();
        assert_eq!((card.embedder.pooling, card.embedder.prefix_tokens), (Some(Pooling::Cls), Some(5)));
        assert_eq!(card.detector.layout, Some(Layout::End2End));
        assert_eq!((card.input.width, card.input.height), (Some(224), Some(192)));
        assert_eq!(card.input.resize, Some(Filter::Lanczos3));
        assert_eq!(card.input.crop_fit, Some(CropFit::Center));
    }

    #[test]
    fn each_pooling_is_read_from_its_own_word() {
        for pooling in [Pooling::Vector, Pooling::Pooled, Pooling::Projected, Pooling::Cls, Pooling::Mean] {
            let card = Card::parse(&format!("[embedder]\npooling = \"{}\"\n", pooling.word())).unwrap();
            assert_eq!(card.embedder.pooling, Some(pooling));
        }
    }

    #[test]
    fn a_misspelt_key_is_refused_with_its_line() {
        let text = Card::parse("[input]\nwidht = 3\n").unwrap_err();
        assert!(text.contains("line 2") && text.contains("widht"), "{text}");
        let text = Card::parse("[embeder]\nnormalize = true\n").unwrap_err();
        assert!(text.contains("embeder"), "{text}");
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_key() {
        let text = Card::parse("[input]\nmean = \"half\"\n").unwrap_err();
        assert!(text.contains("mean"), "{text}");
        let text = Card::parse("[input]\nresize = \"cubic\"\n").unwrap_err();
        assert!(text.contains("resize") && text.contains("bicubic"), "{text}");
        assert!(Card::parse("[input]\nwidth = 3\n").unwrap_err().contains("belong together"));
        assert!(Card::parse("[input]\nstd = [0.0, 1.0, 1.0]\n").unwrap_err().contains("std"));
    }
}
