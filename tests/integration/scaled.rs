//! Trained models on large photos: what a scaled decode changes in vectors and boxes, against the exact one.

use std::path::{Path, PathBuf};

use croprow::candidate::{Candidate, Kept};
use croprow::config::{DecodeConfig, Device, EmbedConfig, MAX_PIXELS_DEFAULT, Precision};
use croprow::geometry::{BoxPx, Scale, Size};
use croprow::model::boxes::regions_of;
use croprow::model::device::EffectiveDevice;
use croprow::model::embedder::VectorModel;
use croprow::model::files::{ModelFiles, locate};
use croprow::model::{Asked, Detector, Embedder, Loaded, detector, library};
use croprow::pixels::decode::decode;
use croprow::pixels::header::{Probed, probe};
use croprow::pixels::picture::Picture;
use croprow::pixels::tensor::{Placed, fill, wanted};
use croprow::recipe::{Decode, ImageInput, Truncated};
use croprow::row::Region;
use image::{Rgb, RgbImage, imageops};
use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress, compress_progressive};
use ndarray::Array4;

use crate::support::fake::{detect_config, selection};
use crate::support::root;

const COSINE_LEAST: f64 = 0.9995;
const IOU_LEAST: f32 = 0.95;
const CONFIG: DecodeConfig =
    DecodeConfig { max_pixels: MAX_PIXELS_DEFAULT, truncated: Truncated::Fail, mode: Decode::Exact };

/// Millions of pixels: each photo takes the next size and coding.
const MEGAPIXELS: [f64; 4] = [12.0, 5.0, 10.0, 8.0];

/// The demo's photos as a large camera would have stored them: enlarged, with noise of its sensor, as JPEG.
fn photos(folder: &Path) -> Vec<Probed> {
    let mut names: Vec<PathBuf> =
        root().join(".demo/photos").read_dir().expect("run scripts/test.sh").map(|e| e.unwrap().path()).collect();
    names.sort();
    let mut photos = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let small = image::open(name).unwrap().to_rgb8();
        let factor = (MEGAPIXELS[i % 4] * 1e6 / f64::from(small.width() * small.height())).sqrt();
        let side = |px: u32| (f64::from(px) * factor) as u32;
        let (width, height) = (side(small.width()), side(small.height()));
        let mut large = imageops::resize(&small, width, height, imageops::FilterType::CatmullRom);
        add_noise(&mut large, i as u32);
        let encode = if i % 5 == 4 { compress_progressive } else { compress };
        let subsampling = if i % 3 == 2 { Subsampling::S444 } else { Subsampling::S420 };
        let (w, h) = (width as usize, height as usize);
        let jpeg = encode(large.as_raw(), w, h, PixelFormat::Rgb, 90, subsampling).unwrap();
        let path = folder.join(name.file_name().unwrap()).with_extension("jpg");
        std::fs::write(&path, jpeg).unwrap();
        photos.push(probe(&path, &CONFIG).unwrap());
    }
    assert!(photos.len() >= 10, "only {} photos", photos.len());
    photos
}

/// Grain as of a sensor: the same for all colours, about 2.5 levels around the picture.
fn add_noise(image: &mut RgbImage, seed: u32) {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        i32::try_from(state >> 29).unwrap()
    };
    for Rgb(pixel) in image.pixels_mut() {
        // The sum of two dice of eight sides.
        let grain = (next() + next() - 7) * 3 / 4;
        for value in pixel {
            *value = (i32::from(*value) + grain).clamp(0, 255) as u8;
        }
    }
}

fn model(name: &str) -> ModelFiles {
    locate(&root().join(".demo/models").join(name), Precision::Auto, false)
        .expect("run scripts/test.sh: it fetches the models")
}

fn embedder() -> VectorModel {
    let config = EmbedConfig { model: "".into(), precision: Precision::Auto, crop_fit: None, normalize: None };
    let runtime = library::load(None, Device::Cpu, 2).unwrap();
    VectorModel::load(&model("efficientnet-lite0"), &config, &runtime, &EffectiveDevice::cpu(None)).unwrap().0
}

fn detector() -> Box<dyn Detector> {
    let runtime = library::load(None, Device::Cpu, 2).unwrap();
    let config = detect_config(selection(0.3));
    detector::load(&model("yolov3-tiny"), &config, &runtime, &EffectiveDevice::cpu(None)).unwrap().0
}

fn at(probed: &Probed, scale: Scale) -> Picture {
    decode(probed, &CONFIG, scale).unwrap().picture
}

fn tensor(picture: &Picture, region: BoxPx, input: &ImageInput) -> (Array4<f32>, Placed) {
    let size = input.tensor_size(picture.image);
    let mut batch = Array4::zeros((1, 3, size.height_px as usize, size.width_px as usize));
    let placed = fill(picture, region, input, batch.as_slice_mut().unwrap()).unwrap();
    (batch, placed)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The whole photo and most of it.
fn regions(image: Size) -> [BoxPx; 2] {
    let (w, h) = (image.width_px as f32, image.height_px as f32);
    [BoxPx::whole(image), BoxPx { x0: w * 0.053, y0: h * 0.041, x1: w * 0.957, y1: h * 0.963 }]
}

#[test]
fn vectors_of_scaled_pictures_are_those_of_the_full_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut embedder = embedder();
    let input = embedder.input().clone();
    let (mut worst, mut scaled) = (1.0_f64, 0);
    for probed in photos(folder.path()) {
        let mut full = None;
        for region in regions(probed.upright) {
            let size = Size::new(region.width() as u32, region.height() as u32);
            let rule = Scale::that_holds(size, wanted(size, &input, Decode::Scaled.embedder_spare(false).unwrap()));
            if rule == Scale::FULL {
                continue;
            }
            let mut vector =
                |picture: &Picture| embedder.embed(&tensor(picture, region, &input).0).unwrap().remove(0).unwrap();
            let exact = vector(full.get_or_insert_with(|| at(&probed, Scale::FULL)));
            let similarity = cosine(&exact, &vector(&at(&probed, rule)));
            println!("{rule:?} of {size:?}: cosine {similarity:.6}");
            (worst, scaled) = (worst.min(similarity), scaled + 1);
        }
    }
    println!("least cosine {worst} of {scaled}");
    assert!(scaled >= 12 && worst >= COSINE_LEAST, "{worst} of {scaled}");
}

fn detected(detector: &mut dyn Detector, picture: &Picture, input: &ImageInput, threshold: f32) -> Vec<Region> {
    let (batch, placed) = tensor(picture, BoxPx::whole(picture.image), input);
    let asked = [Asked { prompt: None, valid: placed.valid }];
    let found = detector.detect(&batch, &asked, 0.05).unwrap().remove(0).unwrap();
    let in_image =
        found.candidates.into_iter().map(|c| Candidate { bbox: placed.placement.to_image(c.bbox), ..c }).collect();
    let kept = Kept::of(in_image, found.vocabulary.naming, picture.image);
    regions_of(&kept.packed, &found.vocabulary, &selection(threshold), picture.image).unwrap()
}

/// A score at the threshold may fall to either side, so each list is held against the other's at a lower one.
#[test]
fn boxes_of_scaled_pictures_are_those_of_the_full_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut detector = detector();
    let input = detector.input().clone();
    let (mut all, mut alike) = (0, 0);
    for probed in photos(folder.path()) {
        let rule = probed.scale_for(wanted(probed.upright, &input, Decode::Scaled.detector_spare().unwrap()));
        if rule == Scale::FULL {
            continue;
        }
        let (full, small) = (at(&probed, Scale::FULL), at(&probed, rule));
        let mut found = |picture: &Picture, threshold| detected(detector.as_mut(), picture, &input, threshold);
        let pairs = [(found(&full, 0.3), found(&small, 0.25)), (found(&small, 0.3), found(&full, 0.25))];
        for (ours, theirs) in &pairs {
            for region in ours {
                let same = theirs.iter().filter(|r| r.label == region.label);
                let best = same.map(|r| r.bbox.iou(region.bbox)).fold(0.0, f32::max);
                println!("{rule:?} of {:?}: IoU {best:.4}", probed.upright);
                (all, alike) = (all + 1, alike + usize::from(best >= IOU_LEAST));
            }
        }
    }
    println!("{alike} of {all} alike");
    assert!(all >= 25 && alike * 100 >= all * 99, "{alike} of {all}");
}
