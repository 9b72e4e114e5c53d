//! What there is to say about a model before a run: `croprow doctor` prints it. Words for people, decided elsewhere.

use std::fs;
use std::path::{Path, PathBuf};

use super::card::Card;
use super::files::ModelFiles;
use super::hub::HubConfig;
use super::port;
use super::session::Graph;
use super::{Detector, Embedder, preprocessor};
use crate::candidate::Vocabulary;
use crate::error::Error;
use crate::printable;
use crate::recipe::{Filter, Fit, ImageInput};

/// Labels that are named; the rest is counted.
const LABELS_SHOWN: usize = 6;

/// Names and values, in the order in which they are told.
pub type Facts = Vec<(&'static str, String)>;

/// What the files are and say. Reads no weights.
///
/// # Errors
/// A file of settings cannot be read.
pub fn of_files(files: &ModelFiles) -> Result<Facts, Error> {
    let mut facts = vec![("graph", printable::path(&files.onnx))];
    let names = |paths: &[PathBuf]| -> Vec<String> { paths.iter().map(|p| name(p)).collect() };
    let mut say = |key, values: Vec<String>| {
        if !values.is_empty() {
            facts.push((key, values.join(", ")));
        }
    };
    say("other graphs", names(&files.others));
    say("external weights", files.weights.iter().map(|p| format!("{} ({})", name(p), size_of(p))).collect());
    say("settings", names(&files.companions));
    let config = HubConfig::read(files)?;
    say("model type", config.model_type.into_iter().collect());
    say("architecture", config.architecture.into_iter().collect());
    let card = Card::read(files)?;
    let input_said = card.input != super::card::InputCard::default();
    let fed_by = [preprocessor::source_name(files)?, input_said.then(|| super::files::CARD.to_owned())];
    say("fed as", fed_by.into_iter().flatten().collect());
    Ok(facts)
}

/// What a loaded detector says of itself, and how it is fed.
pub fn of_detector(detector: &dyn Detector) -> Facts {
    let prompts = if detector.takes_prompts() { "wanted: --prompt, or one per image" } else { "not read" };
    let mut facts = detector.describe();
    facts.push(("prompts", prompts.to_owned()));
    facts.push(("batch", batch(detector.fixed_batch())));
    facts.extend(of_input(detector.input()));
    facts
}

/// What a loaded embedder says of itself, and how it is fed.
pub fn of_embedder(embedder: &dyn Embedder) -> Facts {
    let mut facts = embedder.describe();
    facts.push(("vector", format!("{} numbers", embedder.dim())));
    facts.push(("batch", batch(embedder.fixed_batch())));
    facts.extend(of_input(embedder.input()));
    facts
}

fn batch(fixed: Option<usize>) -> String {
    fixed.map_or_else(|| "free".to_owned(), |images| format!("fixed to {images}"))
}

fn of_input(input: &ImageInput) -> Facts {
    let sides = match input.fit {
        Fit::Scale { .. } => "follows the picture".to_owned(),
        _ => format!("{} x {}", input.size.width_px, input.size.height_px),
    };
    let numbers = |values: [f32; 3]| values.map(|v| v.to_string()).join(" ");
    vec![
        ("input", sides),
        ("fit", fit(input.fit)),
        ("resize", filter(input).to_owned()),
        ("mean", numbers(input.mean)),
        ("std", numbers(input.std)),
    ]
}

fn filter(input: &ImageInput) -> &'static str {
    match (input.fit, input.filter) {
        (Fit::SquareBlur, _) => "bilinear after a blur",
        (_, Filter::Nearest) => "nearest",
        (_, Filter::Bilinear) => "bilinear",
        (_, Filter::Bicubic) => "bicubic",
        (_, Filter::Lanczos3) => "lanczos3",
    }
}

fn fit(fit: Fit) -> String {
    match fit {
        Fit::Squash => "squash: both sides stretched".to_owned(),
        Fit::Pad { fill } => format!("pad: whole picture, the rest grey {fill}"),
        Fit::Center { resize_shortest_px } => {
            format!("center: short side to {resize_shortest_px}, then the middle; borders are cut off")
        }
        Fit::Scale { shortest_px, longest_px, multiple_px, step_px } => {
            let multiple = if multiple_px > 1 { format!(", multiples of {multiple_px}") } else { String::new() };
            let step = if step_px > 1 { format!(", filled up to multiples of {step_px}") } else { String::new() };
            format!("scale: short side to {shortest_px}, long side at most {longest_px}{multiple}{step}")
        }
        Fit::Corner => "corner: whole picture at the top left, the rest 0".to_owned(),
        Fit::SquareBlur => "square: whole picture at the top left of a black square".to_owned(),
    }
}

/// Inputs and outputs with their types; for [`Loaded::describe`](super::Loaded::describe).
pub(super) fn of_graph(graph: &Graph) -> Facts {
    let mut facts = vec![("inputs", port::describe(&graph.inputs)), ("outputs", port::describe(&graph.outputs))];
    facts.extend(graph.output_memory().map(|memory| ("outputs in", memory.to_owned())));
    facts
}

/// The labels of a detector of fixed classes.
pub(super) fn of_labels(vocabulary: &Vocabulary) -> (&'static str, String) {
    let all = &vocabulary.labels;
    let shown = all.iter().take(LABELS_SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if all.len() > LABELS_SHOWN { ", ..." } else { "" };
    ("labels", format!("{}: {shown}{more}", all.len()))
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn size_of(path: &Path) -> String {
    match fs::metadata(path) {
        Ok(meta) if meta.len() >= 10 << 20 => format!("{} MiB", meta.len() >> 20),
        Ok(meta) => format!("{} bytes", meta.len()),
        Err(_) => "unreadable".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::Naming;
    use crate::geometry::Size;

    #[test]
    fn many_labels_are_counted_and_few_are_named() {
        let of = |count: usize| {
            let labels = (0..count).map(|i| format!("l{i}")).collect();
            of_labels(&Vocabulary { naming: Naming::Best, labels }).1
        };
        assert_eq!(of(2), "2: l0, l1");
        assert_eq!(of(80), "80: l0, l1, l2, l3, l4, l5, ...");
    }

    #[test]
    fn an_input_is_told_in_words() {
        let fit = Fit::Scale { shortest_px: 800, longest_px: 1333, multiple_px: 16, step_px: 1 };
        let (mean, std) = ([0.5; 3], [0.25, 1.0, 1.0]);
        let input = ImageInput { size: Size::new(1333, 1333), filter: Filter::Bilinear, fit, mean, std };
        let facts = of_input(&input);
        let texts: Vec<&str> = facts.iter().map(|(_, text)| text.as_str()).collect();
        let scale = "scale: short side to 800, long side at most 1333, multiples of 16";
        assert_eq!(texts, ["follows the picture", scale, "bilinear", "0.5 0.5 0.5", "0.25 1 1"]);
    }
}
