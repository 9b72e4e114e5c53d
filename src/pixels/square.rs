//! The picture in the corner of a black square, blurred and sampled as OWLv2 wants it: `Owlv2ImageProcessor`
//! of `transformers`, with `gaussian_blur` (reflected borders) and bilinear `resize` without antialiasing of
//! torchvision. All of it is linear and separable, so each output row is a weighted sum of input rows and
//! nothing of the square's size is ever held.

use image::RgbImage;

use crate::geometry::{IntBox, Placement, Size};
use crate::recipe::ImageInput;

/// Weights of the source pixels that make one output pixel.
type Taps = Vec<(usize, f32)>;

/// Writes `crop` of `image` into `out`, `3 * side * side` numbers of the input's square.
pub(super) fn fill(image: &RgbImage, crop: IntBox, input: &ImageInput, out: &mut [f32]) {
    let square = crop.size.width_px.max(crop.size.height_px) as usize;
    let (to_width, to_height) = (input.size.width_px as usize, input.size.height_px as usize);
    let across = taps(square, to_width, crop.size.width_px as usize);
    let down = by_source(&taps(square, to_height, crop.size.height_px as usize), crop.size.height_px as usize);
    out.fill(0.0);
    let row_values = 3 * image.width() as usize;
    let rows = image.as_raw().chunks_exact(row_values).skip(crop.y as usize);
    let mut resized = vec![0.0_f32; 3 * to_width];
    for (row, uses) in rows.zip(&down) {
        if uses.is_empty() {
            continue;
        }
        let row = &row[3 * crop.x as usize..];
        for (x, taps) in across.iter().enumerate() {
            for channel in 0..3 {
                let sum = taps.iter().map(|(from, weight)| weight * f32::from(row[3 * from + channel])).sum::<f32>();
                resized[channel * to_width + x] = sum / 255.0;
            }
        }
        for (channel, plane) in out.chunks_exact_mut(to_width * to_height).enumerate() {
            for &(y, weight) in uses {
                let target = &mut plane[y * to_width..(y + 1) * to_width];
                for (value, add) in target.iter_mut().zip(&resized[channel * to_width..]) {
                    *value += weight * add;
                }
            }
        }
    }
    for (channel, plane) in out.chunks_exact_mut(to_width * to_height).enumerate() {
        for value in plane {
            *value = (*value - input.mean[channel]) / input.std[channel];
        }
    }
}

/// Where `crop` lies in an input of size `to`; from pixels of the image of which it is a crop.
pub(super) fn placement(crop: IntBox, to: Size) -> Placement {
    let square = crop.size.width_px.max(crop.size.height_px) as f32;
    let (scale_x, scale_y) = (to.width_px as f32 / square, to.height_px as f32 / square);
    Placement { scale_x, scale_y, offset_x: -(crop.x as f32) * scale_x, offset_y: -(crop.y as f32) * scale_y }
}

/// Per output pixel of `to`, the source pixels of a side of `from` and their weights. Those at `used` and
/// beyond are black and left out.
fn taps(from: usize, to: usize, used: usize) -> Vec<Taps> {
    let factor = from as f64 / to as f64;
    let sigma = ((factor - 1.0) / 2.0).max(0.0);
    let radius = (3.0 * sigma).ceil() as i64;
    let kernel: Vec<f64> = (-radius..=radius).map(|d| gauss(d as f64, sigma)).collect();
    let total: f64 = kernel.iter().sum();
    let mut all = Vec::with_capacity(to);
    for i in 0..to {
        let position = ((i as f64 + 0.5) * factor - 0.5).max(0.0);
        let first = position as i64;
        let share = position - first as f64;
        let mut taps: Vec<(usize, f64)> = Vec::new();
        for (middle, part) in [(first, 1.0 - share), ((first + 1).min(from as i64 - 1), share)] {
            for (step, weight) in (-radius..=radius).zip(&kernel) {
                let source = reflected(middle + step, from as i64);
                let weight = part * weight / total;
                match taps.iter_mut().find(|(known, _)| *known == source) {
                    Some((_, sum)) => *sum += weight,
                    None => taps.push((source, weight)),
                }
            }
        }
        all.push(taps.into_iter().filter(|(s, w)| *s < used && *w != 0.0).map(|(s, w)| (s, w as f32)).collect());
    }
    all
}

fn gauss(distance: f64, sigma: f64) -> f64 {
    if sigma > 0.0 { (-0.5 * (distance / sigma).powi(2)).exp() } else { 1.0 }
}

/// `reflect` of the frameworks: the border pixel itself is not repeated.
fn reflected(index: i64, side: i64) -> usize {
    if side <= 1 {
        return 0;
    }
    let period = 2 * (side - 1);
    let index = index.rem_euclid(period);
    index.min(period - index) as usize
}

/// The same weights, listed by source pixel.
fn by_source(taps: &[Taps], sources: usize) -> Vec<Taps> {
    let mut uses = vec![Taps::new(); sources];
    for (to, taps) in taps.iter().enumerate() {
        for &(from, weight) in taps {
            uses[from].push((to, weight));
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_a_full_side_sum_to_one() {
        for (from, to) in [(10, 10), (7, 16), (100, 16), (1, 8), (37, 36)] {
            for taps in taps(from, to, from) {
                let sum: f32 = taps.iter().map(|(_, w)| w).sum();
                assert!((sum - 1.0).abs() < 1e-5, "{from} to {to}: {sum}");
            }
        }
    }

    #[test]
    fn an_equal_size_is_a_copy() {
        assert!(taps(5, 5, 5).iter().enumerate().all(|(i, taps)| taps.as_slice() == [(i, 1.0)]));
    }

    #[test]
    fn borders_are_reflected_without_repeating_the_edge() {
        let seen: Vec<usize> = (-3..8).map(|i| reflected(i, 4)).collect();
        assert_eq!(seen, [3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]);
    }
}
