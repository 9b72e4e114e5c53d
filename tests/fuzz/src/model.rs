//! What models say, and what is said to them.

use std::path::Path;
use std::sync::LazyLock;

use croprow::candidate::{Candidate, Kept, Naming, Vocabulary, unpack};
use croprow::geometry::{BoxPx, Size};
use croprow::model::boxes::{regions_of, select};
use croprow::model::fuzzing::{self, Prompts};
use ndarray::ArrayView2;

const IMAGE: Size = Size::new(641, 359);

fn vocabulary(naming: Naming) -> Vocabulary {
    Vocabulary { naming, labels: vec!["cat".to_owned(), "##dog".to_owned(), String::new()] }
}

const NAMINGS: [Naming; 3] = [Naming::Best, Naming::Every, Naming::Phrases];

/// Every region must be a box in the image with a label and a score.
fn check_region(bbox: BoxPx, label: &str, score: f32) {
    assert!((0.0..=1.0).contains(&score), "{score}");
    let whole = BoxPx::whole(IMAGE);
    assert!(bbox.is_sound(1.0), "{bbox:?}");
    assert!(bbox.x0 >= whole.x0 && bbox.y0 >= whole.y0 && bbox.x1 <= whole.x1 && bbox.y1 <= whole.y1, "{bbox:?}");
    let _ = label;
}

/// The blob that is stored beside an image: anybody may have written it.
pub fn candidates(data: &[u8]) {
    let Some((first, packed)) = data.split_first() else { return };
    let naming = NAMINGS[usize::from(*first) % 3];
    let Ok(regions) = regions_of(packed, &vocabulary(naming), &fuzzing::selection(), IMAGE) else { return };
    for region in regions {
        check_region(region.bbox, region.label.as_deref().unwrap_or_default(), region.score.unwrap_or(0.0));
    }
}

/// Shapes by the first bytes, values by the rest: all that 32 bits can be.
pub fn outputs(data: &[u8]) {
    let Some((&[kind, rows, columns, more, shift], rest)) = data.split_first_chunk::<5>() else { return };
    let values: Vec<f32> = rest.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    let (rows, columns) = (usize::from(rows % 40), usize::from(columns % 40));
    let value = |i: usize| values.get((i + usize::from(shift)) % values.len().max(1)).copied().unwrap_or(f32::NAN);
    let matrix = |rows: usize, columns: usize, from: usize| -> Vec<f32> {
        (0..rows * columns).map(|i| value(i + from)).collect()
    };
    let first = matrix(rows, columns, 0);
    let Ok(first) = ArrayView2::from_shape((rows, columns), &first) else { return };
    // Mostly what fits.
    let (box_rows, box_columns) =
        if kind & 0x80 == 0 { (rows, 4) } else { (usize::from(more % 40), usize::from(more % 6)) };
    let second = matrix(box_rows, box_columns, rows * columns);
    let Ok(second) = ArrayView2::from_shape((box_rows, box_columns), &second) else { return };
    let labels = usize::from(more % 12);
    let (found, naming) = match kind % 5 {
        0 => match fuzzing::yolo(first, usize::from(more % 36), 0.05) {
            Some(found) => (found, Naming::Best),
            None => return,
        },
        1 => (fuzzing::transformer(first, second, IMAGE, true, 0.05), Naming::Best),
        2 => (fuzzing::transformer(first, second, IMAGE, false, 0.05), Naming::Every),
        3 => (fuzzing::grounding_dino(first, second, IMAGE, labels, false, 0.05), Naming::Best),
        _ => (fuzzing::grounding_dino(first, second, IMAGE, labels, true, 0.05), Naming::Phrases),
    };
    match found {
        Ok(found) => settle(found, naming),
        Err(error) => assert!(!error.message.chars().any(char::is_control)),
    }
}

/// The way from an output to regions, straight and through the store: the same number of them.
fn settle(found: Vec<Candidate>, naming: Naming) {
    assert!(found.iter().all(|c| !c.scores.is_empty() && c.best() > 0.05));
    let straight = select(&found, &vocabulary(naming), &fuzzing::selection(), IMAGE);
    for region in &straight {
        assert!(region.bbox.is_sound(1.0), "{:?}", region.bbox);
    }
    let kept = Kept::of(found, naming, IMAGE);
    assert_eq!(unpack(&kept.packed, IMAGE).expect("own packing").len(), kept.count);
    let regions = regions_of(&kept.packed, &vocabulary(naming), &fuzzing::selection(), IMAGE).expect("own packing");
    for region in regions {
        check_region(region.bbox, region.label.as_deref().unwrap_or_default(), region.score.unwrap_or(0.0));
    }
}

static READERS: LazyLock<[Prompts; 2]> = LazyLock::new(|| {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/models/grounding-dino-tiny/tokenizer.json");
    [false, true].map(|phrases| Prompts::load(&tokenizer, 24, phrases).expect("a tokenizer"))
});

/// Prompts of a row.
pub fn prompts(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    READERS.iter().for_each(|reader| reader.check(text));
}

/// What stands in a graph beside its numbers.
pub fn graphs(data: &[u8]) {
    fuzzing::graph(data);
}
