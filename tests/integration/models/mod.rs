//! Adapters on real ONNX files with the real runtime library, on the CPU. The tiny graphs and the numbers they
//! are held against were made by `scripts/reference/tiny_models.py`.
//!
//! Cases that need a process of their own (the library is loaded once per process) are ignored tests that the
//! others start as children.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bound;
mod children;
mod detectors;
mod families;
mod onnx;
mod refused;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use croprow::config::{Device, EmbedConfig, Precision};
use croprow::geometry::{BoxPx, Size};
use croprow::model::boxes::select;
use croprow::model::device::{self, EffectiveDevice};
use croprow::model::embedder::VectorModel;
use croprow::model::files::{NoCache, digest, locate};
use croprow::model::library::{self, Runtime};
use croprow::model::{Asked, Detector, Embedder, Found, Loaded, ModelError, detector};
use croprow::recipe::{CropFit, Filter, Fit, Selection};
use croprow::row::{Detection, RowCode, RowError};
use ndarray::{Array4, Axis, concatenate, s};
use serde_json::Value;

use crate::support::fake::{GPU, detect_config, selection};

/// The reference is rounded to six digits; the rest is the order of additions.
const NUMBERS_AGREE: f32 = 1e-5;

/// Names the library to a child.
const LIBRARY_FOR_CHILD: &str = "CROPROW_TEST_LIBRARY";

/// A library that is refused must be refused before anybody wonders.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);

const TINY_SIDE: usize = 32;

fn root(path: &str) -> PathBuf {
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    assert!(full.exists(), "{} is missing: run scripts/test.sh", full.display());
    full
}

fn runtime() -> Runtime {
    library::load(None, Device::Cpu, 2).unwrap_or_else(|e| panic!("run scripts/test.sh ({e})"))
}

fn yolo(model: &Path) -> Result<(Box<dyn Detector>, Option<String>), String> {
    let files = locate(model, Precision::Auto, false).map_err(|e| e.to_string())?;
    let config = detect_config(selection(0.3));
    detector::load(&files, &config, &runtime(), &EffectiveDevice::cpu(None)).map_err(|e| e.to_string())
}

/// What a detector of classes says of each image of `batch`.
fn detections(detector: &mut dyn Detector, batch: &Array4<f32>, floor: f32) -> Vec<Result<Found, RowError>> {
    let (images, _, height, width) = batch.dim();
    let asked = vec![Asked { prompt: None, valid: Size::new(width as u32, height as u32) }; images];
    detector.detect(batch, &asked, floor).unwrap()
}

fn only(mut found: Vec<Result<Found, RowError>>) -> Found {
    found.remove(0).unwrap()
}

fn embedder_as(
    model: &Path,
    crop_fit: Option<CropFit>,
    normalize: Option<bool>,
) -> Result<(VectorModel, Option<String>), String> {
    let files = locate(model, Precision::Auto, false).map_err(|e| e.to_string())?;
    let config = EmbedConfig { model: model.to_path_buf(), precision: Precision::Auto, crop_fit, normalize };
    VectorModel::load(&files, &config, &runtime(), &EffectiveDevice::cpu(None)).map_err(|e| e.to_string())
}

fn embedder(model: &Path) -> Result<(VectorModel, Option<String>), String> {
    embedder_as(model, None, None)
}

fn tiny(name: &str) -> PathBuf {
    root("tests/data/models").join(name)
}

fn reference(model: &str) -> BTreeMap<String, Value> {
    let text = fs::read_to_string(root("tests/data/reference/tiny.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(all["models"][model].clone()).unwrap()
}

/// The images of the reference that need no resizing, 0..=1, `[1, 3, 32, 32]`.
fn image(name: &str) -> Option<Array4<f32>> {
    let solid = |rgb: [f32; 3]| Array4::from_shape_fn((1, 3, TINY_SIDE, TINY_SIDE), |(_, c, _, _)| rgb[c] / 255.0);
    match name {
        "black" => Some(solid([0.0; 3])),
        "white" => Some(solid([255.0; 3])),
        "red" => Some(solid([255.0, 0.0, 0.0])),
        "green" => Some(solid([0.0, 255.0, 0.0])),
        "grey" => Some(solid([128.0; 3])),
        "gradient" => Some(Array4::from_shape_fn((1, 3, TINY_SIDE, TINY_SIDE), |(_, c, y, x)| {
            ([8 * x, 8 * y, 4 * (x + y)][c] % 256) as f32 / 255.0
        })),
        _ => None,
    }
}

fn one_batch(names: &[&str]) -> Array4<f32> {
    let images: Vec<Array4<f32>> = names.iter().map(|n| image(n).unwrap()).collect();
    concatenate(Axis(0), &images.iter().map(|i| i.view()).collect::<Vec<_>>()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= NUMBERS_AGREE)
}

fn sides(b: BoxPx) -> [f32; 4] {
    [b.x0, b.y0, b.x1, b.y1]
}

fn assert_detections(found: &[Detection], expected: &Value, what: &str) {
    let frame = Size::new(TINY_SIDE as u32, TINY_SIDE as u32);
    let expected = expected.as_array().unwrap();
    assert_eq!(found.len(), expected.len(), "{what}: {found:?}");
    for (found, expected) in found.iter().zip(expected) {
        let index = expected["class_index"].as_u64().unwrap() as usize;
        assert_eq!(found.label, ["red", "green"][index], "{what}");
        assert!(close(&[found.score], &floats(&Value::Array(vec![expected["score"].clone()]))), "{what}: {found:?}");
        let sides_expected: [f32; 4] = floats(&expected["box"]).try_into().unwrap();
        let [x0, y0, x1, y1] = sides_expected;
        let clipped = BoxPx { x0, y0, x1, y1 }.clipped(frame);
        assert!(close(&sides(found.bbox.clipped(frame)), &sides(clipped)), "{what}: {found:?}");
    }
}

#[test]
fn yolo_graphs_of_every_layout_agree_with_the_python_reference() {
    let frame = Size::new(TINY_SIDE as u32, TINY_SIDE as u32);
    for model in ["yolo-v8-tiny", "yolo-v5-tiny", "yolo-fixed-batch1-tiny", "yolo-end2end-tiny"] {
        let (mut detector, _) = yolo(&tiny(model)).unwrap();
        assert_eq!(detector.input().size, frame);
        assert!(!detector.takes_prompts());
        assert_eq!(detector.input().fit, Fit::Pad { fill: 114 });
        for (name, expected) in reference(model) {
            let Some(batch) = image(&name) else { continue };
            let found = only(detections(detector.as_mut(), &batch, 0.3));
            assert_eq!(found.vocabulary.labels, ["red", "green"]);
            // The reference suppresses nothing where the graph does it itself.
            let nms_iou = if model == "yolo-end2end-tiny" { 1.0 } else { 0.45 };
            let rule = Selection { nms_iou, ..selection(0.3) };
            let found = select(&found.candidates, &found.vocabulary, &rule, frame);
            assert_detections(&found, &expected["detections"], &format!("{model}, {name}"));
        }
    }
}

#[test]
fn an_image_in_a_batch_gives_what_it_gives_alone() {
    let names = ["red", "gradient", "black", "white"];
    let (mut detector, note) = yolo(&tiny("yolo-v8-tiny")).unwrap();
    assert_eq!((detector.fixed_batch(), note), (None, None));
    let (mut vectors, _) = embedder(&root(".demo/models/efficientnet-lite0")).unwrap();
    let together = detections(detector.as_mut(), &one_batch(&names), 0.05);
    for (name, found) in names.iter().zip(together) {
        assert_eq!(found.unwrap(), only(detections(detector.as_mut(), &image(name).unwrap(), 0.05)));
    }
    let batch =
        Array4::from_shape_fn((3, 3, 224, 224), |(i, c, y, x)| ((i * 7 + c * 5 + y * 3 + x) % 11) as f32 / 11.0);
    let together = vectors.embed(&batch).unwrap();
    for (i, vector) in together.into_iter().enumerate() {
        let alone = vectors.embed(&batch.slice(s![i..=i, .., .., ..]).to_owned()).unwrap().remove(0).unwrap();
        assert!(cosine(&vector.unwrap(), &alone) > 0.999_99);
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn nan_fails_its_image_and_no_other() {
    let (mut detector, _) = yolo(&tiny("yolo-nan-tiny")).unwrap();
    let outcome = detections(detector.as_mut(), &one_batch(&["red", "black", "white"]), 0.3);
    assert_eq!(outcome[1].as_ref().unwrap_err().code, RowCode::NanOutput);
    assert!([0, 2].iter().all(|i| !outcome[*i].as_ref().unwrap().candidates.is_empty()));
}

#[test]
fn a_graph_of_one_image_takes_none_one_and_not_two() {
    let (mut detector, _) = yolo(&tiny("yolo-fixed-batch1-tiny")).unwrap();
    assert_eq!(detector.fixed_batch(), Some(1));
    assert!(detections(detector.as_mut(), &Array4::zeros((0, 3, TINY_SIDE, TINY_SIDE)), 0.3).is_empty());
    let two = detector.detect(&one_batch(&["red", "white"]), &[], 0.3);
    assert!(matches!(two, Err(ModelError::Failed(_))));
}

#[test]
fn tokens_are_fed_and_pooled_as_the_hub_files_say() {
    let (mut model, _) = embedder(&tiny("tiny-tokens")).unwrap();
    let input = model.input().clone();
    assert_eq!((input.size, input.fit), (Size::new(28, 28), Fit::Center { resize_shortest_px: 32 }));
    assert_eq!((input.filter, input.mean, input.std), (Filter::Bicubic, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]));
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.onnx", "preprocessor_config.json"] {
        fs::copy(tiny("tiny-tokens").join(file), folder.path().join(file)).unwrap();
    }
    let with_card = |pooling: &str| {
        let card = format!("[embedder]\noutput = \"last_hidden_state\"\npooling = \"{pooling}\"\n");
        fs::write(folder.path().join("croprow.toml"), card).unwrap();
        embedder(folder.path()).unwrap().0
    };
    let (mut cls, mut mean) = (with_card("cls"), with_card("mean"));
    for (name, expected) in reference("tiny-tokens") {
        let Some(pixels) = image(&name) else { continue };
        let batch = Array4::from_shape_fn((1, 3, 28, 28), |(_, c, y, x)| {
            (pixels[[0, c, y + 2, x + 2]] - input.mean[c]) / input.std[c]
        });
        let tokens: Vec<Vec<f32>> = expected["last_hidden_state"].as_array().unwrap().iter().map(floats).collect();
        let average: Vec<f32> = (0..8).map(|d| tokens.iter().map(|t| t[d]).sum::<f32>() / 5.0).collect();
        let of = |model: &mut VectorModel| model.embed(&batch).unwrap().remove(0).unwrap();
        assert!(close(&of(&mut model), &floats(&expected["pooler_output"])), "{name}");
        assert!(close(&of(&mut cls), &tokens[0]), "{name}");
        assert!(close(&of(&mut mean), &average), "{name}");
    }
}

#[test]
fn a_vector_has_length_one_where_the_model_or_the_user_says_so() {
    let length = |vector: &[f32]| vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let batch = Array4::from_shape_fn((1, 3, 224, 224), |(_, c, y, x)| ((c + y * x) % 13) as f32 / 6.5 - 1.0);
    let path = root(".demo/models/efficientnet-lite0");
    let (mut own, _) = embedder(&path).unwrap();
    assert_eq!((own.dim(), own.input().fit), (1280, Fit::Squash));
    assert!((length(&own.embed(&batch).unwrap().remove(0).unwrap()) - 1.0).abs() < 1e-6);
    let (mut raw, _) = embedder_as(&path, Some(CropFit::Pad), Some(false)).unwrap();
    assert_eq!(raw.input().fit, Fit::Pad { fill: 0 });
    assert!((length(&raw.embed(&batch).unwrap().remove(0).unwrap()) - 1.0).abs() > 0.01);
}

/// Nearly as `pixels` does it: good enough for what a person sees.
fn letterboxed(path: &Path, side: u32) -> (Array4<f32>, f32, [u32; 2]) {
    let photo = image::open(path).unwrap().to_rgb8();
    let scale = side as f32 / photo.width().max(photo.height()) as f32;
    let [w, h] = [photo.width(), photo.height()].map(|v| (v as f32 * scale).round() as u32);
    let small = image::imageops::resize(&photo, w, h, image::imageops::FilterType::Triangle);
    let offset = [(side - w) / 2, (side - h) / 2];
    let mut tensor = Array4::from_elem((1, 3, side as usize, side as usize), 114.0 / 255.0);
    for (x, y, pixel) in small.enumerate_pixels() {
        for c in 0..3 {
            tensor[[0, c, (y + offset[1]) as usize, (x + offset[0]) as usize]] = f32::from(pixel.0[c]) / 255.0;
        }
    }
    (tensor, scale, offset)
}

#[test]
fn a_trained_detector_finds_the_people_and_the_bus_in_both_layouts() {
    let (batch, scale, offset) = letterboxed(&root(".demo/photos/bus.jpg"), 416);
    let found = ["yolov3-tiny", "yolov3-tiny-v5"].map(|name| {
        let (mut detector, note) = yolo(&root(".demo/models").join(name)).unwrap();
        assert_eq!(note, None);
        only(detections(detector.as_mut(), &batch, 0.05))
    });
    assert_eq!(found[0].vocabulary.labels.len(), 80);
    assert_eq!(found[0].candidates.len(), found[1].candidates.len());
    for (a, b) in found[0].candidates.iter().zip(&found[1].candidates) {
        assert_eq!(a.scores[0].label, b.scores[0].label);
        // Objectness times class is rounded in the graph or here.
        assert!((a.best() - b.best()).abs() < 1e-5 && a.bbox.iou(b.bbox) > 0.9999, "{a:?} {b:?}");
    }
    let kept = select(&found[0].candidates, &found[0].vocabulary, &selection(0.3), Size::new(416, 416));
    let labels: Vec<&str> = kept.iter().map(|d| d.label.as_str()).collect();
    assert_eq!(labels, ["person", "person", "bus", "person"]);
    let best = sides(kept[0].bbox);
    let photo: Vec<f32> = best.iter().zip([0, 1, 0, 1]).map(|(v, axis)| (v - offset[axis] as f32) / scale).collect();
    for (found, expected) in photo.iter().zip([46.0, 407.0, 210.0, 891.0]) {
        assert!((found - expected).abs() < 4.0, "{photo:?}");
    }
}

#[test]
fn a_terminated_session_answers_terminated() {
    let (mut detector, _) = yolo(&tiny("yolo-v8-tiny")).unwrap();
    detector.terminator().terminate();
    let ended = detector.detect(&one_batch(&["red"]), &[], 0.3);
    assert!(matches!(ended, Err(ModelError::Terminated)));
}

#[test]
fn the_demo_models_have_digests() {
    let files = locate(&root(".demo/models/efficientnet-lite0"), Precision::Auto, false).unwrap();
    assert_eq!(files.companions.len(), 1);
    assert_eq!(digest(&files, &mut NoCache).unwrap().len(), 64);
}
