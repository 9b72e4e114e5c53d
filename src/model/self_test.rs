//! A loaded model is held against itself and against the numbers that lie beside it, once per digest, device and
//! runtime. It finds graphs whose results depend on the neighbours in a batch (dynamic int8 scales activations
//! over all of it), and exports that were traced at one size and return wrong boxes at another in silence.
//!
//! `reference.json` beside a graph is written by the export scripts from the original model. Its pictures are
//! a pattern that both sides compute, so that no picture has to be kept.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use ndarray::{Array4, Axis, concatenate};
use serde::{Deserialize, Serialize};

use super::files::{ModelFiles, REFERENCE};
use super::{Asked, Detector, Embedder, Found};
use crate::candidate::{Candidate, Naming};
use crate::error::Error;
use crate::geometry::{BoxPx, Size};
use crate::printable;
use crate::recipe::{Fit, ImageInput};

/// Raised when the test itself changes: outcomes that are remembered do not count then.
pub const VERSION: u32 = 1;

/// A model of free size is asked at this one: small, since it costs every user some seconds.
const TRIAL: Size = Size::new(320, 256);

/// Detections that are compared, the best ones.
const BEST: usize = 20;

/// Share of them that must have their like. Random ties move single queries on other hardware.
const ALIKE_LEAST: f32 = 0.8;

/// Two detections are alike within this, in parts of the tensor's sides and of a score. Wrong graphs are off
/// by tens of these; fp16 is not.
const BOX_MOST: f32 = 0.02;
const SCORE_MOST: f32 = 0.05;

/// Alone and in a batch the same graph gives the same within rounding.
const BATCH_BOX_MOST: f32 = 2e-3;
const BATCH_SCORE_MOST: f32 = 5e-3;
const BATCH_COSINE_LEAST: f64 = 0.9999;

/// A converted or quantised embedder still says the same as the original.
const COSINE_LEAST: f64 = 0.97;

/// Below this nothing is compared.
const FLOOR: f32 = 1e-3;

const PROMPT: &str = "a cat. a dog. a person.";

/// The operator of graphs that scale activations over a whole batch.
const DYNAMIC: &[u8] = b"DynamicQuantizeLinear";

/// What the test found; remembered as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The graph must be given one image at a time.
    pub one_by_one: bool,
    /// Cases of `reference.json` that were compared.
    pub compared: usize,
    /// A line for the user, each time.
    pub warning: Option<String>,
}

#[derive(Deserialize)]
struct Reference {
    format: String,
    mean: [f32; 3],
    std: [f32; 3],
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    width_px: u32,
    height_px: u32,
    prompt: Option<String>,
    #[serde(default)]
    detections: Vec<Detected>,
    #[serde(default)]
    vector: Vec<f32>,
}

#[derive(Deserialize)]
struct Detected {
    label: String,
    score: f32,
    /// `cx cy w h` in parts of the tensor.
    #[serde(rename = "box")]
    bbox: [f32; 4],
}

/// Tests a detector.
///
/// # Errors
/// Its results depend on the batch though nothing in it is quantised dynamically, or differ from those of the
/// original model at a size.
pub fn detector(detector: &mut dyn Detector, files: &ModelFiles) -> Result<Verdict, Error> {
    let refuse = |why: String| Error::StartUp(format!("model {}: {why}", printable::path(&files.onnx)));
    let input = detector.input().clone();
    let mut verdict = Verdict::default();
    if detector.fixed_batch() != Some(1) {
        let (a, b) = (pattern(trial_size(&input), 0, &input), pattern(trial_size(&input), 1, &input));
        let alone = asked_of(detector, &a, PROMPT).map_err(refuse)?;
        let together = stacked(&a, &b);
        let together = asked_of(detector, &together, PROMPT).map_err(refuse)?;
        let (alone, together) = (best_of(&alone[0], trial_size(&input)), best_of(&together[0], trial_size(&input)));
        if share_alike(&alone, &together, BATCH_BOX_MOST, BATCH_SCORE_MOST) < ALIKE_LEAST {
            one_by_one(files, &mut verdict)?;
            detector.take_one_by_one();
        }
    }
    let Some(reference) = read(files)? else {
        if matches!(input.fit, Fit::Scale { .. }) {
            verdict.warning = Some(format!(
                "model {}: it takes pictures of every size, and no {REFERENCE} beside it tells whether it is right at all of them; \
                 exports traced at one size may be wrong at others in silence (scripts/models/export_*.py write and check one)",
                printable::path(&files.onnx)
            ));
        }
        return Ok(verdict);
    };
    for case in &reference.cases {
        let size = Size::new(case.width_px, case.height_px);
        let fixed = !matches!(input.fit, Fit::Scale { .. });
        if fixed && size != input.size {
            continue;
        }
        let tensor = numbers(size, 0, reference.mean, reference.std);
        let found = asked_of(detector, &tensor, case.prompt.as_deref().unwrap_or(PROMPT)).map_err(refuse)?;
        let share = share_alike(&expected(case), &best_of(&found[0], size), BOX_MOST, SCORE_MOST);
        if share < ALIKE_LEAST {
            return Err(refuse(format!(
                "at {}x{} only {:.0} % of its best detections are those of the original model ({REFERENCE} beside it): the export is \
                 wrong at this size, or its labels or tokenizer were changed; export it again",
                size.width_px,
                size.height_px,
                100.0 * share
            )));
        }
        verdict.compared += 1;
    }
    Ok(verdict)
}

/// Tests an embedder.
///
/// # Errors
/// As [`detector`].
pub fn embedder(embedder: &mut dyn Embedder, files: &ModelFiles) -> Result<Verdict, Error> {
    let refuse = |why: String| Error::StartUp(format!("model {}: {why}", printable::path(&files.onnx)));
    let input = embedder.input().clone();
    let mut verdict = Verdict::default();
    if embedder.fixed_batch() != Some(1) {
        let (a, b) = (pattern(input.size, 0, &input), pattern(input.size, 1, &input));
        let alone = vector_of(embedder, &a).map_err(refuse)?;
        let together = vector_of(embedder, &stacked(&a, &b)).map_err(refuse)?;
        if cosine(&alone, &together) < BATCH_COSINE_LEAST {
            one_by_one(files, &mut verdict)?;
            embedder.take_one_by_one();
        }
    }
    for case in read(files)?.iter().flat_map(|r| r.cases.iter().map(move |c| (r, c))) {
        let (reference, case) = case;
        let size = Size::new(case.width_px, case.height_px);
        if size != input.size || case.vector.len() != embedder.dim() {
            continue;
        }
        let ours = vector_of(embedder, &numbers(size, 0, reference.mean, reference.std)).map_err(refuse)?;
        let similarity = cosine(&ours, &case.vector);
        if similarity < COSINE_LEAST {
            return Err(refuse(format!(
                "its vector has a cosine of {similarity:.4} to that of the original model ({REFERENCE} beside it): the export or its \
                 quantisation is wrong, or another pooling is set"
            )));
        }
        verdict.compared += 1;
    }
    Ok(verdict)
}

/// # Errors
/// Nothing in the graph explains why its results depend on the batch.
fn one_by_one(files: &ModelFiles, verdict: &mut Verdict) -> Result<(), Error> {
    if !holds(&files.onnx, DYNAMIC) {
        return Err(Error::StartUp(format!(
            "model {}: an image gives other results in a batch than alone; the export mixes up its batch: export it again, or with a \
             fixed batch of 1",
            printable::path(&files.onnx)
        )));
    }
    verdict.one_by_one = true;
    verdict.warning = Some(format!(
        "model {}: dynamic int8 scales over a whole batch, so it is given one image at a time",
        printable::path(&files.onnx)
    ));
    Ok(())
}

fn read(files: &ModelFiles) -> Result<Option<Reference>, Error> {
    let Some(path) = files.reference() else { return Ok(None) };
    let refuse = |why: String| Error::StartUp(format!("{}: {why}", printable::path(&path)));
    let text = fs::read_to_string(&path).map_err(|e| refuse(e.to_string()))?;
    let reference: Reference = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
    if reference.format != "croprow-reference-1" {
        return Err(refuse(format!("its format {} is not known here", reference.format)));
    }
    Ok(Some(reference))
}

fn trial_size(input: &ImageInput) -> Size {
    if let Fit::Scale { multiple_px, .. } = input.fit {
        let whole = |side: u32| (side / multiple_px.max(1)).max(1) * multiple_px.max(1);
        return Size::new(whole(TRIAL.width_px), whole(TRIAL.height_px));
    }
    input.size
}

fn pattern(size: Size, number: usize, input: &ImageInput) -> Array4<f32> {
    numbers(size, number, input.mean, input.std)
}

/// The pattern of the reference, number 0, or another one, as a normalised tensor of one image.
fn numbers(size: Size, number: usize, mean: [f32; 3], std: [f32; 3]) -> Array4<f32> {
    let shape = (1, 3, size.height_px as usize, size.width_px as usize);
    Array4::from_shape_fn(shape, |(_, c, y, x)| {
        let (column, row) = (x / 8 + 5 * number, y / 8);
        let level = (column * 37 + row * 61 + column * row * 7 + c * 85) % 256;
        (level as f32 / 255.0 - mean[c]) / std[c]
    })
}

fn stacked(a: &Array4<f32>, b: &Array4<f32>) -> Array4<f32> {
    concatenate(Axis(0), &[a.view(), b.view()]).unwrap_or_else(|_| a.clone())
}

fn asked_of(detector: &mut dyn Detector, batch: &Array4<f32>, prompt: &str) -> Result<Vec<Found>, String> {
    let (images, _, height, width) = batch.dim();
    let asked = vec![Asked { prompt: Some(prompt), valid: Size::new(width as u32, height as u32) }; images];
    let found = detector.detect(batch, &asked, FLOOR).map_err(|e| format!("the self-test fails: {e}"))?;
    found.into_iter().map(|f| f.map_err(|e| format!("the self-test fails: {}", e.message))).collect()
}

fn vector_of(embedder: &mut dyn Embedder, batch: &Array4<f32>) -> Result<Vec<f32>, String> {
    let mut vectors = embedder.embed(batch).map_err(|e| format!("the self-test fails: {e}"))?;
    vectors.swap_remove(0).map_err(|e| format!("the self-test fails: {}", e.message))
}

/// A detection in parts of the tensor.
struct Best {
    /// `None` where labels are tokens: then only boxes can be compared.
    label: Option<String>,
    score: f32,
    sides: [f32; 4],
}

fn best_of(found: &Found, size: Size) -> Vec<Best> {
    let mut candidates: Vec<&Candidate> = found.candidates.iter().collect();
    candidates.sort_by(|a, b| b.best().total_cmp(&a.best()));
    let (w, h) = (size.width_px as f32, size.height_px as f32);
    let named = found.vocabulary.naming != Naming::Phrases;
    let best = |c: &&Candidate| {
        let BoxPx { x0, y0, x1, y1 } = c.bbox;
        let label = c.scores.first().and_then(|s| found.vocabulary.labels.get(s.label)).cloned();
        Best { label: label.filter(|_| named), score: c.best(), sides: [x0 / w, y0 / h, x1 / w, y1 / h] }
    };
    // Twice as many as are looked for: near ties change the order. Scores of tokens have another order altogether.
    let most = if named { 2 * BEST } else { usize::MAX };
    candidates.iter().take(most).map(best).collect()
}

fn expected(case: &Case) -> Vec<Best> {
    let best = |d: &Detected| {
        let [cx, cy, w, h] = d.bbox;
        let sides = [cx - w / 2.0, cy - h / 2.0, cx + w / 2.0, cy + h / 2.0];
        Best { label: Some(d.label.clone()), score: d.score, sides }
    };
    case.detections.iter().take(BEST).map(best).collect()
}

/// Share of the best of `wanted` that have their like in `found`; 1 where nothing is wanted.
fn share_alike(wanted: &[Best], found: &[Best], box_most: f32, score_most: f32) -> f32 {
    let wanted = &wanted[..wanted.len().min(BEST)];
    if wanted.is_empty() {
        return 1.0;
    }
    let near = |a: &Best, b: &Best| {
        let same = a.label == b.label && (a.score - b.score).abs() <= score_most;
        (same || b.label.is_none()) && a.sides.iter().zip(&b.sides).all(|(p, q)| (p - q).abs() <= box_most)
    };
    wanted.iter().filter(|w| found.iter().any(|f| near(w, f))).count() as f32 / wanted.len() as f32
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Whether the file holds `word`.
fn holds(path: &Path, word: &[u8]) -> bool {
    const CHUNK_BYTES: usize = 1 << 20;
    let Ok(mut file) = File::open(path) else { return false };
    let mut buffer = vec![0; CHUNK_BYTES + word.len()];
    let mut kept = 0;
    loop {
        match file.read(&mut buffer[kept..]) {
            Ok(n) if n > 0 => {
                let end = kept + n;
                if buffer[..end].windows(word.len()).any(|w| w == word) {
                    return true;
                }
                // A word may lie across two chunks.
                kept = end.min(word.len() - 1);
                buffer.copy_within(end - kept..end, 0);
            }
            _ => return false,
        }
    }
}
