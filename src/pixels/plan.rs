//! Where a region gets to in a model's input: which part of it, at what size and place, for every fit. Pure: no
//! pixel is touched.

use super::picture::Picture;
use crate::geometry::{BoxPx, IntBox, Placement, Size};
use crate::recipe::Fit;

/// How a region gets into the input.
pub(super) struct Plan {
    /// Part of the region that is used, in its pixels: start and length, across and down.
    pub(super) across: (f64, f64),
    pub(super) down: (f64, f64),
    /// Size of that part in the input.
    pub(super) to: Size,
    /// Where it begins in the input.
    pub(super) at: (u32, u32),
    /// What is around it.
    pub(super) fill: Filling,
    pub(super) placement: Placement,
}

/// What a part of the input holds that the region does not reach.
#[derive(Clone, Copy)]
pub(super) enum Filling {
    /// A grey level, normalised like the picture.
    Grey(u8),
    /// 0 after normalisation.
    Zero,
}

/// A region within its whole pixels.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) crop: IntBox,
    /// Start of the region in the crop, across and down.
    pub(super) start: (f64, f64),
    /// Width and height of the region.
    pub(super) sides: (f64, f64),
}

impl Span {
    pub(super) fn of(crop: IntBox, region: BoxPx) -> Self {
        let axis = |first: u32, count: u32, low: f32, high: f32| {
            let (first, end) = (f64::from(first), f64::from(first + count));
            let (low, high) = (f64::from(low).clamp(first, end), f64::from(high).clamp(first, end));
            // Less than a pixel is no picture: take the whole ones.
            if high - low >= 1.0 { (low - first, high - low) } else { (0.0, end - first) }
        };
        let (x, width) = axis(crop.x, crop.size.width_px, region.x0, region.x1);
        let (y, height) = axis(crop.y, crop.size.height_px, region.y0, region.y1);
        Self { crop, start: (x, y), sides: (width, height) }
    }

    /// From pixels of the image; `scale` and `offset` are those of the region.
    fn placement(self, scale: (f64, f64), offset: (f64, f64)) -> Placement {
        Placement {
            scale_x: scale.0 as f32,
            scale_y: scale.1 as f32,
            offset_x: (offset.0 - (f64::from(self.crop.x) + self.start.0) * scale.0) as f32,
            offset_y: (offset.1 - (f64::from(self.crop.y) + self.start.1) * scale.1) as f32,
        }
    }
}

/// What of a picture's buffer a plan reads.
pub(super) struct Source {
    /// The whole pixels of the region; nothing beside them is read.
    pub(super) view: IntBox,
    /// The part that is used, in pixels of the view: start and length, across and down.
    pub(super) across: (f64, f64),
    pub(super) down: (f64, f64),
}

impl Source {
    /// `None` where the picture is a window that does not hold the region.
    pub(super) fn of(picture: &Picture, span: Span, plan: &Plan) -> Option<Self> {
        let denominator = f64::from(picture.scale.denominator());
        let scaled = picture.image.scaled(picture.scale);
        // Divided by a power of two, and at full size by one: nothing is rounded.
        let axis = |crop: u32, (start, length): (f64, f64), used: (f64, f64), side: u32| {
            let start = (f64::from(crop) + start) / denominator;
            let first = (start.floor() as u32).min(side.saturating_sub(1));
            let end = ((start + length / denominator).ceil() as u32).clamp(first + 1, side.max(first + 1));
            let begin = used.0 / denominator + (f64::from(crop) / denominator - f64::from(first));
            let (pixels, used) = (f64::from(end - first), used.1 / denominator);
            // Rounding must not lead out of the view.
            let used = if begin + used > pixels { pixels - begin } else { used };
            (first, end - first, (begin, used))
        };
        let (x, width, across) = axis(span.crop.x, (span.start.0, span.sides.0), plan.across, scaled.width_px);
        let (y, height, down) = axis(span.crop.y, (span.start.1, span.sides.1), plan.down, scaled.height_px);
        let view = IntBox { x, y, size: Size::new(width, height) };
        let window = picture.window;
        let held = window.holds(view)
            && (picture.pixels.width(), picture.pixels.height()) == (window.size.width_px, window.size.height_px);
        held.then(|| Self { view: IntBox { x: x - window.x, y: y - window.y, ..view }, across, down })
    }
}

impl Plan {
    pub(super) fn new(span: Span, input: Size, fit: Fit) -> Self {
        match fit {
            // `Scale` has its proportions in the input's size already.
            Fit::Squash | Fit::Scale { .. } | Fit::SquareBlur => Self::squash(span, input),
            Fit::Pad { fill } => Self::pad(span, input, fill),
            Fit::Center { resize_shortest_px } => Self::center(span, input, resize_shortest_px),
            Fit::Corner => Self::corner(span, input),
        }
    }

    fn corner(span: Span, input: Size) -> Self {
        let (width, height) = span.sides;
        let r = (f64::from(input.width_px) / width).min(f64::from(input.height_px) / height);
        let side = |length: f64, most: u32| ((length * r).round() as u32).clamp(1, most.max(1));
        let to = Size::new(side(width, input.width_px), side(height, input.height_px));
        Self { to, fill: Filling::Zero, ..Self::squash(span, to) }
    }

    fn squash(span: Span, input: Size) -> Self {
        let (width, height) = span.sides;
        let scale = (f64::from(input.width_px) / width, f64::from(input.height_px) / height);
        Self {
            across: (span.start.0, width),
            down: (span.start.1, height),
            to: input,
            at: (0, 0),
            fill: Filling::Zero,
            placement: span.placement(scale, (0.0, 0.0)),
        }
    }

    /// Ultralytics' `LetterBox`. The way back uses the one ratio `r` for both axes and whole offsets, as
    /// its `scale_boxes` does, although rounding makes the true ratios differ a little.
    fn pad(span: Span, input: Size, fill: u8) -> Self {
        let (width, height) = span.sides;
        let r = (f64::from(input.width_px) / width).min(f64::from(input.height_px) / height);
        // Python's `round` takes halves to the even side; a side that rounds to nothing keeps one pixel.
        let side = |length: f64, most: u32| ((length * r).round_ties_even() as u32).clamp(1, most.max(1));
        let to = Size::new(side(width, input.width_px), side(height, input.height_px));
        let offset = |most: u32, used: u32| (f64::from(most - used) / 2.0 - 0.1).round_ties_even().max(0.0);
        let (x, y) = (offset(input.width_px, to.width_px), offset(input.height_px, to.height_px));
        Self {
            across: (span.start.0, width),
            down: (span.start.1, height),
            to,
            at: (x as u32, y as u32),
            fill: Filling::Grey(fill),
            placement: span.placement((r, r), (x, y)),
        }
    }

    /// Hugging Face: the short side becomes `shortest`, the long one `int(shortest * long / short)`, and
    /// the crop begins at `(side - crop) // 2`. Where the crop is bigger, it is filled up with black.
    fn center(span: Span, input: Size, shortest: u32) -> Self {
        let (width, height) = span.sides;
        let short = width.min(height);
        let middle = |start: f64, length: f64, most: u32| {
            let resized = ((f64::from(shortest.max(1)) * length / short) as i64).max(1);
            let most = i64::from(most);
            let cut = (resized - most).div_euclid(2);
            // Multiplied before it is divided: the part must not exceed the region by a rounding error.
            let part = |resized_px: i64| resized_px as f64 * length / resized as f64;
            let used = resized.min(most);
            let begin = start + part(cut.max(0));
            ((begin, part(used).min(start + length - begin)), used as u32, cut, resized as f64 / length)
        };
        let (across, to_width, cut_x, ratio_x) = middle(span.start.0, width, input.width_px);
        let (down, to_height, cut_y, ratio_y) = middle(span.start.1, height, input.height_px);
        Self {
            across,
            down,
            to: Size::new(to_width, to_height),
            at: (cut_x.min(0).unsigned_abs() as u32, cut_y.min(0).unsigned_abs() as u32),
            fill: Filling::Grey(0),
            placement: span.placement((ratio_x, ratio_y), (-(cut_x as f64), -(cut_y as f64))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The placement's way back finds the region that was put in.
        #[test]
        fn placements_bring_boxes_back(
            (x, y, w, h) in (0_u32..900, 0_u32..900, 1_u32..1000, 1_u32..1000),
            (iw, ih) in (1_u32..800, 1_u32..800),
            kind in 0..3,
            shortest in 1_u32..400,
        ) {
            let crop = IntBox { x, y, size: Size::new(w, h) };
            let fit = [Fit::Squash, Fit::Pad { fill: 0 }, Fit::Center { resize_shortest_px: shortest }][kind as usize];
            let span = Span::of(crop, BoxPx::whole(crop.size));
            let plan = Plan::new(span, Size::new(iw, ih), fit);
            prop_assert!(plan.at.0 + plan.to.width_px <= iw && plan.at.1 + plan.to.height_px <= ih);
            prop_assert!(plan.to.width_px >= 1 && plan.to.height_px >= 1);
            prop_assert!(plan.across.0 >= 0.0 && plan.across.0 + plan.across.1 <= f64::from(w));
            prop_assert!(plan.down.0 >= 0.0 && plan.down.0 + plan.down.1 <= f64::from(h));
            let (at_x, at_y) = (plan.at.0 as f32, plan.at.1 as f32);
            let (x1, y1) = (at_x + plan.to.width_px as f32, at_y + plan.to.height_px as f32);
            let part = BoxPx { x0: at_x, y0: at_y, x1, y1 };
            let back = plan.placement.to_image(part);
            // Padding undoes with one ratio: off by half an input pixel, or a whole one where a side keeps its last.
            let slack = |scale: f32| 0.01 + if kind == 1 { 1.0 / scale } else { 0.0 };
            let off_x = (back.x0 - (x as f32 + plan.across.0 as f32)).abs();
            prop_assert!(off_x <= slack(plan.placement.scale_x), "{off_x} {plan_to:?}", plan_to = plan.to);
            let off_y = (back.y1 - (y as f32 + (plan.down.0 + plan.down.1) as f32)).abs();
            prop_assert!(off_y <= slack(plan.placement.scale_y), "{off_y}");
        }
    }
}
