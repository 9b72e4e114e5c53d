//! Named sizes and boxes, so that width and height never change places. Plain data, no I/O.

use serde::{Deserialize, Serialize};

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Size {
    /// Columns.
    pub width_px: u32,
    /// Rows.
    pub height_px: u32,
}

impl Size {
    /// A size of `width_px` columns and `height_px` rows.
    pub const fn new(width_px: u32, height_px: u32) -> Self {
        Self { width_px, height_px }
    }

    /// Number of pixels; cannot overflow.
    pub const fn pixels(self) -> u64 {
        self.width_px as u64 * self.height_px as u64
    }

    /// The same size with width and height exchanged.
    pub const fn swapped(self) -> Self {
        Self::new(self.height_px, self.width_px)
    }

    /// Size of a picture of this size that is decoded at `scale`: both sides rounded up.
    pub const fn scaled(self, scale: Scale) -> Self {
        Self::new(self.width_px.div_ceil(scale.denominator()), self.height_px.div_ceil(scale.denominator()))
    }
}

/// By how much a decoded picture is smaller than its image, per side: 1, 1/2, 1/4 or 1/8, the sizes to which the
/// blocks of a JPEG are decoded without more work than their pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scale(u8);

impl Scale {
    /// Every pixel.
    pub const FULL: Self = Self(0);
    /// 1/2.
    pub const HALF: Self = Self(1);
    /// 1/4.
    pub const QUARTER: Self = Self(2);
    /// 1/8.
    pub const EIGHTH: Self = Self(3);
    /// All, the largest picture first.
    pub const ALL: [Self; 4] = [Self::FULL, Self::HALF, Self::QUARTER, Self::EIGHTH];

    /// Pixels of the image per pixel of the picture, along one side: 1, 2, 4 or 8.
    pub const fn denominator(self) -> u32 {
        1 << self.0
    }

    /// The scale of that denominator.
    pub fn from_denominator(denominator: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|scale| scale.denominator() == denominator)
    }

    /// Place in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The smallest picture in which a region of `region` pixels of the image still has `wanted` pixels on both
    /// sides. Full size where it has not even so many.
    pub fn that_holds(region: Size, wanted: Size) -> Self {
        let holds = |scale: &Self| {
            let scaled = region.scaled(*scale);
            scaled.width_px >= wanted.width_px && scaled.height_px >= wanted.height_px
        };
        Self::ALL.into_iter().rev().find(holds).unwrap_or(Self::FULL)
    }
}

/// A box in whole pixels of a picture, at least 1x1 and inside of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntBox {
    /// First column.
    pub x: u32,
    /// First row.
    pub y: u32,
    /// Columns and rows.
    pub size: Size,
}

impl IntBox {
    /// The whole of a picture.
    pub const fn whole(size: Size) -> Self {
        Self { x: 0, y: 0, size }
    }

    /// True where all of `other` lies inside.
    pub fn holds(self, other: Self) -> bool {
        let within = |low: u32, count: u32, other_low: u32, other_count: u32| {
            low <= other_low && other_low + other_count <= low + count
        };
        within(self.x, self.size.width_px, other.x, other.size.width_px)
            && within(self.y, self.size.height_px, other.y, other.size.height_px)
    }
}

/// A box in pixels, `x0 y0 x1 y1`, origin top left, upper bounds exclusive. The frame is named by the
/// holder: the upright image where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BoxPx {
    /// Left edge.
    pub x0: f32,
    /// Top edge.
    pub y0: f32,
    /// Right edge.
    pub x1: f32,
    /// Bottom edge.
    pub y1: f32,
}

impl BoxPx {
    /// The smallest box that holds both.
    pub fn around(self, other: Self) -> Self {
        Self {
            x0: self.x0.min(other.x0),
            y0: self.y0.min(other.y0),
            x1: self.x1.max(other.x1),
            y1: self.y1.max(other.y1),
        }
    }

    /// The whole of an image.
    pub fn whole(size: Size) -> Self {
        Self { x0: 0.0, y0: 0.0, x1: size.width_px as f32, y1: size.height_px as f32 }
    }

    /// A box from its centre and its sides.
    pub fn from_center(cx: f32, cy: f32, width: f32, height: f32) -> Self {
        Self { x0: cx - width / 2.0, y0: cy - height / 2.0, x1: cx + width / 2.0, y1: cy + height / 2.0 }
    }

    /// Horizontal extent, in pixels.
    pub fn width(self) -> f32 {
        self.x1 - self.x0
    }

    /// Vertical extent, in pixels.
    pub fn height(self) -> f32 {
        self.y1 - self.y0
    }

    /// Area in square pixels; 0 where the box is empty or reversed.
    pub fn area(self) -> f32 {
        self.width().max(0.0) * self.height().max(0.0)
    }

    /// The part inside an image of that size.
    pub fn clipped(self, size: Size) -> Self {
        let (w, h) = (size.width_px as f32, size.height_px as f32);
        Self {
            x0: self.x0.clamp(0.0, w),
            y0: self.y0.clamp(0.0, h),
            x1: self.x1.clamp(0.0, w),
            y1: self.y1.clamp(0.0, h),
        }
    }

    /// True for four finite numbers in order and both sides of at least `min_side_px`.
    pub fn is_sound(self, min_side_px: f32) -> bool {
        [self.x0, self.y0, self.x1, self.y1].iter().all(|v| v.is_finite())
            && self.width() >= min_side_px
            && self.height() >= min_side_px
    }

    /// Intersection over union, 0..=1; 0 where either box is empty.
    pub fn iou(self, other: Self) -> f32 {
        let overlap = Self {
            x0: self.x0.max(other.x0),
            y0: self.y0.max(other.y0),
            x1: self.x1.min(other.x1),
            y1: self.y1.min(other.y1),
        }
        .area();
        let union = self.area() + other.area() - overlap;
        if union > 0.0 { overlap / union } else { 0.0 }
    }
}

/// Where a piece of an image lies in a model's input: `input = image * scale + offset`, per axis. It
/// travels with the tensor, so that boxes find their way back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placement {
    /// Input pixels per image pixel, horizontally.
    pub scale_x: f32,
    /// Input pixels per image pixel, vertically.
    pub scale_y: f32,
    /// Input column of the image's left edge.
    pub offset_x: f32,
    /// Input row of the image's top edge.
    pub offset_y: f32,
}

impl Placement {
    /// A box in input pixels, brought back to image pixels. Not clipped.
    pub fn to_image(self, b: BoxPx) -> BoxPx {
        BoxPx {
            x0: (b.x0 - self.offset_x) / self.scale_x,
            y0: (b.y0 - self.offset_y) / self.scale_y,
            x1: (b.x1 - self.offset_x) / self.scale_x,
            y1: (b.y1 - self.offset_y) / self.scale_y,
        }
    }
}

/// How the stored pixels must be turned to stand upright: EXIF tag 274, values 1 to 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Orientation {
    /// 1: as stored.
    #[default]
    Upright,
    /// 2: mirrored left to right.
    FlipHorizontal,
    /// 3: turned by 180 degrees.
    Rotate180,
    /// 4: mirrored top to bottom.
    FlipVertical,
    /// 5: mirrored along the main diagonal.
    Transpose,
    /// 6: turn by 90 degrees clockwise to stand upright.
    Rotate90,
    /// 7: mirrored along the other diagonal.
    Transverse,
    /// 8: turn by 270 degrees clockwise to stand upright.
    Rotate270,
}

impl Orientation {
    /// From the EXIF value. Anything but 1..=8 is upright, as Pillow and browsers treat it.
    pub fn from_exif(value: u32) -> Self {
        match value {
            2 => Self::FlipHorizontal,
            3 => Self::Rotate180,
            4 => Self::FlipVertical,
            5 => Self::Transpose,
            6 => Self::Rotate90,
            7 => Self::Transverse,
            8 => Self::Rotate270,
            _ => Self::Upright,
        }
    }

    /// The EXIF value, 1..=8.
    pub fn exif(self) -> u8 {
        match self {
            Self::Upright => 1,
            Self::FlipHorizontal => 2,
            Self::Rotate180 => 3,
            Self::FlipVertical => 4,
            Self::Transpose => 5,
            Self::Rotate90 => 6,
            Self::Transverse => 7,
            Self::Rotate270 => 8,
        }
    }

    /// True where width and height change places.
    pub fn swaps_sides(self) -> bool {
        matches!(self, Self::Transpose | Self::Rotate90 | Self::Transverse | Self::Rotate270)
    }

    /// What turns an upright picture back to how it was stored.
    pub fn inverse(self) -> Self {
        match self {
            Self::Rotate90 => Self::Rotate270,
            Self::Rotate270 => Self::Rotate90,
            other => other,
        }
    }

    /// Where a box of a picture of size `from` gets to when the picture is turned.
    pub fn turned(self, part: IntBox, from: Size) -> IntBox {
        let right = from.width_px - part.x - part.size.width_px;
        let below = from.height_px - part.y - part.size.height_px;
        let (x, y) = match self {
            Self::Upright => (part.x, part.y),
            Self::FlipHorizontal => (right, part.y),
            Self::Rotate180 => (right, below),
            Self::FlipVertical => (part.x, below),
            Self::Transpose => (part.y, part.x),
            Self::Rotate90 => (below, part.x),
            Self::Transverse => (below, right),
            Self::Rotate270 => (part.y, right),
        };
        IntBox { x, y, size: self.upright(part.size) }
    }

    /// The upright size of a picture stored at `stored`.
    pub fn upright(self, stored: Size) -> Size {
        if self.swaps_sides() { stored.swapped() } else { stored }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_scale_that_holds_what_is_wanted_is_taken() {
        let photo = Size::new(4000, 3000);
        for (wanted, scale) in [
            (Size::new(224, 224), Scale::EIGHTH),
            (Size::new(500, 375), Scale::EIGHTH),
            (Size::new(500, 376), Scale::QUARTER),
            (Size::new(640, 480), Scale::QUARTER),
            (Size::new(2000, 1500), Scale::HALF),
            (Size::new(2001, 1), Scale::FULL),
            (Size::new(9000, 9000), Scale::FULL),
        ] {
            assert_eq!(Scale::that_holds(photo, wanted), scale, "{wanted:?}");
        }
        assert_eq!(Size::new(17, 16).scaled(Scale::EIGHTH), Size::new(3, 2));
    }

    #[test]
    fn a_turned_box_turns_back_and_keeps_to_its_corner() {
        let (from, part) = (Size::new(50, 30), IntBox { x: 5, y: 7, size: Size::new(11, 13) });
        for value in 1..=8 {
            let turn = Orientation::from_exif(value);
            let there = turn.turned(part, from);
            assert!(IntBox::whole(turn.upright(from)).holds(there), "{turn:?}");
            assert_eq!(turn.inverse().turned(there, turn.upright(from)), part, "{turn:?}");
        }
        let top_left = IntBox { x: 0, y: 0, size: Size::new(4, 2) };
        let right_top = IntBox { x: 28, y: 0, size: Size::new(2, 4) };
        assert_eq!(Orientation::Rotate90.turned(top_left, from), right_top);
    }
}
