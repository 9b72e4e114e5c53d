//! From settings to recipes: what decides results, as canonical JSON. Reads the models' files, never loads
//! a model.

use std::path::{Path, PathBuf};

use croprow::config::{Precision, RunConfig};
use croprow::db::Db;
use croprow::db::due::InForce;
use croprow::db::recipes::StoredRecipe;
use croprow::db::select::Carried;
use croprow::error::Error;
use croprow::model::embedder;
use croprow::model::files::{DigestCache, digest, locate};
use croprow::printable;
use croprow::recipe::{DetectRecipe, EmbedRecipe, Selection};
use croprow::row::{FileStamp, Stage};
use serde::Serialize;
use serde_json::Value;

/// Raised when the reading of a detector's outputs changes results.
const DETECT_ADAPTER_VERSION: u32 = 1;

/// The recipes that this run asks for.
pub(crate) struct Recipes {
    detect: Option<Asked>,
    embed: Option<Asked>,
    /// The parts of `detect`.
    rule: Option<DetectRecipe>,
}

struct Asked {
    body: String,
    digest: String,
    model: PathBuf,
}

impl Recipes {
    /// # Errors
    /// A model's files cannot be found or read.
    pub(crate) fn of(config: &RunConfig, db: &mut Db) -> Result<Self, Error> {
        let mut rule = None;
        let detect = match &config.detect {
            None => None,
            Some(detect) => Some(Asked::new(&detect.model, detect.precision, db, |model_digest| {
                rule.insert(DetectRecipe {
                    model_digest,
                    adapter_version: DETECT_ADAPTER_VERSION,
                    prompt: detect.prompt.clone(),
                    labels: detect.labels,
                    candidate_floor: detect.candidate_floor,
                    truncated: config.decode.truncated,
                    decode: config.decode.mode,
                    shape_step_px: detect.shape_step_px,
                    selection: detect.selection.clone(),
                })
                .clone()
            })?),
        };
        let embed = match &config.embed {
            None => None,
            Some(embed) => Some(Asked::new(&embed.model, embed.precision, db, |model_digest| EmbedRecipe {
                model_digest,
                adapter_version: embedder::ADAPTER_VERSION,
                crop_fit: embed.crop_fit,
                normalize: embed.normalize,
                decode: config.decode.mode,
            })?),
        };
        Ok(Self { detect, embed, rule })
    }

    /// The recipes in force with another rule of selection. No file of a model is looked at.
    ///
    /// # Errors
    /// No detector is in force.
    pub(crate) fn in_force_with(selection: Selection, db: &Db) -> Result<Self, Error> {
        let stored = |stage| -> Result<Option<Asked>, Error> {
            let (Some(body), Some((digest, model))) = (db.recipe_in_force(stage)?, db.model_in_force(stage)?) else {
                return Ok(None);
            };
            Ok(Some(Asked { body, digest, model }))
        };
        let mut detect = stored(Stage::Detect)?.ok_or_else(|| {
            Error::Usage("no detector has run on this database, so there is nothing to select from".into())
        })?;
        let mut rule: DetectRecipe = serde_json::from_str(&detect.body).map_err(|_| {
            Error::Usage(
                "the detections in force were made by another croprow, which kept no candidates: run once more with --stale redo"
                    .into(),
            )
        })?;
        rule.selection = selection;
        detect.body = canonical(&rule)?;
        Ok(Self { detect: Some(detect), embed: stored(Stage::Embed)?, rule: Some(rule) })
    }

    /// Stored detect recipes that differ from this one in nothing that the model sees. Without `reselect` also
    /// not in the rule of selection.
    pub(crate) fn carried(&self, db: &Db, reselect: bool) -> Result<Carried, Error> {
        let mut carried = Carried::default();
        let (Some(asked), Some(rule)) = (&self.detect, &self.rule) else { return Ok(carried) };
        for (id, body) in db.recipes(Stage::Detect)? {
            // Recipes of an older program are other recipes.
            let Ok(stored) = serde_json::from_str::<DetectRecipe>(&body) else { continue };
            let stored_selection = stored.selection.clone();
            let same_selection = DetectRecipe { selection: rule.selection.clone(), ..stored };
            let same_prompt = DetectRecipe { prompt: rule.prompt.clone(), ..same_selection.clone() };
            if body == asked.body || (!reselect && stored_selection != rule.selection) {
                continue;
            } else if same_selection == *rule {
                carried.any.push(id);
            } else if same_prompt == *rule {
                carried.own_prompt.push(id);
            }
        }
        Ok(carried)
    }

    /// The rule of selection and the floor below which nothing is kept.
    pub(crate) fn rule(&self) -> Option<&DetectRecipe> {
        self.rule.as_ref()
    }

    /// Their ids, with 0 for one that is new to this database.
    pub(crate) fn look_up(&self, db: &Db) -> Result<InForce, Error> {
        let body = |asked: &Option<Asked>| asked.as_ref().map(|a| a.body.clone());
        db.look_up(body(&self.detect).as_deref(), body(&self.embed).as_deref())
    }

    /// The recipe of `detect`, to be put in force.
    pub(crate) fn detect(&self) -> Option<StoredRecipe<'_>> {
        self.detect.as_ref().map(Asked::stored)
    }

    /// The recipe of `embed`, to be put in force.
    pub(crate) fn embed(&self) -> Option<StoredRecipe<'_>> {
        self.embed.as_ref().map(Asked::stored)
    }

    /// One line per difference between the recipes in force and these.
    pub(crate) fn describe_change(&self, db: &Db) -> Result<String, Error> {
        let mut lines = Vec::new();
        for (stage, asked) in [(Stage::Detect, &self.detect), (Stage::Embed, &self.embed)] {
            let then = db.recipe_in_force(stage)?.and_then(|body| serde_json::from_str::<Value>(&body).ok());
            let now = asked.as_ref().and_then(|a| serde_json::from_str::<Value>(&a.body).ok());
            match (then, now) {
                (None, Some(_)) => lines.push(format!("  {}: there was no model, now there is one", stage.word())),
                (Some(_), None) => lines.push(format!("  {}: there was a model, now there is none", stage.word())),
                (Some(then), Some(now)) => {
                    let mut changed = Vec::new();
                    differences("", &then, &now, &mut changed);
                    lines.extend(changed.into_iter().map(|c| format!("  {}: {c}", stage.word())));
                }
                (None, None) => {}
            }
        }
        if lines.is_empty() {
            lines.push("  by a recipe before the last one".into());
        }
        Ok(lines.join("\n"))
    }
}

impl Asked {
    fn new<R: Serialize>(
        model: &Path,
        precision: Precision,
        db: &mut Db,
        recipe: impl FnOnce(String) -> R,
    ) -> Result<Self, Error> {
        // What depends on the device is resolved by the settings: `auto` is no question any more.
        let files = locate(model, precision, false)?;
        let digest = digest(&files, &mut Cache(db))?;
        let body = canonical(&recipe(digest.clone()))?;
        Ok(Self { body, digest, model: files.onnx })
    }

    fn stored(&self) -> StoredRecipe<'_> {
        StoredRecipe { body: &self.body, model_digest: &self.digest, model_path: &self.model }
    }
}

fn canonical<R: Serialize>(recipe: &R) -> Result<String, Error> {
    serde_json::to_string(recipe).map_err(|e| Error::Usage(format!("a setting cannot be stored: {e}")))
}

fn differences(key: &str, then: &Value, now: &Value, changed: &mut Vec<String>) {
    if let (Value::Object(then_map), Value::Object(now_map)) = (then, now) {
        let mut keys: Vec<&String> = then_map.keys().chain(now_map.keys()).collect();
        keys.sort();
        keys.dedup();
        for k in keys {
            let name = if key.is_empty() { k.clone() } else { format!("{key}.{k}") };
            differences(
                &name,
                then_map.get(k).unwrap_or(&Value::Null),
                now_map.get(k).unwrap_or(&Value::Null),
                changed,
            );
        }
    } else if then != now {
        // A digest's beginning tells it apart; what is not in a recipe has its plainest value.
        let short = |v: &Value| match v.as_str() {
            Some(text) if text.chars().count() > 40 => format!("{}...", text.chars().take(12).collect::<String>()),
            _ if v.is_null() => "not set".to_owned(),
            _ => v.to_string(),
        };
        changed.push(format!("{key} was {}, is {}", short(then), short(now)));
    }
}

struct Cache<'a>(&'a mut Db);

impl DigestCache for Cache<'_> {
    fn get(&mut self, path: &Path, stamp: FileStamp) -> Option<String> {
        // A cache that cannot be read costs time, not correctness.
        self.0.cached_digest(path, stamp).ok().flatten()
    }

    fn put(&mut self, path: &Path, stamp: FileStamp, sha256: &str) {
        if let Err(error) = self.0.cache_digest(path, stamp, sha256) {
            log::debug!("{}: its digest is not kept: {error}", printable::path(path));
        }
    }
}
