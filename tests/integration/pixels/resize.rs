//! Tensors against Pillow: `tests/data/images/make_resize_reference.py` makes the reference.

use std::collections::BTreeMap;

use croprow::geometry::{BoxPx, Size};
use croprow::pixels::picture::Picture;
use croprow::pixels::tensor::fill;
use croprow::recipe::{Filter, Fit, ImageInput};
use image::{Rgb, RgbImage};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    source: (u32, u32),
    region: (f32, f32, f32, f32),
    size: (u32, u32),
    shortest: u32,
    filter: Filter,
    fit: String,
    pixels: String,
}

/// The formula of the script.
fn level(x: u32, y: u32, c: u32) -> u8 {
    let mixed = x.wrapping_mul(374_761_393).wrapping_add(y.wrapping_mul(668_265_263)).wrapping_add(c * 974_711);
    let noise = mixed.wrapping_mul(1_274_126_177) >> 26;
    let edge = if (x / 11 + y / 7) % 2 == 1 { 90 } else { 0 };
    ((3 + 2 * c) * x + (5 - c) * y + edge + noise) as u8
}

fn picture(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([0, 1, 2].map(|c| level(x, y, c))))
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).unwrap() as u8).collect();
    digits.chunks_exact(2).map(|pair| 16 * pair[0] + pair[1]).collect()
}

/// NCHW in 0..=1 back to interleaved levels.
fn levels(out: &[f32]) -> Vec<u8> {
    let pixels = out.len() / 3;
    (0..out.len()).map(|i| (out[(i % 3) * pixels + i / 3] * 255.0).round() as u8).collect()
}

#[test]
fn tensors_equal_pillow_within_one_grey_level() {
    let reference = include_str!("../../data/images/resize_reference.jsonl");
    let (mut exact, mut all) = (BTreeMap::new(), BTreeMap::new());
    for line in reference.lines() {
        let case: Case = serde_json::from_str(line).unwrap();
        let fit = match case.fit.as_str() {
            "squash" => Fit::Squash,
            "pad" => Fit::Pad { fill: 114 },
            _ => Fit::Center { resize_shortest_px: case.shortest },
        };
        let size = Size::new(case.size.0, case.size.1);
        let input = ImageInput { size, filter: case.filter, fit, mean: [0.0; 3], std: [1.0; 3] };
        let (x0, y0, x1, y1) = case.region;
        let mut out = vec![f32::NAN; input.values(size)];
        fill(&Picture::full(picture(case.source.0, case.source.1)), BoxPx { x0, y0, x1, y1 }, &input, &mut out)
            .unwrap();
        let (ours, pillows) = (levels(&out), unhex(&case.pixels));
        let worst = ours.iter().zip(&pillows).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        let same = ours.iter().zip(&pillows).filter(|(a, b)| a == b).count();
        println!("{:?} {} {:?}: worst {worst}, {same} of {}", case.filter, case.fit, case.source, ours.len());
        assert!(worst <= 1, "{:?} {} {:?}: {worst}", case.filter, case.fit, case.source);
        *exact.entry(format!("{:?}", case.filter)).or_insert(0) += 100 * same;
        *all.entry(format!("{:?}", case.filter)).or_insert(0) += ours.len();
    }
    for (filter, all) in all {
        // Bilinear takes the faster order of passes, which moves some values by one.
        let least = if filter == "Bilinear" { 80 } else { 99 };
        assert!(exact[&filter] >= all * least, "{filter}: only {} % of {all} are exact", exact[&filter] / all);
    }
}
