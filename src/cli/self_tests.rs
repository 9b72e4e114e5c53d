//! The self-test of a model, done once per digest, device and runtime and remembered in the database.

use std::collections::BTreeMap;
use std::sync::Mutex;

use croprow::db::Db;
use croprow::error::Error;
use croprow::model::files::locate;
use croprow::model::library::Runtime;
use croprow::model::self_test::{self, Verdict};
use croprow::model::{ModelKind, Models};
use croprow::pipeline::lock;

use super::recipes::Recipes;
use super::say;
use croprow::config::RunConfig;

/// Outcomes of one model by where it ran.
type Outcomes = BTreeMap<String, Verdict>;

/// Tests what was not tested yet, applies what is known, and says what there is to say. The database is free for others
/// during a test.
///
/// # Errors
/// A model cannot be trusted.
pub(crate) fn run(
    models: &mut Models,
    config: &RunConfig,
    recipes: &Recipes,
    runtime: &Runtime,
    db: &Mutex<Db>,
) -> Result<(), Error> {
    let place = format!("{} onnxruntime {} test {}", models.device.word, runtime.version, self_test::VERSION);
    let half = models.device.is_cuda();
    for kind in [ModelKind::Detector, ModelKind::Embedder] {
        let (stored, asked) = match kind {
            ModelKind::Detector => (recipes.detect(), config.detect.as_ref().map(|d| (&d.model, d.precision))),
            ModelKind::Embedder => (recipes.embed(), config.embed.as_ref().map(|e| (&e.model, e.precision))),
        };
        let (Some(stored), Some((model, precision))) = (stored, asked) else { continue };
        let remembered = lock(db).self_test(stored.model_digest)?;
        let mut outcomes: Outcomes = remembered.and_then(|json| serde_json::from_str(&json).ok()).unwrap_or_default();
        let verdict = match outcomes.get(&place) {
            Some(known) => {
                if known.one_by_one {
                    models.take_one_by_one(kind);
                }
                known.clone()
            }
            None => {
                let verdict = models.self_test(kind, &locate(model, precision, half)?)?;
                outcomes.insert(place.clone(), verdict.clone());
                let json = serde_json::to_string(&outcomes)
                    .map_err(|e| Error::System(format!("the self-test cannot be remembered: {e}")))?;
                lock(db).remember_self_test(stored.model_digest, stored.model_path, &json)?;
                verdict
            }
        };
        if let Some(warning) = &verdict.warning {
            say(warning);
        }
    }
    Ok(())
}
