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

use super::decode::no_box;
use super::picture::{Picture, crop_box, scaled_box};
use super::plan::{Filling, Plan, Source, Span};
use super::square;
use crate::geometry::{BoxPx, IntBox, Placement, Scale, Size};
use crate::recipe::{Filter, Fit, ImageInput};
use crate::row::{RowCode, RowError};

/// Between the two passes a picture of the input's width and the region's height exists. Where that would
/// be bigger, the passes change places if that helps; such regions are thousands of times as high as wide.
const BETWEEN_BYTES_MAX: usize = 64 << 20;

/// Scratch buffers above this are given back after use; there is one set per thread.
const SCRATCH_BYTES_KEPT: usize = 16 << 20;

/// Where a region came to lie in a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placed {
    /// From pixels of the image to pixels of the tensor.
    pub placement: Placement,
    /// The part of the tensor, from its top left corner, that is no filling of [`Fit::Corner`] or [`Fit::Scale`].
    pub valid: Size,
}

/// The pixels that a region of `region` pixels should have in the picture from which it is resized: `spare` times what
/// it gets in the input ([`Decode`](crate::recipe::Decode) says how often), so that the
/// resizer has something to average. Of [`Fit::Center`] what it gets before its borders are cut off. All of them for [`Fit::SquareBlur`], whose blur depends on the size of the image.
pub fn wanted(region: Size, input: &ImageInput, spare: u32) -> Size {
    let whole = IntBox::whole(region);
    let squashed = |to: Size| Plan::new(Span::of(whole, BoxPx::whole(region)), to, input.fit).to;
    let to = match input.fit {
        Fit::SquareBlur => return region,
        Fit::Center { resize_shortest_px } => {
            let short = u64::from(region.width_px.min(region.height_px).max(1));
            let side = |px: u32| u64::from(px) * u64::from(resize_shortest_px) / short;
            let bounded = |px: u32| side(px).clamp(1, u32::MAX.into()) as u32;
            Size::new(bounded(region.width_px), bounded(region.height_px))
        }
        Fit::Squash | Fit::Scale { .. } | Fit::Pad { .. } | Fit::Corner => squashed(input.picture_size(region)),
    };
    Size::new(to.width_px.saturating_mul(spare), to.height_px.saturating_mul(spare))
}

/// Writes a region, in pixels of the upright image at full size, as `(v / 255 - mean) / std`, RGB, channel by channel
/// (NCHW without the N), into `out` of [`ImageInput::values`] numbers. The size of the tensor and the placement are
/// those of the region at full size, whatever the picture's scale.
///
/// # Errors
/// `nan_output` for a region that is not finite, reversed or outside; `model` where `out` has another length, a side
/// of the input is 0, or the picture is a window that does not hold the region or a scaled one for
/// [`Fit::SquareBlur`].
pub fn fill(picture: &Picture, region: BoxPx, input: &ImageInput, out: &mut [f32]) -> Result<Placed, RowError> {
    let crop = checked_crop(picture, region)?;
    let size = input.tensor_size(crop.size);
    if out.len() != 3 * size.pixels() as usize || out.is_empty() {
        let reason =
            format!("an input of {}x{} does not fit into {} numbers", size.width_px, size.height_px, out.len());
        return Err(RowError::new(RowCode::Model, reason));
    }
    let span = Span::of(crop, region);
    if input.fit == Fit::SquareBlur {
        let whole = Span::of(crop, BoxPx::whole(picture.image));
        let source = Source::of(picture, whole, &Plan::new(whole, size, input.fit));
        let source = source.filter(|_| picture.scale == Scale::FULL).ok_or_else(|| not_held(picture, region))?;
        square::fill(&picture.pixels, source.view, input, out);
        return Ok(Placed { placement: square::placement(crop, size), valid: size });
    }
    let within = input.picture_size(crop.size);
    let plan = Plan::new(span, within, input.fit);
    let source = Source::of(picture, span, &plan).ok_or_else(|| not_held(picture, region))?;
    let valid = if input.fit == Fit::Corner { plan.to } else { within };
    SCRATCH.with_borrow_mut(|scratch| {
        let resized = scratch.resize(&picture.pixels, &source, plan.to, input.filter)?;
        write_tensor(resized, &plan, size, input, out);
        scratch.shrink();
        Ok(Placed { placement: plan.placement, valid })
    })
}

/// A region, in pixels of the upright image at full size, as a baseline JPEG of `quality` 1..=100, in the whole
/// pixels of the picture that it touches: a scaled picture gives a smaller file.
///
/// # Errors
/// `nan_output` and `model` as [`fill`]; `unsupported` where a side is too long for a JPEG.
pub fn encode_crop_jpeg(picture: &Picture, region: BoxPx, quality: u8) -> Result<Vec<u8>, RowError> {
    let needed = scaled_box(picture.image, picture.scale, region);
    let needed = needed.ok_or_else(|| RowError::from(no_box(picture.image, region)))?;
    if !picture.window.holds(needed) {
        return Err(not_held(picture, region));
    }
    let Size { width_px, height_px } = needed.size;
    let (x, y) = (needed.x - picture.window.x, needed.y - picture.window.y);
    let row_bytes = 3 * picture.pixels.width() as usize;
    let (left, width) = (3 * x as usize, 3 * width_px as usize);
    let mut pixels = Vec::with_capacity(width * height_px as usize);
    for row in picture.pixels.as_raw().chunks_exact(row_bytes).skip(y as usize).take(height_px as usize) {
        pixels.extend_from_slice(&row[left..left + width]);
    }
    let mut jpeg = Vec::new();
    JpegEncoder::new_with_quality(&mut jpeg, quality)
        .encode(&pixels, width_px, height_px, ExtendedColorType::Rgb8)
        .map_err(|e| RowError::new(RowCode::Unsupported, format!("a crop of {width_px}x{height_px}: {e}")))?;
    Ok(jpeg)
}

fn checked_crop(picture: &Picture, region: BoxPx) -> Result<IntBox, RowError> {
    crop_box(picture.image, region).ok_or_else(|| no_box(picture.image, region).into())
}

/// The caller asked a picture for what it does not have; a fault of the program, which still must not end the run.
fn not_held(picture: &Picture, region: BoxPx) -> RowError {
    let BoxPx { x0, y0, x1, y1 } = region;
    let reason = format!("a picture at 1/{} does not serve a region {x0} {y0} {x1} {y1}", picture.scale.denominator());
    RowError::new(RowCode::Model, reason)
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
    /// Resizes the used part of the source to `to`, interleaved RGB.
    fn resize(&mut self, image: &RgbImage, source: &Source, to: Size, filter: Filter) -> Result<&[u8], RowError> {
        let &Source { view: crop, across, down } = source;
        let whole = TypedImageRef::<U8x3>::from_buffer(image.width(), image.height(), image.as_raw());
        let whole = whole.map_err(resize_failed)?;
        let Size { width_px, height_px } = to;
        let bytes = |columns: u32, rows: u32| 3 * columns as usize * rows as usize;
        self.resized.resize(bytes(width_px, height_px), 0);
        let options = ResizeOptions::new().resize_alg(algorithm(filter));
        let (first, rows) = rows_needed(down, height_px, crop.size.height_px, filter);
        if !across_first(filter, bytes(width_px, rows), bytes(crop.size.width_px, height_px)) {
            let view = TypedCroppedImage::from_ref(&whole, crop.x, crop.y, crop.size.width_px, crop.size.height_px);
            let options = options.crop(across.0, down.0, across.1, down.1);
            resize_into(&mut self.resizer, &view.map_err(resize_failed)?, &mut self.resized, to, &options)?;
            return Ok(&self.resized);
        }
        let view = TypedCroppedImage::from_ref(&whole, crop.x, crop.y + first, crop.size.width_px, rows);
        let view = view.map_err(resize_failed)?;
        let between = Size::new(width_px, rows);
        self.between.resize(bytes(width_px, rows), 0);
        let first_pass = options.crop(across.0, 0.0, across.1, f64::from(rows));
        resize_into(&mut self.resizer, &view, &mut self.between, between, &first_pass)?;
        let view = TypedImageRef::<U8x3>::from_buffer(width_px, rows, &self.between).map_err(resize_failed)?;
        let second_pass = options.crop(0.0, down.0 - f64::from(first), f64::from(width_px), down.1);
        resize_into(&mut self.resizer, &view, &mut self.resized, to, &second_pass)?;
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

/// Rows of a view of `height` rows that the filter reads to make `to` rows of a part of it: first row and number.
fn rows_needed((start, length): (f64, f64), to: u32, height: u32, filter: Filter) -> (u32, u32) {
    let support = reach(filter) * (length / f64::from(to)).max(1.0) + 1.0;
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
    fn a_region_that_is_no_box_is_an_error_and_no_black_tile() {
        let image = Picture::full(RgbImage::new(100, 50));
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
        let image = Picture::full(RgbImage::from_pixel(20, 10, Rgb([255, 51, 0])));
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
        let image = Picture::full(RgbImage::from_pixel(16, 6, Rgb([255; 3])));
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
        let image = Picture::full(RgbImage::from_pixel(16, 6, Rgb([255; 3])));
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
    fn a_step_leaves_the_picture_as_it_is_and_zeros_beside_and_below_it() {
        let image = Picture::full(RgbImage::from_fn(20, 10, |x, y| Rgb([(12 * x) as u8, (25 * y) as u8, 77])));
        let of = |step_px: u32| {
            let fit = Fit::Scale { shortest_px: 6, longest_px: 40, multiple_px: 1, step_px };
            let mut input = input(fit, Filter::Bilinear);
            (input.mean, input.std) = ([0.5; 3], [0.25; 3]);
            let mut out = vec![f32::NAN; input.values(Size::new(20, 10))];
            let placed = fill(&image, bbox(0.0, 0.0, 20.0, 10.0), &input, &mut out).unwrap();
            (input.tensor_size(Size::new(20, 10)), placed, out)
        };
        let ((plain_size, plain_placed, plain), (size, placed, padded)) = (of(1), of(8));
        assert_eq!((plain_size, size), (Size::new(12, 6), Size::new(16, 8)));
        assert_eq!((placed, placed.valid), (plain_placed, plain_size));
        for (channel, plane) in padded.chunks_exact(16 * 8).enumerate() {
            for (y, row) in plane.chunks_exact(16).enumerate() {
                let begin = 72 * channel + 12 * y;
                let expected: &[f32] = if y < 6 { &plain[begin..begin + 12] } else { &[0.0; 12] };
                assert_eq!(&row[..12], expected, "channel {channel}, row {y}");
                assert_eq!(row[12..], [0.0; 4], "channel {channel}, row {y}");
            }
        }
    }

    #[test]
    fn a_region_at_the_images_edge_reads_nothing_beside_it() {
        let image =
            Picture::full(RgbImage::from_fn(
                40,
                40,
                |x, y| if x >= 20 && y >= 30 { Rgb([200; 3]) } else { Rgb([0; 3]) },
            ));
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
        let image = Picture::full(RgbImage::from_fn(64, 48, |x, _| Rgb([if x < 32 { 0 } else { 255 }, 128, 0])));
        let bytes = encode_crop_jpeg(&image, bbox(32.0, 10.5, 60.5, 20.0), 95).unwrap();
        let crop = image::load_from_memory(&bytes).unwrap().to_rgb8();
        assert_eq!(crop.dimensions(), (29, 10));
        assert!(crop.pixels().all(|p| p.0[0] > 240 && p.0[2] < 16));
    }
}
