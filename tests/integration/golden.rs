//! GroundingDINO against numbers of `transformers`, stage by stage: pixels, outputs for the same pixels, selection
//! for the same outputs. The model is tiny and its weights are random, so a difference of one grey level may
//! change which queries it keeps: boxes from the picture itself are compared with a trained detector (`parity`).
//! Everything is made by `scripts/reference/golden.py`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use croprow::candidate::{Candidate, Vocabulary};
use croprow::config::{DecodeConfig, DetectConfig, Device, MAX_PIXELS_DEFAULT, Precision};
use croprow::geometry::{BoxPx, Scale, Size};
use croprow::model::boxes::select;
use croprow::model::device::EffectiveDevice;
use croprow::model::files::locate;
use croprow::model::{Asked, Detector, Found, detector, library};
use croprow::pixels::{decode, header, tensor};
use croprow::recipe::{Labels, Selection, Truncated};
use image::RgbImage;
use ndarray::{Array4, s};
use rusqlite::Connection;
use serde::Deserialize;

use crate::support::fake::{detect_config, selection};
use crate::support::root;

/// The processors of the reference differ among themselves by one grey level.
const LEVELS_MOST: f32 = 1.01;
const BOX_MOST: f32 = 1e-4;
const SCORE_MOST: f32 = 1e-3;

#[derive(Deserialize)]
struct Reference {
    pictures: Vec<Picture>,
    batch: Batch,
    stepped: Vec<Stepped>,
}

#[derive(Deserialize)]
struct Picture {
    name: String,
    file: String,
    prompt: String,
    upright: [u32; 2],
    tensor: [u32; 2],
    threshold: f32,
    text_threshold: f32,
    logits: Vec<Vec<f32>>,
    pred_boxes: Vec<[f32; 4]>,
    detections: Vec<Detected>,
}

#[derive(Deserialize)]
struct Batch {
    tensor: [u32; 2],
    items: Vec<Item>,
    logits: Vec<Vec<Vec<f32>>>,
    pred_boxes: Vec<Vec<[f32; 4]>>,
}

/// A picture whose tensor's sides are filled up to multiples of `step`.
#[derive(Deserialize)]
struct Stepped {
    name: String,
    prompt: String,
    step: u32,
    tensor: [u32; 2],
    logits: Vec<Vec<f32>>,
    pred_boxes: Vec<[f32; 4]>,
}

#[derive(Deserialize)]
struct Item {
    name: String,
    prompt: String,
}

#[derive(Deserialize)]
struct Detected {
    score: f32,
    #[serde(rename = "box")]
    bbox: [f32; 4],
    label: String,
}

fn reference() -> Reference {
    serde_json::from_str(&fs::read_to_string(root().join("tests/data/golden/reference.json")).unwrap()).unwrap()
}

fn model() -> PathBuf {
    root().join("tests/data/models/grounding-dino-tiny")
}

fn load(labels: Labels) -> Box<dyn Detector> {
    load_with(DetectConfig { labels, ..detect_config(selection(0.3)) })
}

fn load_with(config: DetectConfig) -> Box<dyn Detector> {
    let runtime = library::load(None, Device::Cpu, 2).unwrap();
    let files = locate(&model(), Precision::Auto, false).unwrap();
    detector::load(&files, &config, &runtime, &EffectiveDevice::cpu(None)).unwrap().0
}

fn size([width, height]: [u32; 2]) -> Size {
    Size::new(width, height)
}

fn pixels(name: &str) -> RgbImage {
    image::open(root().join("tests/data/golden/pixels").join(format!("{name}.webp"))).unwrap().to_rgb8()
}

/// The reference's own pixels as a tensor of that size; what they do not reach is 0.
fn tensor_of(name: &str, of: Size, detector: &dyn Detector) -> Array4<f32> {
    let (mean, std) = (detector.input().mean, detector.input().std);
    let mut tensor = Array4::zeros((1, 3, of.height_px as usize, of.width_px as usize));
    for (x, y, pixel) in pixels(name).enumerate_pixels() {
        for c in 0..3 {
            tensor[[0, c, y as usize, x as usize]] = (f32::from(pixel.0[c]) - 255.0 * mean[c]) / (255.0 * std[c]);
        }
    }
    tensor
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn corners([cx, cy, w, h]: [f32; 4]) -> [f32; 4] {
    [cx - w / 2.0, cy - h / 2.0, cx + w / 2.0, cy + h / 2.0]
}

fn sides(b: BoxPx, in_size: Size) -> [f32; 4] {
    let (w, h) = (in_size.width_px as f32, in_size.height_px as f32);
    [b.x0 / w, b.y0 / h, b.x1 / w, b.y1 / h]
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// With every token kept, candidate number i is query number i.
fn assert_outputs(name: &str, found: &Found, valid: Size, logits: &[Vec<f32>], boxes: &[[f32; 4]]) {
    assert_eq!(found.candidates.len(), logits.len(), "{name}");
    for (query, candidate) in found.candidates.iter().enumerate() {
        let distance = farthest(&sides(candidate.bbox, valid), &corners(boxes[query]));
        assert!(distance <= BOX_MOST, "{name}, query {query}: box off by {distance}");
        let mut scores = vec![f32::NAN; logits[query].len()];
        candidate.scores.iter().for_each(|s| scores[s.label] = s.score);
        let expected: Vec<f32> = logits[query].iter().map(|x| sigmoid(*x)).collect();
        let distance = farthest(&scores, &expected);
        assert!(distance <= SCORE_MOST, "{name}, query {query}: score off by {distance}");
        assert!(scores.iter().all(|s| s.is_finite()), "{name}, query {query}: a token has no score");
    }
}

fn everything(detector: &mut dyn Detector, picture: &Picture) -> Found {
    let of = size(picture.tensor);
    let asked = [Asked { prompt: Some(&picture.prompt), valid: of }];
    let tensor = tensor_of(&picture.name, of, detector);
    detector.detect(&tensor, &asked, -1.0).unwrap().remove(0).unwrap()
}

#[test]
fn pixels_equal_the_references_within_one_grey_level() {
    let detector = load(Labels::Spans);
    let input = detector.input().clone();
    let config = DecodeConfig {
        max_pixels: MAX_PIXELS_DEFAULT,
        truncated: Truncated::Fail,
        mode: croprow::recipe::Decode::Exact,
    };
    for picture in reference().pictures {
        let path = root().join("tests/data/golden/pictures").join(&picture.file);
        let upright = decode::decode(&header::probe(&path, &config).unwrap(), &config, Scale::FULL).unwrap();
        assert_eq!(upright.facts.upright, size(picture.upright), "{}", picture.name);
        let of = input.tensor_size(upright.facts.upright);
        assert_eq!(of, size(picture.tensor), "{}", picture.name);
        let mut ours = vec![f32::NAN; input.values(upright.facts.upright)];
        tensor::fill(&upright.picture, BoxPx::whole(upright.facts.upright), &input, &mut ours).unwrap();
        let theirs = pixels(&picture.name);
        let (mut worst, mut off) = (0.0_f32, 0_usize);
        for (c, plane) in ours.chunks_exact(of.pixels() as usize).enumerate() {
            for (value, pixel) in plane.iter().zip(theirs.pixels()) {
                let level = (value * input.std[c] + input.mean[c]) * 255.0;
                let distance = (level - f32::from(pixel.0[c])).abs();
                worst = worst.max(distance);
                off += usize::from(distance > 0.5);
            }
        }
        println!(
            "{}: worst {worst:.2}, {:.3} % of the values differ",
            picture.name,
            100.0 * off as f32 / ours.len() as f32
        );
        assert!(worst <= LEVELS_MOST, "{}: {worst}", picture.name);
    }
}

#[test]
fn the_same_pixels_give_the_same_boxes_and_scores() {
    let mut detector = load(Labels::Phrases);
    for picture in reference().pictures {
        let found = everything(detector.as_mut(), &picture);
        assert_outputs(&picture.name, &found, size(picture.tensor), &picture.logits, &picture.pred_boxes);
    }
}

#[test]
fn four_prompts_and_sizes_in_one_padded_batch_equal_the_reference() {
    let mut detector = load(Labels::Phrases);
    let Batch { tensor, items, logits, pred_boxes } = reference().batch;
    let all = size(tensor);
    let mut batch = Array4::zeros((items.len(), 3, all.height_px as usize, all.width_px as usize));
    let valid: Vec<Size> = items
        .iter()
        .enumerate()
        .map(|(i, item)| {
            batch.slice_mut(s![i..=i, .., .., ..]).assign(&tensor_of(&item.name, all, detector.as_ref()));
            let (width, height) = pixels(&item.name).dimensions();
            Size::new(width, height)
        })
        .collect();
    let asked: Vec<Asked<'_>> =
        items.iter().zip(&valid).map(|(item, valid)| Asked { prompt: Some(&item.prompt), valid: *valid }).collect();
    let found = detector.detect(&batch, &asked, -1.0).unwrap();
    for (i, found) in found.into_iter().enumerate() {
        assert_outputs(&items[i].name, &found.unwrap(), valid[i], &logits[i], &pred_boxes[i]);
    }
}

#[test]
fn a_batch_of_mixed_prompts_equals_single_runs() {
    let mut detector = load(Labels::Spans);
    let picture = &reference().pictures[6];
    let of = size(picture.tensor);
    let one = tensor_of(&picture.name, of, detector.as_ref());
    let prompts = ["a man. a camera.", "dog", r#"["a tripod", "grass", "a tall building", "sky"]"#, "a man, a coat"];
    let mut batch = Array4::zeros((prompts.len(), 3, of.height_px as usize, of.width_px as usize));
    (0..prompts.len()).for_each(|i| batch.slice_mut(s![i..=i, .., .., ..]).assign(&one));
    let asked = prompts.map(|prompt| Asked { prompt: Some(prompt), valid: of });
    let together = detector.detect(&batch, &asked, 0.05).unwrap();
    for (asked, together) in asked.iter().zip(together) {
        let alone = detector.detect(&one, &[*asked], 0.05).unwrap().remove(0).unwrap();
        let together = together.unwrap();
        assert_eq!(together.vocabulary, alone.vocabulary);
        assert_eq!(together.candidates.len(), alone.candidates.len());
        for (a, b) in together.candidates.iter().zip(&alone.candidates) {
            assert!(farthest(&sides(a.bbox, of), &sides(b.bbox, of)) <= BOX_MOST);
            assert!((a.best() - b.best()).abs() <= SCORE_MOST && a.scores[0].label == b.scores[0].label);
        }
    }
}

#[test]
fn a_prompt_that_is_longer_than_the_model_reads_is_asked_in_parts() {
    let mut detector = load(Labels::Spans);
    let picture = &reference().pictures[6];
    let of = size(picture.tensor);
    let one = tensor_of(&picture.name, of, detector.as_ref());
    // More than 256 tokens, in labels of three and four.
    let labels: Vec<String> = (0..90).map(|i| format!("thing number {i}")).collect();
    let mut ask = |labels: &[String]| {
        let prompt = serde_json::to_string(labels).unwrap();
        let asked = [Asked { prompt: Some(&prompt), valid: of }];
        detector.detect(&one, &asked, 0.0).unwrap().remove(0).unwrap()
    };
    let whole = ask(&labels);
    assert_eq!(whole.vocabulary.labels, labels);
    let parts = whole.candidates.len() / picture.logits.len();
    assert!(parts >= 2 && whole.candidates.len() == parts * picture.logits.len(), "{parts} parts");
    let last = &whole.candidates[(parts - 1) * picture.logits.len()..];
    let first_label = last.iter().flat_map(|c| &c.scores).map(|s| s.label).min().unwrap();
    let alone = ask(&labels[first_label..]);
    for (a, b) in last.iter().zip(&alone.candidates) {
        assert!(farthest(&sides(a.bbox, of), &sides(b.bbox, of)) <= BOX_MOST);
        assert_eq!(a.scores[0].label, b.scores[0].label + first_label);
        assert!((a.best() - b.best()).abs() <= SCORE_MOST);
    }
    let too_long = format!("[\"{}\"]", "word ".repeat(300));
    let asked = [Asked { prompt: Some(&too_long), valid: of }];
    let error = detector.detect(&one, &asked, 0.0).unwrap().remove(0).unwrap_err();
    assert_eq!(error.code, croprow::row::RowCode::Prompt);
}

/// The reference's outputs as candidates in pixels of the upright picture.
fn reference_candidates(picture: &Picture) -> Vec<Candidate> {
    let upright = size(picture.upright);
    let (w, h) = (upright.width_px as f32, upright.height_px as f32);
    let each = picture.logits.iter().zip(&picture.pred_boxes);
    each.map(|(logits, b)| {
        let [x0, y0, x1, y1] = corners(*b);
        let bbox = BoxPx { x0: x0 * w, y0: y0 * h, x1: x1 * w, y1: y1 * h };
        Candidate::above(bbox, logits.iter().map(|x| sigmoid(*x)), -1.0).unwrap()
    })
    .collect()
}

#[test]
fn the_same_outputs_give_the_same_boxes_and_phrases_under_the_references_rule() {
    let mut detector = load(Labels::Phrases);
    let (mut compared, mut empty) = (0, 0);
    for picture in reference().pictures {
        let asked = [Asked { prompt: Some(&picture.prompt), valid: size(picture.tensor) }];
        let blank = Array4::zeros((1, 3, 64, 64));
        let vocabulary: Vocabulary =
            detector.detect(&blank, &asked, 0.0).unwrap().remove(0).unwrap().vocabulary.as_ref().clone();
        let rule = Selection {
            text_threshold: picture.text_threshold,
            nms_iou: 1.0,
            min_box_px: f32::MIN_POSITIVE,
            ..selection(picture.threshold)
        };
        let upright = size(picture.upright);
        let ours = select(&reference_candidates(&picture), &vocabulary, &rule, upright);
        // The reference does not clip; a box that lies outside as a whole is no region.
        let clipped = |d: &Detected| {
            let [x0, y0, x1, y1] = d.bbox;
            BoxPx { x0, y0, x1, y1 }.clipped(upright)
        };
        let theirs: Vec<&Detected> =
            picture.detections.iter().filter(|d| clipped(d).is_sound(f32::MIN_POSITIVE)).collect();
        assert_eq!(ours.len(), theirs.len(), "{}", picture.name);
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!((ours.score - theirs.score).abs() < 1e-5, "{}", picture.name);
            let reach = upright.width_px.max(upright.height_px) as f32;
            let distance = farthest(&sides(ours.bbox, Size::new(1, 1)), &sides(clipped(theirs), Size::new(1, 1)));
            assert!(distance <= reach * 1e-6, "{}: {distance} px", picture.name);
            if theirs.label.is_empty() {
                // No token but [CLS] is above the text threshold; a region is never without a label.
                assert!(!ours.label.is_empty());
                empty += 1;
            } else {
                assert_eq!(ours.label, theirs.label, "{}", picture.name);
                compared += 1;
            }
        }
    }
    println!("{compared} labels equal, {empty} empty ones of the reference replaced");
    assert!(compared >= 60 && empty <= 2);
}

#[test]
fn a_picture_in_a_stepped_tensor_gives_what_the_reference_gives_there() {
    let Reference { pictures, stepped, .. } = reference();
    for stepped in stepped {
        let shape_step_px = Some(stepped.step);
        let config = DetectConfig { labels: Labels::Phrases, shape_step_px, ..detect_config(selection(0.3)) };
        let mut detector = load_with(config);
        let picture = pixels(&stepped.name);
        let valid = Size::new(picture.width(), picture.height());
        let upright = pictures.iter().find(|p| p.name == stepped.name).map(|p| size(p.upright)).unwrap();
        let of = detector.input().tensor_size(upright);
        assert_eq!((of, detector.input().picture_size(upright)), (size(stepped.tensor), valid), "{}", stepped.name);
        let batch = tensor_of(&stepped.name, of, detector.as_ref());
        let asked = [Asked { prompt: Some(&stepped.prompt), valid }];
        let found = detector.detect(&batch, &asked, -1.0).unwrap().remove(0).unwrap();
        assert_outputs(&stepped.name, &found, valid, &stepped.logits, &stepped.pred_boxes);
    }
}

#[test]
fn every_label_is_one_of_the_prompts_and_the_same_through_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let pictures = reference().pictures;
    let rows: Vec<_> = pictures
        .iter()
        .map(|p| {
            let path = root().join("tests/data/golden/pictures").join(&p.file);
            serde_json::json!({"image_path": path, "prompt": p.prompt})
        })
        .collect();
    let (list, db) = (folder.path().join("rows.json"), folder.path().join("golden.db"));
    fs::write(&list, serde_json::to_string(&rows).unwrap()).unwrap();
    let croprow = || Command::new(env!("CARGO_BIN_EXE_croprow"));
    assert!(croprow().arg("add").arg(&db).arg("--from").arg(&list).status().unwrap().success());
    let run = croprow().args(["-q", "run"]).arg(&db).args(["--device", "cpu", "--detector"]).arg(model()).status();
    assert!(run.unwrap().success());
    let conn = Connection::open(&db).unwrap();
    let mut regions = conn
        .prepare(
            "SELECT label, count(*) FROM regions r JOIN images i ON i.id = r.image_id WHERE prompt = ?1 GROUP BY label",
        )
        .unwrap();
    let mut total = 0;
    for picture in &pictures {
        let labels: Vec<&str> = picture.prompt.split('.').map(str::trim).filter(|l| !l.is_empty()).collect();
        let found =
            regions.query_map([&picture.prompt], |r| Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?))).unwrap();
        for (label, count) in found.map(Result::unwrap) {
            assert!(labels.contains(&label.as_str()), "{}: {label}", picture.name);
            total += count;
        }
    }
    assert!(total >= 30, "only {total} regions");
    let kept: i64 = conn.query_row("SELECT count(*) FROM candidates WHERE count > 0", [], |r| r.get(0)).unwrap();
    assert_eq!(kept, pictures.len() as i64);
}
