//! Raw detections as they are kept, so that thresholds can change without the model: their packing into
//! bytes, and what their label numbers mean. Plain data, no I/O.
//!
//! Packed, an image's candidates are one version byte and then, best first and without separators, per
//! candidate: the box as four numbers of 20 bits, little-endian, in parts of the image's sides; then its labels,
//! each as a variable-length number (seven bits a byte, the lowest first) that holds `2 * label + more`, and its
//! score as 16 bits in parts of 65,535. `more` is 1 while labels follow.

use serde::{Deserialize, Serialize};

use crate::geometry::{BoxPx, Size};

/// Candidates kept of one image, best first; the rest is forgotten.
pub const MOST_PER_IMAGE: usize = 300;

/// Labels kept of one candidate where only the best one counts; the others are for queries by people.
const MOST_LABELS_OF_BEST: usize = 4;

/// Candidates that are looked at for copies; a graph gives up to tens of thousands.
const MOST_COMPARED: usize = 5_000;

/// Two boxes of one label that overlap more than this say the same, where room is short.
const COPY_IOU: f32 = 0.8;

/// First byte of the packing.
const VERSION: u8 = 1;

/// 2^20 - 1: a thousandth of a pixel in a picture of 1,000.
const BOX_PARTS: f64 = 1_048_575.0;
const BOX_BITS: u32 = 20;
const BOX_BYTES: usize = 10;
const SCORE_PARTS: f32 = 65_535.0;

/// A score of one label.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LabelScore {
    /// Index into [`Vocabulary::labels`].
    pub label: usize,
    /// 0..=1.
    pub score: f32,
}

/// A raw detection above the floor.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Where; frame as said by the holder.
    pub bbox: BoxPx,
    /// Labels above the floor, best first; never empty.
    pub scores: Vec<LabelScore>,
}

impl Candidate {
    /// A candidate of one label.
    pub fn single(bbox: BoxPx, label: usize, score: f32) -> Self {
        Self { bbox, scores: vec![LabelScore { label, score }] }
    }

    /// A candidate of all labels whose score is above `floor`; `None` where there is none.
    pub fn above(bbox: BoxPx, scores: impl Iterator<Item = f32>, floor: f32) -> Option<Self> {
        let mut scores: Vec<LabelScore> = scores
            .enumerate()
            .filter(|(_, score)| *score > floor)
            .map(|(label, score)| LabelScore { label, score })
            .collect();
        // Stable: of equal scores the first label is the best, as `argmax` has it.
        scores.sort_by(|a, b| b.score.total_cmp(&a.score));
        (!scores.is_empty()).then_some(Self { bbox, scores })
    }

    /// The highest score.
    pub fn best(&self) -> f32 {
        self.scores.first().map_or(0.0, |s| s.score)
    }
}

/// How the labels of a candidate become the label of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Naming {
    /// The best label.
    Best,
    /// Every label above the threshold is a region of its own: families whose reference takes the best pairs of
    /// box and label.
    Every,
    /// Labels are tokens of the prompt; those above the text threshold, in the order of the prompt, are the
    /// label, and the best of all is the score: Hugging Face's rule for GroundingDINO.
    Phrases,
}

/// What label numbers mean for one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// How a region gets its label.
    pub naming: Naming,
    /// Labels, or tokens by their position in the prompt.
    pub labels: Vec<String>,
}

/// Candidates of one image as they are stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// See the module.
    pub packed: Vec<u8>,
    /// How many there are.
    pub count: usize,
}

impl Kept {
    /// Clips `candidates` (pixels of an upright image of `size`) to the image, drops what is outside or no box, and
    /// packs the best [`MOST_PER_IMAGE`]. Where there are more, those that say the same as a better one go first.
    pub fn of(candidates: Vec<Candidate>, naming: Naming, size: Size) -> Self {
        let mut inside: Vec<Candidate> = candidates
            .into_iter()
            .map(|c| Candidate { bbox: c.bbox.clipped(size), ..c })
            .filter(|c| c.bbox.is_sound(f32::MIN_POSITIVE))
            .collect();
        inside.sort_by(|a, b| b.best().total_cmp(&a.best()));
        if inside.len() > MOST_PER_IMAGE {
            inside.truncate(MOST_COMPARED);
            inside = without_copies(inside);
            inside.truncate(MOST_PER_IMAGE);
        }
        let mut packed = vec![VERSION];
        for candidate in &inside {
            pack(candidate, naming, size, &mut packed);
        }
        Self { packed, count: inside.len() }
    }
}

/// A detector without suppression of its own says the same thing dozens of times; in a crowded picture that
/// must not push whole objects out.
fn without_copies(sorted: Vec<Candidate>) -> Vec<Candidate> {
    let label = |c: &Candidate| c.scores.first().map(|s| s.label);
    let mut kept: Vec<Candidate> = Vec::with_capacity(MOST_PER_IMAGE);
    for candidate in sorted {
        if kept.len() >= MOST_PER_IMAGE {
            break;
        }
        let same = |k: &Candidate| label(k) == label(&candidate) && k.bbox.iou(candidate.bbox) > COPY_IOU;
        if !kept.iter().any(same) {
            kept.push(candidate);
        }
    }
    kept
}

fn pack(candidate: &Candidate, naming: Naming, size: Size, packed: &mut Vec<u8>) {
    let BoxPx { x0, y0, x1, y1 } = candidate.bbox;
    let (width, height) = (f64::from(size.width_px), f64::from(size.height_px));
    let part = |v: f32, side: f64| ((f64::from(v) / side * BOX_PARTS).round() as u128).min(BOX_PARTS as u128);
    let parts = [part(x0, width), part(y0, height), part(x1, width), part(y1, height)];
    let bits = parts.iter().rev().fold(0_u128, |bits, part| bits << BOX_BITS | part);
    packed.extend_from_slice(&bits.to_le_bytes()[..BOX_BYTES]);
    let most = if naming == Naming::Best { MOST_LABELS_OF_BEST } else { usize::MAX };
    let scores = &candidate.scores[..candidate.scores.len().min(most)];
    for (i, LabelScore { label, score }) in scores.iter().enumerate() {
        let more = usize::from(i + 1 < scores.len());
        let mut number = label << 1 | more;
        while number > 0x7f {
            packed.push(number as u8 | 0x80);
            number >>= 7;
        }
        packed.push(number as u8);
        let score = (score.clamp(0.0, 1.0) * SCORE_PARTS).round() as u16;
        packed.extend_from_slice(&score.to_le_bytes());
    }
}

/// The candidates of an image of `size`, best first, in pixels of the upright image.
///
/// # Errors
/// The bytes are no such packing.
pub fn unpack(packed: &[u8], size: Size) -> Result<Vec<Candidate>, &'static str> {
    let Some((&VERSION, mut rest)) = packed.split_first() else {
        return Err("stored candidates of an unknown kind");
    };
    let mut candidates = Vec::new();
    while !rest.is_empty() {
        if candidates.len() == MOST_PER_IMAGE {
            // Not of this program; comparing all of them with each other could take hours.
            return Err("more stored candidates than are ever kept");
        }
        let (bytes, after) = rest.split_at_checked(BOX_BYTES).ok_or("stored candidates end early")?;
        rest = after;
        let mut wide = [0; 16];
        wide[..BOX_BYTES].copy_from_slice(bytes);
        let bits = u128::from_le_bytes(wide);
        let mask = (1_u128 << BOX_BITS) - 1;
        let side = |place: u32, length: u32| {
            ((bits >> (place * BOX_BITS) & mask) as f64 / BOX_PARTS * f64::from(length)) as f32
        };
        let bbox = BoxPx {
            x0: side(0, size.width_px),
            y0: side(1, size.height_px),
            x1: side(2, size.width_px),
            y1: side(3, size.height_px),
        };
        candidates.push(Candidate { bbox, scores: unpack_scores(&mut rest)? });
    }
    Ok(candidates)
}

fn unpack_scores(rest: &mut &[u8]) -> Result<Vec<LabelScore>, &'static str> {
    let mut next = || {
        let (first, after) = rest.split_first().ok_or("stored candidates end early")?;
        *rest = after;
        Ok::<u8, &'static str>(*first)
    };
    let mut scores = Vec::with_capacity(1);
    loop {
        let (mut number, mut shift) = (0_usize, 0);
        loop {
            let byte = next()?;
            if shift > 28 {
                return Err("a stored label number is too large");
            }
            number |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let score = f32::from(u16::from_le_bytes([next()?, next()?])) / SCORE_PARTS;
        scores.push(LabelScore { label: number >> 1, score });
        if number & 1 == 0 {
            return Ok(scores);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: Size = Size::new(1920, 1080);

    fn candidate(x0: f32, y0: f32, x1: f32, y1: f32, scores: &[(usize, f32)]) -> Candidate {
        let scores = scores.iter().map(|&(label, score)| LabelScore { label, score }).collect();
        Candidate { bbox: BoxPx { x0, y0, x1, y1 }, scores }
    }

    #[test]
    fn boxes_and_scores_come_back_within_their_steps() {
        let first = candidate(10.25, 20.5, 1919.9, 1080.0, &[(3, 0.91), (200, 0.4)]);
        let second = candidate(-5.0, 0.0, 7.0, 9.0, &[(70_000, 0.05)]);
        let kept = Kept::of(vec![second, first.clone()], Naming::Every, SIZE);
        assert_eq!(kept.count, 2);
        let back = unpack(&kept.packed, SIZE).unwrap();
        let close = |a: f32, b: f32, most: f32| assert!((a - b).abs() <= most, "{a} {b}");
        close(back[0].bbox.x0, 10.25, 0.001);
        close(back[0].bbox.x1, 1919.9, 0.001);
        close(back[0].bbox.y1, 1080.0, 0.0);
        assert_eq!(back[0].scores.iter().map(|s| s.label).collect::<Vec<_>>(), [3, 200]);
        close(back[0].scores[1].score, 0.4, 1e-5);
        assert_eq!((back[1].bbox.x0, back[1].scores[0].label), (0.0, 70_000));
    }

    #[test]
    fn three_hundred_of_one_label_fit_into_four_kibibytes() {
        let many = (0..400).map(|i| candidate(1.0, 1.0, 50.0 + i as f32, 60.0, &[(i, 0.5)]));
        let many =
            many.map(|c| Candidate::single(c.bbox, c.scores[0].label % 60 + 1000 * (c.scores[0].label / 400), 0.5));
        let many = many
            .map(|c| Candidate::single(BoxPx { y1: 2.0 + 2.0 * c.bbox.x1, ..c.bbox }, c.scores[0].label, 0.5))
            .collect();
        let kept = Kept::of(many, Naming::Best, SIZE);
        assert_eq!(kept.count, MOST_PER_IMAGE);
        assert!(kept.packed.len() <= 4096, "{}", kept.packed.len());
    }

    #[test]
    fn what_is_outside_or_no_box_is_not_kept() {
        let kept = Kept::of(
            vec![
                candidate(-9.0, 5.0, -1.0, 9.0, &[(0, 0.9)]),
                candidate(9.0, 5.0, 8.0, 9.0, &[(0, 0.8)]),
                candidate(f32::NAN, 5.0, 8.0, 9.0, &[(0, 0.7)]),
            ],
            Naming::Best,
            SIZE,
        );
        assert_eq!((kept.count, kept.packed.len()), (0, 1));
    }

    #[test]
    fn damaged_bytes_are_an_error_and_no_panic() {
        assert!(unpack(&[], SIZE).is_err() && unpack(&[9], SIZE).is_err());
        let kept = Kept::of(vec![candidate(1.0, 1.0, 5.0, 6.0, &[(300, 0.5), (1, 0.4)])], Naming::Best, SIZE);
        for end in 2..kept.packed.len() {
            assert!(unpack(&kept.packed[..end], SIZE).is_err(), "{end}");
        }
    }

    proptest! {
        #[test]
        fn packing_what_was_unpacked_changes_nothing(
            found in prop::collection::vec(((0f32..1900.0, 0f32..1000.0, 1f32..500.0, 1f32..500.0),
                prop::collection::vec((0usize..100_000, 0f32..1.0), 1..5)), 0..20)
        ) {
            let found: Vec<Candidate> =
                found.iter().map(|((x, y, w, h), s)| {
                    let mut s = s.clone();
                    s.sort_by(|a, b| b.1.total_cmp(&a.1));
                    candidate(*x, *y, x + w, y + h, &s)
                }).collect();
            let kept = Kept::of(found, Naming::Every, SIZE);
            let once = unpack(&kept.packed, SIZE).unwrap();
            let again = Kept::of(once.clone(), Naming::Every, SIZE);
            prop_assert_eq!(unpack(&again.packed, SIZE).unwrap(), once);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = unpack(&bytes, SIZE);
        }
    }
}
