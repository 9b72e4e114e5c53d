//! Which candidates become regions. Pure: no model, no pixels, so that a new rule costs neither.

use tokenizers::Decoder as _;
use tokenizers::decoders::wordpiece::WordPiece;

use crate::candidate::{Candidate, Naming, Vocabulary, unpack};
use crate::error::Error;
use crate::geometry::{BoxPx, Size};
use crate::recipe::{Keep, Nms, OnEmpty, Selection};
use crate::row::{Detection, Region};

/// A box over its threshold, with what tells two classes apart.
struct Named {
    bbox: BoxPx,
    score: f32,
    label: usize,
    /// The decoded tokens, where there is no label number.
    phrase: Option<String>,
}

/// The candidates that become regions, best score first; ties keep the order of `candidates`. Boxes are in
/// pixels of an upright image of size `image`, and are clipped to it.
///
/// In this order: score above `box_threshold` (strictly, as the references have it); clipping; boxes with a side
/// under `min_box_px` are dropped; of two boxes of one label (or of any, with [`Nms::Across`]) whose intersection
/// over union is above `nms_iou` the better one stays; at most `keep`; then the margin is added and clipped.
/// Clipping comes first, so that a second pass over the result changes nothing; Ultralytics clips last, which
/// differs for boxes that leave the image only.
pub fn select(candidates: &[Candidate], vocabulary: &Vocabulary, rule: &Selection, image: Size) -> Vec<Detection> {
    let mut sound: Vec<Named> = candidates
        .iter()
        .flat_map(|candidate| named(candidate, vocabulary, rule))
        .map(|named| Named { bbox: named.bbox.clipped(image), ..named })
        .filter(|named| named.bbox.is_sound(rule.min_box_px))
        .collect();
    sound.sort_by(|a, b| b.score.total_cmp(&a.score));
    let most = match rule.keep {
        Keep::All => usize::MAX,
        Keep::Best(n) => n as usize,
    };
    let mut kept: Vec<Named> = Vec::new();
    for candidate in sound {
        if kept.len() >= most {
            break;
        }
        let rivals =
            |k: &Named| rule.nms == Nms::Across || (k.label, &k.phrase) == (candidate.label, &candidate.phrase);
        if !kept.iter().any(|k| rivals(k) && k.bbox.iou(candidate.bbox) > rule.nms_iou) {
            kept.push(candidate);
        }
    }
    let label = |named: Named| {
        let known = |label: usize| vocabulary.labels.get(label).cloned().unwrap_or_else(|| format!("class {label}"));
        let bbox = widened(named.bbox, rule.margin).clipped(image);
        Detection { bbox, label: named.phrase.unwrap_or_else(|| known(named.label)), score: named.score }
    };
    kept.into_iter().map(label).collect()
}

/// The regions that `rule` makes of packed candidates of an upright image of size `image`.
///
/// # Errors
/// The bytes are no candidates: somebody else wrote them.
pub fn regions_of(packed: &[u8], vocabulary: &Vocabulary, rule: &Selection, image: Size) -> Result<Vec<Region>, Error> {
    let candidates = unpack(packed, image).map_err(|why| Error::System(why.to_owned()))?;
    let selected = select(&candidates, vocabulary, rule, image);
    if selected.is_empty() && rule.on_empty == OnEmpty::Whole {
        return Ok(vec![Region::whole(image)]);
    }
    Ok(selected.into_iter().map(Region::from).collect())
}

fn named(candidate: &Candidate, vocabulary: &Vocabulary, rule: &Selection) -> Vec<Named> {
    let above = candidate.scores.iter().filter(|s| s.score > rule.box_threshold);
    let plain =
        |s: &crate::candidate::LabelScore| Named { bbox: candidate.bbox, score: s.score, label: s.label, phrase: None };
    match vocabulary.naming {
        Naming::Best => above.take(1).map(plain).collect(),
        Naming::Every => above.map(plain).collect(),
        Naming::Phrases => above
            .take(1)
            .map(|best| Named { label: 0, phrase: Some(phrase(candidate, vocabulary, rule)), ..plain(best) })
            .collect(),
    }
}

/// The tokens above the text threshold in the order of the prompt, decoded. Tokens that the reference never
/// decodes have no text in the vocabulary. Where none is left it is the best one that has a text: a region
/// is never without a label.
fn phrase(candidate: &Candidate, vocabulary: &Vocabulary, rule: &Selection) -> String {
    let text = |token: usize| vocabulary.labels.get(token).filter(|t| !t.is_empty()).cloned();
    let mut places: Vec<usize> =
        candidate.scores.iter().filter(|s| s.score > rule.text_threshold).map(|s| s.label).collect();
    places.sort_unstable();
    let mut tokens: Vec<String> = places.into_iter().filter_map(text).collect();
    if tokens.is_empty() {
        tokens.extend(candidate.scores.iter().find_map(|s| text(s.label)));
    }
    let plain = tokens.join(" ");
    WordPiece::new("##".to_owned(), true).decode(tokens).ok().filter(|t| !t.is_empty()).unwrap_or(plain)
}

fn widened(bbox: BoxPx, margin: f32) -> BoxPx {
    let (across, down) = (bbox.width() * margin, bbox.height() * margin);
    BoxPx { x0: bbox.x0 - across, y0: bbox.y0 - down, x1: bbox.x1 + across, y1: bbox.y1 + down }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::candidate::LabelScore;

    const IMAGE: Size = Size::new(100, 80);

    fn rule(box_threshold: f32, nms_iou: f32, keep: Keep) -> Selection {
        Selection {
            box_threshold,
            text_threshold: 0.25,
            nms_iou,
            nms: Nms::Label,
            min_box_px: 1.0,
            margin: 0.0,
            keep,
            on_empty: OnEmpty::Skip,
        }
    }

    fn vocabulary(naming: Naming) -> Vocabulary {
        let labels = ["[CLS]", "a", "cat", ".", "re", "##mote", "[SEP]"];
        let hide = |l: &&str| if *l == "[CLS]" { String::new() } else { (*l).to_owned() };
        Vocabulary { naming, labels: labels.iter().map(hide).collect() }
    }

    fn candidate(x0: f32, y0: f32, x1: f32, y1: f32, label: usize, score: f32) -> Candidate {
        Candidate::single(BoxPx { x0, y0, x1, y1 }, label, score)
    }

    fn chosen(found: &[Candidate], rule: &Selection) -> Vec<Detection> {
        select(found, &vocabulary(Naming::Best), rule, IMAGE)
    }

    fn scores(found: &[Candidate], rule: &Selection) -> Vec<f32> {
        chosen(found, rule).iter().map(|d| d.score).collect()
    }

    #[test]
    fn overlapping_boxes_of_one_label_are_one_object_and_of_two_labels_two() {
        let found = [
            candidate(10.0, 10.0, 50.0, 50.0, 1, 0.6),
            candidate(11.0, 10.0, 51.0, 50.0, 1, 0.9),
            candidate(10.0, 10.0, 50.0, 50.0, 2, 0.5),
            candidate(60.0, 10.0, 90.0, 50.0, 1, 0.4),
        ];
        assert_eq!(scores(&found, &rule(0.3, 0.45, Keep::All)), [0.9, 0.5, 0.4]);
        let across = Selection { nms: Nms::Across, ..rule(0.3, 0.45, Keep::All) };
        assert_eq!(scores(&found, &across), [0.9, 0.4]);
    }

    #[test]
    fn of_two_identical_boxes_one_stays_whatever_their_order() {
        let (a, b) = (candidate(1.0, 1.0, 9.0, 9.0, 1, 0.5), candidate(1.0, 1.0, 9.0, 9.0, 1, 0.5));
        assert_eq!(chosen(&[a, b], &rule(0.3, 0.45, Keep::All)).len(), 1);
    }

    #[test]
    fn a_score_at_the_threshold_is_not_above_it() {
        let found = [candidate(0.0, 0.0, 9.0, 9.0, 1, 0.25), candidate(20.0, 0.0, 29.0, 9.0, 1, 0.250_001)];
        assert_eq!(chosen(&found, &rule(0.25, 0.5, Keep::All)).len(), 1);
    }

    #[test]
    fn boxes_are_clipped_and_what_is_left_must_be_a_pixel_wide() {
        let found = [
            candidate(-10.0, -10.0, 20.0, 20.0, 1, 0.9),
            candidate(99.5, 10.0, 140.0, 20.0, 1, 0.8),
            candidate(120.0, 10.0, 140.0, 20.0, 1, 0.7),
            candidate(30.0, 30.0, 20.0, 40.0, 1, 0.6),
            candidate(f32::NAN, 30.0, 20.0, 40.0, 1, 0.5),
            candidate(40.0, 40.0, 60.0, f32::INFINITY, 1, 0.4),
        ];
        let kept = chosen(&found, &rule(0.3, 0.5, Keep::All));
        assert_eq!(kept[0].bbox, BoxPx { x0: 0.0, y0: 0.0, x1: 20.0, y1: 20.0 });
        // Infinity is clipped like any other edge outside.
        assert_eq!(kept[1].bbox, BoxPx { x0: 40.0, y0: 40.0, x1: 60.0, y1: 80.0 });
        assert_eq!(kept.len(), 2);
        let larger = Selection { min_box_px: 25.0, ..rule(0.3, 0.5, Keep::All) };
        assert!(chosen(&found, &larger).is_empty());
    }

    #[test]
    fn a_margin_widens_each_side_and_stays_inside() {
        let found = [candidate(10.0, 20.0, 50.0, 40.0, 1, 0.9)];
        let wide = Selection { margin: 0.5, ..rule(0.3, 0.5, Keep::All) };
        assert_eq!(chosen(&found, &wide)[0].bbox, BoxPx { x0: 0.0, y0: 10.0, x1: 70.0, y1: 50.0 });
    }

    #[test]
    fn equal_scores_keep_the_order_of_the_input() {
        let found = [candidate(0.0, 0.0, 9.0, 9.0, 2, 0.5), candidate(20.0, 0.0, 29.0, 9.0, 1, 0.5)];
        let labels: Vec<String> = chosen(&found, &rule(0.3, 0.5, Keep::All)).into_iter().map(|d| d.label).collect();
        assert_eq!(labels, ["cat", "a"]);
    }

    #[test]
    fn the_best_are_counted_after_suppression() {
        let found = [
            candidate(10.0, 10.0, 50.0, 50.0, 1, 0.9),
            candidate(11.0, 10.0, 51.0, 50.0, 1, 0.8),
            candidate(60.0, 10.0, 90.0, 50.0, 1, 0.4),
        ];
        assert_eq!(scores(&found, &rule(0.3, 0.5, Keep::Best(2))), [0.9, 0.4]);
    }

    #[test]
    fn a_place_has_one_label_or_every_one_as_its_family_says() {
        let pair = |label, score| LabelScore { label, score };
        let bbox = BoxPx { x0: 1.0, y0: 1.0, x1: 9.0, y1: 9.0 };
        let found = [Candidate { bbox, scores: vec![pair(2, 0.8), pair(1, 0.6), pair(4, 0.2)] }];
        let by = |naming| -> Vec<(String, f32)> {
            let found = select(&found, &vocabulary(naming), &rule(0.3, 0.5, Keep::All), IMAGE);
            found.into_iter().map(|d| (d.label, d.score)).collect()
        };
        assert_eq!(by(Naming::Best), [("cat".to_owned(), 0.8)]);
        assert_eq!(by(Naming::Every), [("cat".to_owned(), 0.8), ("a".to_owned(), 0.6)]);
        assert_eq!(by(Naming::Phrases), [("a cat".to_owned(), 0.8)]);
    }

    #[test]
    fn phrases_are_decoded_as_the_reference_does() {
        let bbox = BoxPx { x0: 1.0, y0: 1.0, x1: 9.0, y1: 9.0 };
        let of = |tokens: &[(usize, f32)]| {
            let scores = tokens.iter().map(|&(label, score)| LabelScore { label, score }).collect();
            let found = [Candidate { bbox, scores }];
            select(&found, &vocabulary(Naming::Phrases), &rule(0.3, 0.5, Keep::All), IMAGE)[0].label.clone()
        };
        assert_eq!(of(&[(6, 0.9), (2, 0.8), (3, 0.7), (1, 0.3)]), "a cat. [SEP]");
        assert_eq!(of(&[(5, 0.9), (4, 0.8)]), "remote");
        // Only the token that is never decoded is above the threshold: the next best one speaks.
        assert_eq!(of(&[(0, 0.9), (2, 0.2), (1, 0.1)]), "cat");
    }

    prop_compose! {
        fn anything()(x in -20f32..110.0, y in -20f32..90.0, w in 0f32..60.0, h in 0f32..60.0, label in 0usize..3, score in 0f32..1.0)
            -> Candidate { candidate(x, y, x + w, y + h, label, score) }
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_order_where_scores_differ(
            found in prop::collection::vec(anything(), 0..40).prop_filter("equal scores", |v| {
                let mut scores: Vec<f32> = v.iter().map(Candidate::best).collect();
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
            prop_assert_eq!(chosen(&found, &rule), chosen(&other, &rule));
        }

        #[test]
        fn no_two_boxes_of_one_label_overlap_too_much(found in prop::collection::vec(anything(), 0..40)) {
            let kept = chosen(&found, &rule(0.3, 0.5, Keep::All));
            for (i, a) in kept.iter().enumerate() {
                for b in &kept[i + 1..] {
                    prop_assert!(a.label != b.label || a.bbox.iou(b.bbox) <= 0.5);
                }
            }
        }
    }
}
