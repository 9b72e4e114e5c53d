//! A region of a picture as a model's input, and as a JPEG file.
//!
//! Resizing equals Pillow's `Image.resize` on RGB8 within one grey level: antialiased convolution in two
//! passes, each rounded to 8 bits. With filters that overshoot the order of the passes matters by several
//! levels: it is across and then down, as in Pillow up to 12 (Pillow 13 goes down first where the height
//! shrinks and the width hardly does). Without interpolation the pixels are the same, but a place exactly
//! between two of them may fall to the other. Only what ends up in the input is computed: a centre crop
//! costs the crop.
//!
//! A region keeps its fractions of pixels: `image.crop(whole_pixels).resize(size, filter, box=fractions)` in
//! Pillow's words. Rounded to whole pixels, a box that moves by a thousandth of a pixel could give another
//! vector; a region of whole pixels gives the same either way.

use std::cell::RefCell;

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ImageView, ResizeAlg, ResizeOptions, Resizer};
use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, RgbImage};

use super::plan::{Filling, Plan, Span};
use super::square;
use crate::geometry::{BoxPx, Placement, Size};
use crate::recipe::{Filter, Fit, ImageInput};
use crate::row::{RowCode, RowError};

/// Between the two passes a picture of the input's width and the region's height exists. Where that would
/// be bigger, the passes change places if that helps; such regions are thousands of times as high as wide.
const BETWEEN_BYTES_MAX: usize = 64 << 20;

/// Scratch buffers above this are given back after use; there is one set per thread.
const SCRATCH_BYTES_KEPT: usize = 16 << 20;

/// A box in whole pixels of an image, at least 1x1 and inside of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntBox {
    /// First column.
    pub x: u32,
    /// First row.
    pub y: u32,
    /// Columns and rows.
    pub size: Size,
}

/// The whole pixels that a region touches: its left and top rounded down, its right and bottom rounded up,
/// clipped to an image of `size`, at least 1x1. `None` for a box that is not finite, is reversed or lies
/// outside: the resizer would make a black picture of it and say nothing.
pub fn crop_box(size: Size, region: BoxPx) -> Option<IntBox> {
    let (x, width) = whole_pixels(region.x0, region.x1, size.width_px)?;
    let (y, height) = whole_pixels(region.y0, region.y1, size.height_px)?;
    Some(IntBox { x, y, size: Size::new(width, height) })
}

/// First pixel and number of pixels that `low..high` touches in `0..side`.
fn whole_pixels(low: f32, high: f32, side: u32) -> Option<(u32, u32)> {
    let (low, high) = (f64::from(low), f64::from(high));
    // NaN fails every comparison.
    let sound = low.is_finite() && high.is_finite() && low <= high && high >= 0.0 && low <= f64::from(side);
    if !sound || side == 0 {
        return None;
    }
    // The conversions saturate.
    let first = (low.floor().max(0.0) as u32).min(side - 1);
    let end = (high.ceil() as u32).clamp(first + 1, side);
    Some((first, end - first))
}

/// Where a region came to lie in a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placed {
    /// From pixels of the image to pixels of the tensor.
    pub placement: Placement,
    /// The part of the tensor, from its top left corner, that is no filling of [`Fit::Corner`].
    pub valid: Size,
}

/// Writes a region as `(v / 255 - mean) / std`, RGB, channel by channel (NCHW without the N), into `out`
/// of [`ImageInput::values`] numbers.
///
/// # Errors
/// `nan_output` for a region that is not finite, reversed or outside; `model` where `out` has another
/// length or a side of the input is 0.
pub fn fill(image: &RgbImage, region: BoxPx, input: &ImageInput, out: &mut [f32]) -> Result<Placed, RowError> {
    let crop = checked_crop(image, region)?;
    let size = input.tensor_size(crop.size);
    if out.len() != 3 * size.pixels() as usize || out.is_empty() {
        let reason =
            format!("an input of {}x{} does not fit into {} numbers", size.width_px, size.height_px, out.len());
        return Err(RowError::new(RowCode::Model, reason));
    }
    if input.fit == Fit::SquareBlur {
        return Ok(Placed { placement: square::fill(image, crop, input, out), valid: size });
    }
    let plan = Plan::new(Span::of(crop, region), size, input.fit);
    let valid = if input.fit == Fit::Corner { plan.to } else { size };
    SCRATCH.with_borrow_mut(|scratch| {
        let resized = scratch.resize(image, crop, &plan, input.filter)?;
        write_tensor(resized, &plan, size, input, out);
        scratch.shrink();
        Ok(Placed { placement: plan.placement, valid })
    })
}

/// A region as a baseline JPEG of `quality` 1..=100, in the region's whole pixels.
///
/// # Errors
/// `nan_output` as [`fill`]; `unsupported` where a side is too long for a JPEG.
pub fn encode_crop_jpeg(image: &RgbImage, region: BoxPx, quality: u8) -> Result<Vec<u8>, RowError> {
    let crop = checked_crop(image, region)?;
    let Size { width_px, height_px } = crop.size;
    let row_bytes = 3 * image.width() as usize;
    let (left, width) = (3 * crop.x as usize, 3 * width_px as usize);
    let mut pixels = Vec::with_capacity(width * height_px as usize);
    for row in image.as_raw().chunks_exact(row_bytes).skip(crop.y as usize).take(height_px as usize) {
        pixels.extend_from_slice(&row[left..left + width]);
    }
    let mut jpeg = Vec::new();
    JpegEncoder::new_with_quality(&mut jpeg, quality)
        .encode(&pixels, width_px, height_px, ExtendedColorType::Rgb8)
        .map_err(|e| RowError::new(RowCode::Unsupported, format!("a crop of {width_px}x{height_px}: {e}")))?;
    Ok(jpeg)
}

fn checked_crop(image: &RgbImage, region: BoxPx) -> Result<IntBox, RowError> {
    let size = Size::new(image.width(), image.height());
    crop_box(size, region).ok_or_else(|| {
        let BoxPx { x0, y0, x1, y1 } = region;
        let reason = format!("a region {x0} {y0} {x1} {y1} that is no box in {}x{}", size.width_px, size.height_px);
        RowError::new(RowCode::NanOutput, reason)
    })
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// What a thread keeps between two calls.
#[derive(Default)]
struct Scratch {
    resizer: Resizer,
    between: Vec<u8>,
    resized: Vec<u8>,
}

impl Scratch {
    /// Resizes the used part of the crop to `plan.to`, interleaved RGB.
    fn resize(&mut self, image: &RgbImage, crop: IntBox, plan: &Plan, filter: Filter) -> Result<&[u8], RowError> {
        let whole = TypedImageRef::<U8x3>::from_buffer(image.width(), image.height(), image.as_raw());
        let whole = whole.map_err(resize_failed)?;
        let Size { width_px, height_px } = plan.to;
        let bytes = |columns: u32, rows: u32| 3 * columns as usize * rows as usize;
        self.resized.resize(bytes(width_px, height_px), 0);
        let options = ResizeOptions::new().resize_alg(algorithm(filter));
        let (first, rows) = rows_needed(plan, crop.size.height_px, filter);
        if !across_first(filter, bytes(width_px, rows), bytes(crop.size.width_px, height_px)) {
            let view = TypedCroppedImage::from_ref(&whole, crop.x, crop.y, crop.size.width_px, crop.size.height_px);
            let options = options.crop(plan.across.0, plan.down.0, plan.across.1, plan.down.1);
            resize_into(&mut self.resizer, &view.map_err(resize_failed)?, &mut self.resized, plan.to, &options)?;
            return Ok(&self.resized);
        }
        let view = TypedCroppedImage::from_ref(&whole, crop.x, crop.y + first, crop.size.width_px, rows);
        let view = view.map_err(resize_failed)?;
        let between = Size::new(width_px, rows);
        self.between.resize(bytes(width_px, rows), 0);
        let first_pass = options.crop(plan.across.0, 0.0, plan.across.1, f64::from(rows));
        resize_into(&mut self.resizer, &view, &mut self.between, between, &first_pass)?;
        let view = TypedImageRef::<U8x3>::from_buffer(width_px, rows, &self.between).map_err(resize_failed)?;
        let second_pass = options.crop(0.0, plan.down.0 - f64::from(first), f64::from(width_px), plan.down.1);
        resize_into(&mut self.resizer, &view, &mut self.resized, plan.to, &second_pass)?;
        Ok(&self.resized)
    }

    fn shrink(&mut self) {
        for buffer in [&mut self.between, &mut self.resized] {
            if buffer.capacity() > SCRATCH_BYTES_KEPT {
                *buffer = Vec::new();
            }
        }
        if self.resizer.size_of_internal_buffers() > SCRATCH_BYTES_KEPT {
            self.resizer.reset_internal_buffers();
        }
    }
}

fn resize_into(
    resizer: &mut Resizer,
    view: &impl ImageView<Pixel = U8x3>,
    buffer: &mut [u8],
    to: Size,
    options: &ResizeOptions,
) -> Result<(), RowError> {
    let target = TypedImage::<U8x3>::from_buffer(to.width_px, to.height_px, buffer);
    resizer.resize_typed(view, &mut target.map_err(resize_failed)?, options).map_err(resize_failed)
}

/// Sizes are checked before, so this would be a fault of this module; it still must not end the run.
fn resize_failed(error: impl std::error::Error) -> RowError {
    RowError::new(RowCode::Model, format!("resizing: {error}"))
}

/// Pillow goes across first. The other order, which the resizer prefers for speed, rounds differently by a
/// level here and there, and small detectors answer that with scores that differ in the second decimal.
fn across_first(filter: Filter, between_bytes: usize, other_between_bytes: usize) -> bool {
    filter != Filter::Nearest && (between_bytes <= BETWEEN_BYTES_MAX || between_bytes <= other_between_bytes)
}

/// Rows of a crop of `height` rows that the filter reads: first row and number of rows.
fn rows_needed(plan: &Plan, height: u32, filter: Filter) -> (u32, u32) {
    let (start, length) = plan.down;
    let support = reach(filter) * (length / f64::from(plan.to.height_px)).max(1.0) + 1.0;
    let first = ((start - support).floor().max(0.0) as u32).min(height - 1);
    let end = ((start + length + support).ceil() as u32).clamp(first + 1, height);
    (first, end - first)
}

/// Support of a filter, in pixels of the smaller picture.
fn reach(filter: Filter) -> f64 {
    match filter {
        Filter::Nearest => 0.5,
        Filter::Bilinear => 1.0,
        Filter::Bicubic => 2.0,
        Filter::Lanczos3 => 3.0,
    }
}

/// Pillow's filters under the resizer's names: its bicubic has a = -0.5.
fn algorithm(filter: Filter) -> ResizeAlg {
    match filter {
        Filter::Nearest => ResizeAlg::Nearest,
        Filter::Bilinear => ResizeAlg::Convolution(FilterType::Bilinear),
        Filter::Bicubic => ResizeAlg::Convolution(FilterType::CatmullRom),
        Filter::Lanczos3 => ResizeAlg::Convolution(FilterType::Lanczos3),
    }
}

/// Splits interleaved pixels into planes, with the filling around them.
fn write_tensor(resized: &[u8], plan: &Plan, size: Size, input: &ImageInput, out: &mut [f32]) {
    let (width, left, top) = (size.width_px as usize, plan.at.0 as usize, plan.at.1 as usize);
    let columns = plan.to.width_px as usize;
    let whole = plan.to == size;
    for (channel, plane) in out.chunks_exact_mut(size.pixels() as usize).enumerate() {
        let levels = levels(input.mean[channel], input.std[channel]);
        if !whole {
            plane.fill(match plan.fill {
                Filling::Grey(level) => levels[usize::from(level)],
                Filling::Zero => 0.0,
            });
        }
        let rows = plane.chunks_exact_mut(width).skip(top);
        for (row, pixels) in rows.zip(resized.chunks_exact(3 * columns)) {
            for (value, pixel) in row[left..left + columns].iter_mut().zip(pixels.chunks_exact(3)) {
                *value = levels[usize::from(pixel[channel])];
            }
        }
    }
}

/// The number of every grey level, by the very operations of the reference (`rescale_and_normalize` of
/// `transformers`): a large detector answers the last bit of its input with the fourth decimal of a score.
fn levels(mean: f32, std: f32) -> [f32; 256] {
    std::array::from_fn(|level| (level as f32 - mean * 255.0) / (std * 255.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Rgb;

    const SQUARE: Size = Size::new(8, 8);

    fn input(fit: Fit, filter: Filter) -> ImageInput {
        ImageInput { size: SQUARE, filter, fit, mean: [0.0; 3], std: [1.0; 3] }
    }

    fn bbox(x0: f32, y0: f32, x1: f32, y1: f32) -> BoxPx {
        BoxPx { x0, y0, x1, y1 }
    }

    #[test]
    fn a_region_covers_every_pixel_it_touches() {
        let size = Size::new(100, 50);
        let int = |x, y, width, height| Some(IntBox { x, y, size: Size::new(width, height) });
        assert_eq!(crop_box(size, bbox(1.2, 2.9, 3.1, 4.0)), int(1, 2, 3, 2));
        assert_eq!(crop_box(size, bbox(-5.0, -5.0, 500.0, 500.0)), int(0, 0, 100, 50));
        assert_eq!(crop_box(size, bbox(7.0, 7.0, 7.0, 7.0)), int(7, 7, 1, 1));
        assert_eq!(crop_box(size, bbox(100.0, 50.0, 100.0, 50.0)), int(99, 49, 1, 1));
    }

    #[test]
    fn a_region_that_is_no_box_is_an_error_and_no_black_tile() {
        let image = RgbImage::new(100, 50);
        let input = input(Fit::Squash, Filter::Bilinear);
        for region in [
            bbox(f32::NAN, 0.0, 10.0, 10.0),
            bbox(0.0, 0.0, f32::INFINITY, 10.0),
            bbox(10.0, 0.0, 5.0, 10.0),
            bbox(101.0, 0.0, 110.0, 10.0),
            bbox(0.0, -9.0, 10.0, -1.0),
        ] {
            let mut out = vec![0.0; input.values(SQUARE)];
            assert_eq!(fill(&image, region, &input, &mut out).unwrap_err().code, RowCode::NanOutput, "{region:?}");
            assert_eq!(encode_crop_jpeg(&image, region, 90).unwrap_err().code, RowCode::NanOutput, "{region:?}");
        }
        let wrong = fill(&image, bbox(0.0, 0.0, 9.0, 9.0), &input, &mut [0.0; 5]).unwrap_err();
        assert_eq!(wrong.code, RowCode::Model);
    }

    #[test]
    fn channels_are_planes_in_rgb_order_and_normalised() {
        let image = RgbImage::from_pixel(20, 10, Rgb([255, 51, 0]));
        let mut input = input(Fit::Squash, Filter::Bicubic);
        (input.mean, input.std) = ([0.5, 0.2, 0.25], [0.5, 0.1, 0.125]);
        let mut out = vec![f32::NAN; input.values(SQUARE)];
        fill(&image, bbox(0.0, 0.0, 20.0, 10.0), &input, &mut out).unwrap();
        for (plane, expected) in out.chunks_exact(64).zip([1.0, 0.0, -2.0]) {
            assert!(plane.iter().all(|v| (v - expected).abs() < 1e-6), "{expected}: {plane:?}");
        }
    }

    #[test]
    fn padding_follows_letterbox_and_is_not_resized() {
        let image = RgbImage::from_pixel(16, 6, Rgb([255; 3]));
        let mut out = vec![f32::NAN; 192];
        let placed = fill(&image, bbox(0.0, 0.0, 16.0, 6.0), &input(Fit::Pad { fill: 102 }, Filter::Bicubic), &mut out);
        // r = 0.5: 8 by 3, free 5 rows, round(2.5 - 0.1) = 2 above.
        let expected = Placement { scale_x: 0.5, scale_y: 0.5, offset_x: 0.0, offset_y: 2.0 };
        assert_eq!(placed.unwrap().placement, expected);
        for (y, row) in out[..64].chunks_exact(8).enumerate() {
            let expected = if (2..5).contains(&y) { 1.0 } else { 0.4 };
            assert!(row.iter().all(|v| (v - expected).abs() < 1e-6), "{y}: {row:?}");
        }
    }

    #[test]
    fn what_a_corner_picture_does_not_reach_is_zero_after_normalisation() {
        let image = RgbImage::from_pixel(16, 6, Rgb([255; 3]));
        let mut input = input(Fit::Corner, Filter::Bilinear);
        (input.mean, input.std) = ([0.5; 3], [0.5; 3]);
        let mut out = vec![f32::NAN; 192];
        let placed = fill(&image, bbox(0.0, 0.0, 16.0, 6.0), &input, &mut out).unwrap();
        assert_eq!(placed.valid, Size::new(8, 3));
        for (y, row) in out[..64].chunks_exact(8).enumerate() {
            let expected = if y < 3 { 1.0 } else { 0.0 };
            assert!(row.iter().all(|v| (v - expected).abs() < 1e-6), "{y}: {row:?}");
        }
        let back = placed.placement.to_image(bbox(0.0, 0.0, 8.0, 3.0));
        assert_eq!((back.x1, back.y1), (16.0, 6.0));
    }

    #[test]
    fn a_region_at_the_images_edge_reads_nothing_beside_it() {
        let image = RgbImage::from_fn(40, 40, |x, y| if x >= 20 && y >= 30 { Rgb([200; 3]) } else { Rgb([0; 3]) });
        for fit in [Fit::Squash, Fit::Center { resize_shortest_px: 9 }] {
            for filter in [Filter::Nearest, Filter::Bilinear, Filter::Bicubic, Filter::Lanczos3] {
                let mut out = vec![f32::NAN; 192];
                fill(&image, bbox(20.0, 30.0, 40.0, 40.0), &input(fit, filter), &mut out).unwrap();
                let level = 200.0 / 255.0;
                assert!(out.iter().all(|v| (v - level).abs() < 1e-6), "{fit:?} {filter:?} {out:?}");
            }
        }
    }

    #[test]
    fn a_very_long_region_does_not_take_the_memory_of_its_resized_whole() {
        assert!(across_first(Filter::Bicubic, 1 << 20, 1 << 10));
        assert!(!across_first(Filter::Bicubic, 1 << 30, 1 << 10));
        assert!(across_first(Filter::Bilinear, 1 << 30, 1 << 31));
        assert!(!across_first(Filter::Nearest, 1 << 10, 1 << 20));
    }

    #[test]
    fn a_crop_is_a_jpeg_of_the_regions_pixels() {
        let image = RgbImage::from_fn(64, 48, |x, _| Rgb([if x < 32 { 0 } else { 255 }, 128, 0]));
        let bytes = encode_crop_jpeg(&image, bbox(32.0, 10.5, 60.5, 20.0), 95).unwrap();
        let crop = image::load_from_memory(&bytes).unwrap().to_rgb8();
        assert_eq!(crop.dimensions(), (29, 10));
        assert!(crop.pixels().all(|p| p.0[0] > 240 && p.0[2] < 16));
    }
}
