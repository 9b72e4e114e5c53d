//! What a photo costs on the way to a tensor: decode at each scale, resize, letterbox and normalise.
//!
//!     cargo bench --bench pixels

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark that cannot go on has failed")]

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use croprow::config::{DecodeConfig, MAX_PIXELS_DEFAULT};
use croprow::geometry::{BoxPx, Scale, Size};
use croprow::pixels::decode::{decode, decode_region};
use croprow::pixels::header::{Probed, probe};
use croprow::pixels::picture::Picture;
use croprow::pixels::tensor::fill;
use croprow::recipe::{Filter, Fit, ImageInput, Truncated};
use image::{Rgb, RgbImage};
use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress, compress_progressive};

const CONFIG: DecodeConfig =
    DecodeConfig { max_pixels: MAX_PIXELS_DEFAULT, truncated: Truncated::Fail, mode: croprow::recipe::Decode::Exact };

/// 12 MP, as bytes per pixel about what a camera writes.
const PHOTO: Size = Size::new(4000, 3000);

/// One of the encoders.
type Encode = fn(&[u8], usize, usize, PixelFormat, u8, Subsampling) -> libjpeg_turbo_rs::Result<Vec<u8>>;

/// Shades with the noise of a sensor.
fn photo() -> RgbImage {
    let mut state = 1_u32;
    RgbImage::from_fn(PHOTO.width_px, PHOTO.height_px, |x, y| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let wave = |at: u32, length: f32| 128.0 + 90.0 * (at as f32 / length).sin();
        let noise = (state >> 28) as f32;
        Rgb([wave(x, 61.0) + noise, wave(y, 47.0) + noise, wave(x + y, 93.0) + noise].map(|v| v as u8))
    })
}

fn written(folder: &Path, name: &str, bytes: &[u8]) -> Probed {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    println!("{name}: {:.2} bytes a pixel", bytes.len() as f64 / PHOTO.pixels() as f64);
    probe(&path, &CONFIG).unwrap()
}

fn input(size: Size, fit: Fit) -> ImageInput {
    ImageInput { size, filter: Filter::Bicubic, fit, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] }
}

fn decoding(c: &mut Criterion, files: &[(&str, Probed)]) {
    let mut group = c.benchmark_group("decode");
    group.sample_size(10);
    for (name, probed) in files {
        for scale in Scale::ALL {
            group.bench_function(format!("{name}/1_{}", scale.denominator()), |b| {
                b.iter(|| decode(probed, &CONFIG, scale).unwrap().picture.bytes());
            });
        }
        let region = BoxPx { x0: 1500.0, y0: 1100.0, x1: 1900.0, y1: 1600.0 };
        group.bench_function(format!("{name}/region_400x500"), |b| {
            b.iter(|| decode_region(probed, &CONFIG, Scale::FULL, black_box(region)).unwrap());
        });
    }
    group.finish();
}

fn filling(c: &mut Criterion, group: &str, name: &str, picture: &Picture, input: &ImageInput) {
    let mut out = vec![0.0; input.values(picture.image)];
    let region = BoxPx::whole(picture.image);
    c.benchmark_group(group).bench_function(name, |b| {
        b.iter(|| fill(black_box(picture), region, input, &mut out).unwrap());
    });
}

fn pixels(c: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let photo = photo();
    let (width, height) = (PHOTO.width_px as usize, PHOTO.height_px as usize);
    let file = |encode: Encode| encode(photo.as_raw(), width, height, PixelFormat::Rgb, 88, Subsampling::S420).unwrap();
    let baseline = written(folder.path(), "baseline.jpg", &file(compress));
    let progressive = written(folder.path(), "progressive.jpg", &file(compress_progressive));
    let scaled = Scale::ALL.map(|scale| decode(&baseline, &CONFIG, scale).unwrap().picture);
    decoding(c, &[("baseline", baseline), ("progressive", progressive)]);
    let small = Size::new(224, 224);
    for picture in &scaled {
        let name = format!("224_from_1_{}", picture.scale.denominator());
        filling(c, "resize", &name, picture, &input(small, Fit::Squash));
        let name = format!("640_from_1_{}", picture.scale.denominator());
        filling(c, "letterbox", &name, picture, &input(Size::new(640, 640), Fit::Pad { fill: 114 }));
    }
    // Nothing is resized here: a copy and the write of the tensor.
    for size in [small, Size::new(1066, 800)] {
        let picture = Picture::full(image::imageops::crop_imm(&photo, 0, 0, size.width_px, size.height_px).to_image());
        let name = format!("{}x{}", size.width_px, size.height_px);
        filling(c, "normalise", &name, &picture, &input(size, Fit::Squash));
    }
}

criterion_group!(benches, pixels);
criterion_main!(benches);
