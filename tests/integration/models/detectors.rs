//! One tiny, seeded model per output contract, against what `transformers` says of it, stage by stage: pixels,
//! outputs for the same pixels, selection. Made by `scripts/reference/tiny_families.py`.

use croprow::config::{DecodeConfig, MAX_PIXELS_DEFAULT};
use croprow::geometry::{BoxPx, Scale};
use croprow::pixels::picture::Picture as Pixels;
use croprow::pixels::{decode, header, tensor};
use croprow::recipe::{ImageInput, Truncated};
use serde::Deserialize;

use super::*;

/// The processors of the reference differ among themselves by one grey level.
const LEVELS_MOST: f32 = 1.01;
const BOX_MOST: f32 = 1e-4;
const SCORE_MOST: f32 = 1e-3;

const SOFTMAX: [&str; 2] = ["detr", "yolos"];
const SIGMOID: [&str; 5] = ["conditional_detr", "deformable_detr", "rt_detr", "rt_detr_v2", "d_fine"];
const TEXT: [&str; 2] = ["owlvit", "owlv2"];

#[derive(Deserialize)]
struct Family {
    model: String,
    threshold: f32,
    pictures: Vec<Picture>,
}

#[derive(Deserialize)]
struct Picture {
    file: String,
    upright: [u32; 2],
    tensor: [u32; 2],
    pixels: String,
    prompt: Option<Vec<String>>,
    logits: Vec<Vec<f32>>,
    pred_boxes: Vec<[f32; 4]>,
    detections: Vec<Detected>,
}

#[derive(Deserialize)]
struct Detected {
    label: String,
    score: f32,
    #[serde(rename = "box")]
    bbox: [f32; 4],
}

fn family(name: &str) -> (Family, Box<dyn Detector>) {
    let path = root("tests/data/reference/families").join(format!("{name}.json"));
    let family: Family = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let detector = yolo(&tiny(&family.model)).unwrap_or_else(|e| panic!("{name}: {e}")).0;
    (family, detector)
}

fn size([width, height]: [u32; 2]) -> Size {
    Size::new(width, height)
}

/// The reference's input, normalised, `[3, height, width]` flat: from grey levels, or as it is.
fn reference_input(picture: &Picture, input: &ImageInput) -> Vec<f32> {
    let path = root("tests/data/reference/families").join(&picture.pixels);
    if picture.pixels.ends_with(".f32") {
        let bytes = fs::read(path).unwrap();
        return bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    }
    let levels = image::open(path).unwrap().to_rgb8();
    assert_eq!(levels.dimensions(), (picture.tensor[0], picture.tensor[1]));
    (0..3)
        .flat_map(|c| levels.pixels().map(move |p| p.0[c]))
        .zip((0..3).flat_map(|c| std::iter::repeat_n(c, levels.width() as usize * levels.height() as usize)))
        .map(|(level, c)| (f32::from(level) / 255.0 - input.mean[c]) / input.std[c])
        .collect()
}

fn found(detector: &mut dyn Detector, picture: &Picture, floor: f32) -> Found {
    let of = size(picture.tensor);
    let values = reference_input(picture, detector.input());
    let batch = Array4::from_shape_vec((1, 3, of.height_px as usize, of.width_px as usize), values).unwrap();
    let prompt = picture.prompt.as_ref().map(|labels| serde_json::to_string(labels).unwrap());
    let asked = [Asked { prompt: prompt.as_deref(), valid: of }];
    only(detector.detect(&batch, &asked, floor).unwrap())
}

fn scores(name: &str, logits: &[f32]) -> Vec<f32> {
    if !SOFTMAX.contains(&name) {
        return logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    }
    let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    logits[..logits.len() - 1].iter().map(|x| (f64::from(*x).exp() / total) as f32).collect()
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn pixels_of_every_family_equal_the_references_within_one_grey_level() {
    let config = DecodeConfig {
        max_pixels: MAX_PIXELS_DEFAULT,
        truncated: Truncated::Fail,
        mode: croprow::recipe::Decode::Exact,
    };
    for name in SOFTMAX.iter().chain(&SIGMOID).chain(&TEXT) {
        let (family, detector) = family(name);
        let input = detector.input().clone();
        for picture in &family.pictures {
            let path = root(&picture.file);
            let upright = decode::decode(&header::probe(&path, &config).unwrap(), &config, Scale::FULL).unwrap();
            assert_eq!(upright.facts.upright, size(picture.upright));
            assert_eq!(input.tensor_size(upright.facts.upright), size(picture.tensor), "{name}, {}", picture.file);
            let mut ours = vec![f32::NAN; input.values(upright.facts.upright)];
            tensor::fill(&upright.picture, BoxPx::whole(upright.facts.upright), &input, &mut ours).unwrap();
            let theirs = reference_input(picture, &input);
            let plane = ours.len() / 3;
            let worst = (0..3)
                .map(|c| {
                    let range = c * plane..(c + 1) * plane;
                    255.0 * input.std[c] * farthest(&ours[range.clone()], &theirs[range])
                })
                .fold(0.0, f32::max);
            println!("{name}, {}: worst {worst:.3}", picture.file);
            assert!(worst <= LEVELS_MOST, "{name}, {}: {worst} grey levels", picture.file);
        }
    }
}

#[test]
fn the_same_pixels_give_the_same_boxes_and_scores_in_every_family() {
    for name in SOFTMAX.iter().chain(&SIGMOID).chain(&TEXT) {
        let (family, mut detector) = family(name);
        for picture in &family.pictures {
            // With every label kept, candidate number i is query number i.
            let found = found(detector.as_mut(), picture, -1.0);
            assert_eq!(found.candidates.len(), picture.logits.len(), "{name}");
            let (w, h) = (picture.tensor[0] as f32, picture.tensor[1] as f32);
            for (query, candidate) in found.candidates.iter().enumerate() {
                let [cx, cy, bw, bh] = picture.pred_boxes[query];
                let theirs = [cx - bw / 2.0, cy - bh / 2.0, cx + bw / 2.0, cy + bh / 2.0];
                let [x0, y0, x1, y1] = sides(candidate.bbox);
                let distance = farthest(&[x0 / w, y0 / h, x1 / w, y1 / h], &theirs);
                assert!(distance <= BOX_MOST, "{name}, {}, query {query}: box off by {distance}", picture.file);
                let theirs = scores(name, &picture.logits[query]);
                let mut ours = vec![f32::NAN; theirs.len()];
                candidate.scores.iter().for_each(|s| ours[s.label] = s.score);
                assert!(ours.iter().all(|s| s.is_finite()), "{name}, query {query}: {} labels", candidate.scores.len());
                let distance = farthest(&ours, &theirs);
                assert!(distance <= SCORE_MOST, "{name}, {}, query {query}: score off by {distance}", picture.file);
            }
        }
    }
}

#[test]
fn the_selection_of_every_family_equals_the_references() {
    for name in SOFTMAX.iter().chain(&SIGMOID).chain(&TEXT) {
        let (family, mut detector) = family(name);
        let input = detector.input().clone();
        for picture in &family.pictures {
            let found = found(detector.as_mut(), picture, 0.05);
            let upright = size(picture.upright);
            let blank = Pixels::full(image::RgbImage::new(upright.width_px, upright.height_px));
            let mut values = vec![0.0; input.values(upright)];
            let placement = tensor::fill(&blank, BoxPx::whole(upright), &input, &mut values).unwrap().placement;
            let in_image: Vec<_> = found
                .candidates
                .into_iter()
                .map(|c| croprow::candidate::Candidate { bbox: placement.to_image(c.bbox), ..c })
                .collect();
            // The reference suppresses nothing and clips nothing.
            let rule = Selection { nms_iou: 1.0, min_box_px: f32::MIN_POSITIVE, ..selection(family.threshold) };
            let ours = select(&in_image, &found.vocabulary, &rule, upright);
            let clipped = |d: &Detected| {
                let [x0, y0, x1, y1] = d.bbox;
                BoxPx { x0, y0, x1, y1 }.clipped(upright)
            };
            let mut theirs: Vec<&Detected> =
                picture.detections.iter().filter(|d| clipped(d).is_sound(f32::MIN_POSITIVE)).collect();
            theirs.sort_by(|a, b| b.score.total_cmp(&a.score));
            assert_eq!(ours.len(), theirs.len(), "{name}, {}", picture.file);
            let reach = upright.width_px.max(upright.height_px) as f32;
            for theirs in theirs {
                let alike = ours.iter().any(|o| {
                    o.label == theirs.label
                        && (o.score - theirs.score).abs() <= SCORE_MOST
                        && farthest(&sides(o.bbox), &sides(clipped(theirs))) <= BOX_MOST * reach
                });
                assert!(
                    alike,
                    "{name}, {}: no {} {} {:?} in {ours:?}",
                    picture.file, theirs.label, theirs.score, theirs.bbox
                );
            }
        }
    }
}

#[test]
fn owl_batches_of_other_prompts_equal_single_runs() {
    for name in TEXT {
        let (family, mut detector) = family(name);
        let picture = &family.pictures[0];
        let of = size(picture.tensor);
        let values = reference_input(picture, detector.input());
        let one = Array4::from_shape_vec((1, 3, of.height_px as usize, of.width_px as usize), values).unwrap();
        let words = picture.prompt.as_ref().unwrap();
        let prompts = [serde_json::to_string(words).unwrap(), words[0].clone(), words[1..].join(".")];
        let batch = concatenate(Axis(0), &[one.view(), one.view(), one.view()]).unwrap();
        let asked: Vec<Asked<'_>> = prompts.iter().map(|p| Asked { prompt: Some(p), valid: of }).collect();
        let together = detector.detect(&batch, &asked, 0.05).unwrap();
        for (asked, together) in asked.iter().zip(together) {
            let (alone, together) = (only(detector.detect(&one, &[*asked], 0.05).unwrap()), together.unwrap());
            assert_eq!(alone.vocabulary, together.vocabulary);
            assert_eq!(alone.candidates.len(), together.candidates.len(), "{name}");
            for (a, b) in alone.candidates.iter().zip(&together.candidates) {
                assert!(farthest(&sides(a.bbox), &sides(b.bbox)) < 0.01 && (a.best() - b.best()).abs() < SCORE_MOST);
                assert_eq!(a.scores[0].label, b.scores[0].label);
            }
        }
    }
}

#[test]
fn a_prompt_that_is_too_long_or_missing_fails_its_image_and_no_other() {
    let (family, mut detector) = family("owlvit");
    let picture = &family.pictures[0];
    let of = size(picture.tensor);
    let batch = Array4::zeros((3, 3, of.height_px as usize, of.width_px as usize));
    let long = "cat ".repeat(40);
    let asked = [Some("cat"), Some(long.as_str()), None].map(|prompt| Asked { prompt, valid: of });
    let answers = detector.detect(&batch, &asked, 0.05).unwrap();
    assert!(answers[0].is_ok());
    for answer in &answers[1..] {
        assert_eq!(answer.as_ref().unwrap_err().code, RowCode::Prompt);
    }
}
