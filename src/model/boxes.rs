//! Which detections become regions. Pure: no model, no pixels.

use crate::geometry::Size;
use crate::recipe::{Keep, Selection};
use crate::row::Detection;

/// The detections that become regions, best score first; ties keep the order of `detections`. Boxes are in
/// pixels of an upright image of size `image`, and are clipped to it.
///
/// In this order: score above `box_threshold` (strictly, as Ultralytics `non_max_suppression` does); clipping;
/// boxes with a side under `min_side_px` are dropped; of two boxes of one class whose intersection over union
/// is above `nms_iou` the better one stays; at most `keep`. Clipping comes first, so that a second pass over
/// the result changes nothing; Ultralytics clips last, which differs for boxes that leave the image only.
pub fn select(detections: &[Detection], rule: &Selection, image: Size, min_side_px: f32) -> Vec<Detection> {
    let mut sound: Vec<Detection> = detections
        .iter()
        .filter(|d| d.score > rule.box_threshold)
        .map(|d| Detection { bbox: d.bbox.clipped(image), ..d.clone() })
        .filter(|d| d.bbox.is_sound(min_side_px))
        .collect();
    sound.sort_by(|a, b| b.score.total_cmp(&a.score));
    let most = match rule.keep {
        Keep::All => usize::MAX,
        Keep::Best(n) => n as usize,
    };
    let mut kept: Vec<Detection> = Vec::new();
    for candidate in sound {
        if kept.len() >= most {
            break;
        }
        let covers =
            |k: &Detection| k.class_index == candidate.class_index && k.bbox.iou(candidate.bbox) > rule.nms_iou;
        if !kept.iter().any(covers) {
            kept.push(candidate);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::geometry::BoxPx;
    use crate::recipe::OnEmpty;

    const IMAGE: Size = Size::new(100, 80);

    fn rule(box_threshold: f32, nms_iou: f32, keep: Keep) -> Selection {
        Selection { box_threshold, nms_iou, keep, on_empty: OnEmpty::Skip }
    }

    fn detection(x0: f32, y0: f32, x1: f32, y1: f32, class_index: usize, score: f32) -> Detection {
        Detection { bbox: BoxPx { x0, y0, x1, y1 }, class_index, score }
    }

    #[test]
    fn overlapping_boxes_of_one_class_are_one_object_and_of_two_classes_two() {
        let found = [
            detection(10.0, 10.0, 50.0, 50.0, 0, 0.6),
            detection(11.0, 10.0, 51.0, 50.0, 0, 0.9),
            detection(10.0, 10.0, 50.0, 50.0, 1, 0.5),
            detection(60.0, 10.0, 90.0, 50.0, 0, 0.4),
        ];
        let scores: Vec<f32> =
            select(&found, &rule(0.3, 0.45, Keep::All), IMAGE, 1.0).iter().map(|d| d.score).collect();
        assert_eq!(scores, [0.9, 0.5, 0.4]);
    }

    #[test]
    fn a_score_at_the_threshold_is_not_above_it() {
        let found = [detection(0.0, 0.0, 9.0, 9.0, 0, 0.25), detection(20.0, 0.0, 29.0, 9.0, 0, 0.250_001)];
        assert_eq!(select(&found, &rule(0.25, 0.5, Keep::All), IMAGE, 1.0).len(), 1);
    }

    #[test]
    fn boxes_are_clipped_and_what_is_left_must_be_a_pixel_wide() {
        let found = [
            detection(-10.0, -10.0, 20.0, 20.0, 0, 0.9),
            detection(99.5, 10.0, 140.0, 20.0, 0, 0.8),
            detection(120.0, 10.0, 140.0, 20.0, 0, 0.7),
            detection(30.0, 30.0, 20.0, 40.0, 0, 0.6),
            detection(f32::NAN, 30.0, 20.0, 40.0, 0, 0.5),
            detection(40.0, 40.0, 60.0, f32::INFINITY, 0, 0.4),
        ];
        let kept = select(&found, &rule(0.3, 0.5, Keep::All), IMAGE, 1.0);
        assert_eq!(kept[0].bbox, BoxPx { x0: 0.0, y0: 0.0, x1: 20.0, y1: 20.0 });
        // Infinity is clipped like any other edge outside.
        assert_eq!(kept[1].bbox, BoxPx { x0: 40.0, y0: 40.0, x1: 60.0, y1: 80.0 });
        assert_eq!(kept.len(), 2);
    }

    #[test]
    fn equal_scores_keep_the_order_of_the_input() {
        let found = [detection(0.0, 0.0, 9.0, 9.0, 3, 0.5), detection(20.0, 0.0, 29.0, 9.0, 1, 0.5)];
        let classes: Vec<usize> =
            select(&found, &rule(0.3, 0.5, Keep::All), IMAGE, 1.0).iter().map(|d| d.class_index).collect();
        assert_eq!(classes, [3, 1]);
    }

    #[test]
    fn the_best_are_counted_after_suppression() {
        let found = [
            detection(10.0, 10.0, 50.0, 50.0, 0, 0.9),
            detection(11.0, 10.0, 51.0, 50.0, 0, 0.8),
            detection(60.0, 10.0, 90.0, 50.0, 0, 0.4),
        ];
        let scores: Vec<f32> =
            select(&found, &rule(0.3, 0.5, Keep::Best(2)), IMAGE, 1.0).iter().map(|d| d.score).collect();
        assert_eq!(scores, [0.9, 0.4]);
    }

    prop_compose! {
        fn anything()(x in -20f32..110.0, y in -20f32..90.0, w in 0f32..60.0, h in 0f32..60.0, class in 0usize..3, score in 0f32..1.0)
            -> Detection { detection(x, y, x + w, y + h, class, score) }
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_order_where_scores_differ(
            found in prop::collection::vec(anything(), 0..40).prop_filter("equal scores", |v| {
                let mut scores: Vec<f32> = v.iter().map(|d| d.score).collect();
                scores.sort_by(f32::total_cmp);
                scores.windows(2).all(|w| w[0] != w[1])
            }),
            turn in 0usize..40,
        ) {
            let rule = rule(0.3, 0.5, Keep::All);
            let mut other = found.clone();
            other.reverse();
            let len = other.len().max(1);
            other.rotate_left(turn % len);
            prop_assert_eq!(select(&found, &rule, IMAGE, 1.0), select(&other, &rule, IMAGE, 1.0));
        }

        #[test]
        fn no_two_boxes_of_one_class_overlap_too_much(found in prop::collection::vec(anything(), 0..40)) {
            let kept = select(&found, &rule(0.3, 0.5, Keep::All), IMAGE, 1.0);
            for (i, a) in kept.iter().enumerate() {
                for b in &kept[i + 1..] {
                    prop_assert!(a.class_index != b.class_index || a.bbox.iou(b.bbox) <= 0.5);
                }
            }
        }

        #[test]
        fn a_second_pass_changes_nothing(found in prop::collection::vec(anything(), 0..40), n in 0u32..8) {
            let rule = rule(0.3, 0.5, Keep::Best(n));
            let once = select(&found, &rule, IMAGE, 1.0);
            prop_assert_eq!(&select(&once, &rule, IMAGE, 1.0), &once);
        }
    }
}
