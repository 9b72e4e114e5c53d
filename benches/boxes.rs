//! What selecting regions among stored candidates costs: unpacking, thresholds, overlaps.
//!
//!     cargo bench --bench boxes

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark that cannot go on has failed")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use croprow::candidate::{Candidate, Kept, Naming, Vocabulary, unpack};
use croprow::geometry::{BoxPx, Size};
use croprow::model::boxes::{regions_of, select};
use croprow::recipe::{Keep, Nms, OnEmpty, Selection};

const IMAGE: Size = Size::new(4000, 3000);
const LABELS: usize = 80;

/// So many boxes of a crowded picture, a few of each object's over one another, as a detector answers.
fn candidates(count: usize) -> Vec<Candidate> {
    let mut state = 1_u32;
    let mut next = |most: f32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 * most
    };
    let mut boxes = Vec::with_capacity(count);
    while boxes.len() < count {
        let (x, y, side, label) = (next(3500.0), next(2500.0), 50.0 + next(400.0), next(LABELS as f32) as usize);
        for _ in 0..4.min(count - boxes.len()) {
            let (dx, dy) = (next(0.2 * side), next(0.2 * side));
            boxes.push(Candidate::single(
                BoxPx { x0: x + dx, y0: y + dy, x1: x + dx + side, y1: y + dy + side },
                label,
                0.05 + next(0.9),
            ));
        }
    }
    boxes
}

fn selecting(c: &mut Criterion) {
    let labels = (0..LABELS).map(|i| format!("label {i}")).collect();
    let vocabulary = Vocabulary { naming: Naming::Best, labels };
    let rule = |nms| Selection {
        box_threshold: 0.3,
        text_threshold: 0.25,
        nms_iou: 0.45,
        nms,
        min_box_px: 1.0,
        margin: 0.0,
        keep: Keep::All,
        on_empty: OnEmpty::Skip,
    };
    let mut group = c.benchmark_group("nms");
    for count in [20, 100, 300] {
        let kept = Kept::of(candidates(count), Naming::Best, IMAGE);
        let unpacked = unpack(&kept.packed, IMAGE).unwrap();
        for (name, nms) in [("label", Nms::Label), ("across", Nms::Across)] {
            let rule = rule(nms);
            group.bench_function(format!("{name}/{count}"), |b| {
                b.iter(|| select(black_box(&unpacked), &vocabulary, &rule, IMAGE));
            });
        }
        let rule = rule(Nms::Label);
        group.bench_function(format!("unpack_and_label/{count}"), |b| {
            b.iter(|| regions_of(black_box(&kept.packed), &vocabulary, &rule, IMAGE).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, selecting);
criterion_main!(benches);
