//! An upright picture that may be smaller than its image, or a part of it only. Everything outside of this folder
//! speaks in pixels of the upright image at full size; here is where they become places in a buffer.

use image::RgbImage;

use crate::geometry::{BoxPx, IntBox, Scale, Size};

/// Upright pixels of an image, at a scale, all of them or those of one window.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Interleaved RGB, 8 bits, of the window's size.
    pub pixels: RgbImage,
    /// Size of the upright image at full scale.
    pub image: Size,
    /// By how much the picture is smaller.
    pub scale: Scale,
    /// The part of the scaled image that `pixels` holds, in pixels of the scaled image.
    pub window: IntBox,
}

impl Picture {
    /// All of an image at full size.
    pub fn full(pixels: RgbImage) -> Self {
        let image = Size::new(pixels.width(), pixels.height());
        Self { pixels, image, scale: Scale::FULL, window: IntBox::whole(image) }
    }

    /// All of an image of size `image` at `scale`.
    pub(super) fn scaled(pixels: RgbImage, image: Size, scale: Scale) -> Self {
        let window = IntBox::whole(Size::new(pixels.width(), pixels.height()));
        Self { pixels, image, scale, window }
    }

    /// Memory of the pixels.
    pub fn bytes(&self) -> u64 {
        self.pixels.as_raw().len() as u64
    }

    /// A box in pixels of the upright image at full size, in pixels of this picture. Exact: the last column and row
    /// of a scaled picture may stand for a part of a pixel, so the whole image becomes width / denominator, which
    /// can be less than the picture's columns. Not clipped.
    pub fn to_pixels(&self, region: BoxPx) -> BoxPx {
        let denominator = self.scale.denominator() as f32;
        let (left, top) = (self.window.x as f32, self.window.y as f32);
        BoxPx {
            x0: region.x0 / denominator - left,
            y0: region.y0 / denominator - top,
            x1: region.x1 / denominator - left,
            y1: region.y1 / denominator - top,
        }
    }

    /// True where the picture has every pixel of a region of the upright image. A region that is no box is in none.
    pub fn holds(&self, region: BoxPx) -> bool {
        scaled_box(self.image, self.scale, region).is_some_and(|needed| self.window.holds(needed))
    }
}

/// The whole pixels that a region of an image of size `image` touches: its left and top rounded down, its right and
/// bottom rounded up, clipped, at least 1x1. `None` for a box that is not finite, is reversed or lies outside: the
/// resizer would make a black picture of it and say nothing.
pub fn crop_box(image: Size, region: BoxPx) -> Option<IntBox> {
    scaled_box(image, Scale::FULL, region)
}

/// The same in whole pixels of the image at `scale`.
pub(super) fn scaled_box(image: Size, scale: Scale, region: BoxPx) -> Option<IntBox> {
    let (x, width) = whole_pixels(region.x0, region.x1, image.width_px, scale)?;
    let (y, height) = whole_pixels(region.y0, region.y1, image.height_px, scale)?;
    Some(IntBox { x, y, size: Size::new(width, height) })
}

/// First pixel and number of pixels that `low..high` touches in `0..side`.
fn whole_pixels(low: f32, high: f32, side: u32, scale: Scale) -> Option<(u32, u32)> {
    let (low, high) = (f64::from(low), f64::from(high));
    // NaN fails every comparison.
    let sound = low.is_finite() && high.is_finite() && low <= high && high >= 0.0 && low <= f64::from(side);
    if !sound || side == 0 {
        return None;
    }
    let denominator = f64::from(scale.denominator());
    let side = side.div_ceil(scale.denominator());
    // The conversions saturate.
    let first = ((low / denominator).floor().max(0.0) as u32).min(side - 1);
    let end = ((high / denominator).ceil() as u32).clamp(first + 1, side);
    Some((first, end - first))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(scaled_box(size, Scale::EIGHTH, bbox(15.9, 8.0, 100.0, 50.0)), int(1, 1, 12, 6));
        assert_eq!(scaled_box(size, Scale::EIGHTH, bbox(100.0, 50.0, 100.0, 50.0)), int(12, 6, 1, 1));
    }

    #[test]
    fn the_whole_image_ends_within_the_last_pixel_of_its_scaled_picture() {
        let image = Size::new(101, 50);
        let picture = Picture::scaled(RgbImage::new(13, 7), image, Scale::EIGHTH);
        assert_eq!(picture.to_pixels(BoxPx::whole(image)), bbox(0.0, 0.0, 12.625, 6.25));
        let window = IntBox { x: 3, y: 2, size: Size::new(4, 5) };
        let part = Picture { pixels: RgbImage::new(4, 5), image, scale: Scale::EIGHTH, window };
        assert_eq!(part.to_pixels(bbox(24.0, 18.0, 52.0, 50.0)), bbox(0.0, 0.25, 3.5, 4.25));
        assert!(part.holds(bbox(24.0, 16.0, 56.0, 50.0)) && !part.holds(bbox(23.9, 16.0, 56.0, 50.0)));
        assert!(!part.holds(bbox(24.0, 16.0, 56.1, 50.0)) && !part.holds(bbox(f32::NAN, 16.0, 56.0, 50.0)));
    }
}
