//! Text to token numbers, by the model's own `tokenizer.json`.

use crate::printable;
use std::path::Path;

use tokenizers::Tokenizer;

/// A tokenizer that is loaded. Its own truncation and padding are switched off, and no text becomes a special
/// token: a label `[SEP]` is a word like any other.
pub(super) struct Text {
    tokenizer: Tokenizer,
    /// Added before every text.
    pub before: Vec<Token>,
    /// Added after every text.
    pub after: Vec<Token>,
    /// Fills shorter texts.
    pub padding: i64,
}

/// A piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub id: i64,
    pub text: String,
}

impl Text {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// The file cannot be read or is of a kind that is not known; the text names it.
    pub(super) fn load(path: &Path) -> Result<Self, String> {
        let said = |e: tokenizers::Error| format!("{}: {e}", printable::path(path));
        let mut tokenizer = Tokenizer::from_file(path).map_err(said)?;
        let padding = tokenizer.get_padding().map(|p| p.pad_id);
        tokenizer.with_truncation(None).map_err(said)?;
        tokenizer.with_padding(None);
        tokenizer.set_encode_special_tokens(true);
        let named = ["[PAD]", "<pad>"].iter().find_map(|t| tokenizer.token_to_id(t));
        let padding = i64::from(padding.or(named).unwrap_or(0));
        let mut text = Self { tokenizer, before: Vec::new(), after: Vec::new(), padding };
        // What is put around a text shows when one token is put in.
        let bare = text.tokens("a").map_err(|e| format!("{}: {e}", printable::path(path)))?;
        let whole = text.encode("a", true).map_err(|e| format!("{}: {e}", printable::path(path)))?;
        let Some(at) = whole.windows(bare.len().max(1)).position(|w| w == bare.as_slice()) else {
            return Err(format!("{}: what it adds around a text is not understood", printable::path(path)));
        };
        text.before = whole[..at].to_vec();
        text.after = whole[at + bare.len()..].to_vec();
        Ok(text)
    }

    /// The tokens of `text` alone.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub(super) fn tokens(&self, text: &str) -> Result<Vec<Token>, String> {
        self.encode(text, false)
    }

    /// The number of a token that is the whole text, if there is one.
    pub(super) fn single(&self, text: &str) -> Option<i64> {
        match self.tokens(text).ok()?.as_slice() {
            [only] => Some(only.id),
            _ => None,
        }
    }

    fn encode(&self, text: &str, with_special: bool) -> Result<Vec<Token>, String> {
        let encoding = self.tokenizer.encode(text, with_special).map_err(|e| format!("{text:?} has no tokens: {e}"))?;
        let pairs = encoding.get_ids().iter().zip(encoding.get_tokens());
        Ok(pairs.map(|(id, text)| Token { id: i64::from(*id), text: text.clone() }).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn tokenizer() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/grounding-dino-tiny/tokenizer.json")
    }

    fn ids(text: &Text, of: &str) -> Vec<i64> {
        text.tokens(of).unwrap().iter().map(|t| t.id).collect()
    }

    #[test]
    fn what_surrounds_a_text_and_fills_it_up_is_known() {
        let text = Text::load(&tokenizer()).unwrap();
        let around = |tokens: &[Token]| tokens.iter().map(|t| t.text.clone()).collect::<Vec<_>>();
        assert_eq!((around(&text.before), around(&text.after)), (vec!["[CLS]".into()], vec!["[SEP]".into()]));
        assert_eq!((text.padding, text.single("."), text.single("a cat")), (0, Some(1012), None));
    }

    #[test]
    fn words_that_look_like_special_tokens_are_words() {
        let text = Text::load(&tokenizer()).unwrap();
        for word in ["[SEP]", "[PAD]", "[CLS] dog", "##shirt"] {
            assert!(
                ids(&text, word).iter().all(|id| ![0, 101, 102, 103].contains(id)),
                "{word}: {:?}",
                ids(&text, word)
            );
        }
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_switched_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(tokenizer()).unwrap()).unwrap();
        json["truncation"] =
            serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"});
        std::fs::write(&path, json.to_string()).unwrap();
        let (own, plain) = (Text::load(&path).unwrap(), Text::load(&tokenizer()).unwrap());
        let long = "a very long text of many words that is not cut";
        assert_eq!(ids(&own, long), ids(&plain, long));
        assert_eq!(own.after.len(), 1);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, "{}").unwrap();
        assert!(Text::load(&path).err().unwrap().contains("tokenizer.json"));
    }
}
