//! Trained models on real photos, against numbers that Python made (scripts/reference/detect_and_embed.py),
//! and against themselves when the picture is turned.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use croprow::config::{DecodeConfig, Device, EmbedConfig, MAX_PIXELS_DEFAULT, Precision};
use croprow::geometry::{BoxPx, Scale};
use croprow::model::device::EffectiveDevice;
use croprow::model::embedder::VectorModel;
use croprow::model::files::locate;
use croprow::model::{Embedder, Loaded, library};
use croprow::pixels::{decode, header, tensor};
use croprow::recipe::{Decode, Truncated};
use image::{DynamicImage, RgbImage};
use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress};
use ndarray::Array4;
use rusqlite::Connection;
use serde_json::Value;

use crate::support::root;

/// Both frameworks decode JPEG and resize by the same rules; rounding differs by a grey level here and there.
const IOU_LEAST: f32 = 0.98;
const SCORE_MOST: f32 = 0.01;
const COSINE_LEAST: f64 = 0.999;

struct Found {
    label: String,
    score: f32,
    bbox: BoxPx,
    vector: Vec<f32>,
}

/// Runs the program with the trained models and returns what it found per file, best first.
fn run_on(folder: &Path, files: &[PathBuf], detector: &str) -> Vec<Vec<Found>> {
    let db = folder.join(format!("{detector}.db"));
    let models = root().join(".demo/models");
    let croprow = || Command::new(env!("CARGO_BIN_EXE_croprow"));
    assert!(models.join(detector).exists(), "the trained models are missing: run scripts/test.sh, it fetches them");
    assert!(croprow().arg("add").arg(&db).args(files).status().unwrap().success());
    let mut run = croprow();
    run.arg("-q").arg("run").arg(&db).args(["--device", "cpu", "--decode", "exact"]);
    run.arg("--detector").arg(models.join(detector)).arg("--embedder").arg(models.join("efficientnet-lite0"));
    assert!(run.status().unwrap().success());
    let conn = Connection::open(&db).unwrap();
    let mut statement = conn
        .prepare(
            "SELECT r.label, r.score, r.x0, r.y0, r.x1, r.y1, e.vector FROM images i JOIN regions r ON r.image_id = i.id
             JOIN embeddings e ON e.region_id = r.id WHERE i.path = ?1 ORDER BY r.score DESC",
        )
        .unwrap();
    let mut found = |file: &PathBuf| -> Vec<Found> {
        let rows = statement.query_map([file.to_str().unwrap()], |r| {
            let bytes: Vec<u8> = r.get(6)?;
            let vector = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let bbox = BoxPx { x0: r.get(2)?, y0: r.get(3)?, x1: r.get(4)?, y1: r.get(5)? };
            Ok(Found { label: r.get(0)?, score: r.get(1)?, bbox, vector })
        });
        rows.unwrap().map(Result::unwrap).collect()
    };
    files.iter().map(&mut found).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Little-endian f16 in base64.
fn vector(text: &str) -> Vec<f32> {
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut held) = (Vec::new(), 0_u32, 0);
    for digit in text.chars().filter_map(|c| alphabet.find(c)) {
        (bits, held) = (bits << 6 | digit as u32, held + 6);
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    bytes.chunks_exact(2).map(|b| f16(u16::from_le_bytes([b[0], b[1]]))).collect()
}

fn f16(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    sign * if exponent == 0 { fraction * 2_f32.powi(-24) } else { (1024.0 + fraction) * 2_f32.powi(exponent - 25) }
}

/// Every detection of one list has its like in the other; vectors are compared where there is a limit.
fn assert_alike(
    name: &str,
    ours: &[Found],
    theirs: &[Found],
    iou_least: f32,
    score_most: f32,
    cosine_least: Option<f64>,
) {
    let labels = |found: &[Found]| found.iter().map(|f| format!("{} {:.3}", f.label, f.score)).collect::<Vec<_>>();
    assert_eq!(ours.len(), theirs.len(), "{name}: {:?} against {:?}", labels(ours), labels(theirs));
    for reference in theirs {
        let like = |f: &&Found| f.label == reference.label && f.bbox.iou(reference.bbox) >= iou_least;
        let Some(found) = ours.iter().find(like) else {
            panic!("{name}: no {} at {:?}; there are {:?}", reference.label, reference.bbox, labels(ours));
        };
        assert!(
            (found.score - reference.score).abs() <= score_most,
            "{name}: {} against {}",
            found.score,
            reference.score
        );
        if let Some(least) = cosine_least {
            let similarity = cosine(&found.vector, &reference.vector);
            assert!(similarity >= least, "{name}: {} has cosine {similarity}", reference.label);
        }
    }
}

/// The reference's photos that are there, and what it found in them.
fn expected() -> Vec<(PathBuf, Vec<Found>)> {
    let text = fs::read_to_string(root().join("tests/data/reference/photos.json")).unwrap();
    let reference: Value = serde_json::from_str(&text).unwrap();
    let detection = |d: &Value| {
        let edge = |i: usize| d["box"][i].as_f64().unwrap() as f32;
        Found {
            label: d["label"].as_str().unwrap().to_owned(),
            score: d["score"].as_f64().unwrap() as f32,
            bbox: BoxPx { x0: edge(0), y0: edge(1), x1: edge(2), y1: edge(3) },
            vector: vector(d["vector_f16_base64"].as_str().unwrap()),
        }
    };
    let photos = reference["photos"].as_array().unwrap().iter().map(|photo| {
        let file = root().join(".demo/photos").join(photo["file"].as_str().unwrap());
        (file, photo["detections"].as_array().unwrap().iter().map(detection).collect())
    });
    // Without Debian's packages seven photos cannot be had.
    let there: Vec<_> = photos.filter(|(file, _)| file.exists()).collect();
    assert!(there.len() >= 8, "the photos are missing: run scripts/test.sh, it fetches them");
    there
}

#[test]
fn photos_give_the_same_detections_as_the_python_reference() {
    let expected = expected();
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = expected.iter().map(|(file, _)| file.clone()).collect();
    for detector in ["yolov3-tiny", "yolov3-tiny-v5"] {
        let found = run_on(folder.path(), &files, detector);
        for ((file, theirs), ours) in expected.iter().zip(&found) {
            let name = format!("{detector}, {}", file.file_name().unwrap().to_string_lossy());
            assert_alike(&name, ours, theirs, IOU_LEAST, SCORE_MOST, None);
        }
    }
}

#[test]
fn crops_give_the_same_vectors_as_the_python_reference() {
    let model = root().join(".demo/models/efficientnet-lite0");
    let decode = DecodeConfig { max_pixels: MAX_PIXELS_DEFAULT, truncated: Truncated::Fail, mode: Decode::Exact };
    let config = EmbedConfig { model, precision: Precision::Auto, crop_fit: None, normalize: None };
    let files = locate(&config.model, config.precision, false).unwrap();
    let runtime = library::load(None, Device::Cpu, 2).unwrap();
    let (mut embedder, _) = VectorModel::load(&files, &config, &runtime, &EffectiveDevice::cpu(None)).unwrap();
    let input = embedder.input().clone();
    let mut compared = 0;
    for (file, detections) in expected() {
        let pixels = decode::decode(&header::probe(&file, &decode).unwrap(), &decode, Scale::FULL).unwrap().picture;
        for reference in detections {
            // The reference cuts whole pixels.
            let BoxPx { x0, y0, x1, y1 } = reference.bbox;
            let crop = BoxPx { x0: x0.floor(), y0: y0.floor(), x1: x1.ceil(), y1: y1.ceil() };
            let mut batch = Array4::zeros((1, 3, input.size.height_px as usize, input.size.width_px as usize));
            tensor::fill(&pixels, crop, &input, batch.as_slice_mut().unwrap()).unwrap();
            let ours = embedder.embed(&batch).unwrap().remove(0).unwrap();
            let similarity = cosine(&ours, &reference.vector);
            assert!(similarity >= COSINE_LEAST, "{}: {}: cosine {similarity}", file.display(), reference.label);
            compared += 1;
        }
    }
    assert!(compared >= 12, "only {compared} crops");
}

#[test]
fn all_eight_orientations_of_a_picture_give_the_same_boxes_and_vectors() {
    let folder = tempfile::tempdir().unwrap();
    let upright =
        image::open(root().join(".demo/photos/person.jpg")).expect("run scripts/test.sh: it fetches the photos");
    let files: Vec<PathBuf> = (1..=8)
        .map(|orientation| {
            let path = folder.path().join(format!("{orientation}.jpg"));
            fs::write(&path, jpeg(&stored_as(&upright, orientation), orientation)).unwrap();
            path
        })
        .collect();
    let found = run_on(folder.path(), &files, "yolov3-tiny");
    assert!(found[0].len() >= 3);
    for (orientation, ours) in (1..).zip(&found) {
        assert_alike(&format!("orientation {orientation}"), ours, &found[0], 0.9, SCORE_MOST, Some(0.995));
        for (a, b) in ours.iter().zip(&found[0]) {
            let distance = |x: f32, y: f32| (x - y).abs();
            let (a, b) = (a.bbox, b.bbox);
            let most = [distance(a.x0, b.x0), distance(a.y0, b.y0), distance(a.x1, b.x1), distance(a.y1, b.y1)];
            assert!(most.iter().all(|d| *d <= 2.0), "orientation {orientation}: {most:?} px");
        }
    }
    let conn = Connection::open(folder.path().join("yolov3-tiny.db")).unwrap();
    let sizes: i64 = conn
        .query_row("SELECT count(*) FROM images WHERE width_px = 640 AND height_px = 424", [], |r| r.get(0))
        .unwrap();
    assert_eq!(sizes, 8, "stored sizes are upright");
}

/// The pixels that a camera would store so that `orientation` makes them upright again: the inverse turn.
fn stored_as(upright: &DynamicImage, orientation: u8) -> RgbImage {
    let turned = match orientation {
        2 => upright.fliph(),
        3 => upright.rotate180(),
        4 => upright.flipv(),
        5 => upright.rotate90().fliph(),
        6 => upright.rotate270(),
        7 => upright.rotate270().fliph(),
        8 => upright.rotate90(),
        _ => upright.clone(),
    };
    turned.to_rgb8()
}

/// A JPEG with an EXIF block that holds nothing but the orientation. Full colour resolution: otherwise what
/// is compared is where chroma was averaged.
fn jpeg(pixels: &RgbImage, orientation: u8) -> Vec<u8> {
    let (width, height) = (pixels.width() as usize, pixels.height() as usize);
    let mut bytes = compress(pixels, width, height, PixelFormat::Rgb, 100, Subsampling::S444).unwrap();
    let mut exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".to_vec();
    exif.extend([orientation, 0, 0, 0, 0, 0, 0, 0]);
    let mut segment = vec![0xff, 0xe1];
    segment.extend((exif.len() as u16 + 2).to_be_bytes());
    segment.extend(exif);
    bytes.splice(2..2, segment);
    bytes
}
