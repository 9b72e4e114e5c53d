//! Layouts of YOLO outputs: which one a graph has, and how it reads. Pure.
//!
//! Source of the layouts: Ultralytics, `utils/nms.py` (`non_max_suppression`), with `multi_label=False`: one
//! label per place, the best class.

use ndarray::{ArrayView1, ArrayView2, Axis};

use super::card::Layout;
use crate::candidate::Candidate;
use crate::geometry::BoxPx;
use crate::row::{RowCode, RowError};

/// Numbers of a box before the class scores, by layout.
const V8_HEAD: usize = 4;
const V5_HEAD: usize = 5;
const END2END_WIDTH: usize = 6;

impl Layout {
    /// True where an output `[b, rows, columns]` can have this layout with so many classes.
    pub(super) fn fits(self, rows: usize, columns: usize, classes: usize) -> bool {
        match self {
            Self::V8 => rows == V8_HEAD + classes,
            Self::V5 => columns == V5_HEAD + classes,
            Self::End2End => columns == END2END_WIDTH,
        }
    }

    /// The layout of an output `[b, rows, columns]` of a graph with so many classes. `end2end` is true where the
    /// graph says that it suppresses boxes itself.
    ///
    /// # Errors
    /// No layout fits, or more than one does.
    pub(super) fn guess(rows: usize, columns: usize, classes: usize, end2end: bool) -> Result<Self, String> {
        let known: &[Self] = if end2end { &[Self::End2End] } else { &[Self::V8, Self::V5, Self::End2End] };
        let mut fitting = known.iter().copied().filter(|l| l.fits(rows, columns, classes));
        match (fitting.next(), fitting.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(format!("no known layout has shape [b, {rows}, {columns}] with {classes} classes")),
            (Some(_), Some(_)) => {
                Err(format!("more than one layout has shape [b, {rows}, {columns}] with {classes} classes"))
            }
        }
    }

    /// Candidates above `floor` in one image's output (`[rows, columns]`), in its order, in input pixels.
    ///
    /// # Errors
    /// A number that is not finite, or a class that has no label.
    pub(super) fn read(
        self,
        output: ArrayView2<'_, f32>,
        classes: usize,
        floor: f32,
    ) -> Result<Vec<Candidate>, RowError> {
        if output.iter().any(|v| !v.is_finite()) {
            return Err(RowError::new(
                RowCode::NanOutput,
                "the detector gave NaN or infinity for this image; try an fp32 export of the model",
            ));
        }
        match self {
            Self::V8 => Ok(read_v8(output, floor)),
            Self::V5 => Ok(read_v5(output, floor)),
            Self::End2End => read_end2end(output, classes, floor),
        }
    }
}

/// Class scores lie in rows, so the best class of all places is found row by row: in the order of memory.
fn read_v8(output: ArrayView2<'_, f32>, floor: f32) -> Vec<Candidate> {
    let (boxes, scores) = output.split_at(Axis(0), V8_HEAD);
    let mut best = vec![(f32::NEG_INFINITY, 0_usize); output.len_of(Axis(1))];
    for (class_index, row) in scores.outer_iter().enumerate() {
        for (place, &score) in best.iter_mut().zip(row) {
            if score > place.0 {
                *place = (score, class_index);
            }
        }
    }
    let above = best.into_iter().enumerate().filter(|(_, (score, _))| *score > floor);
    above
        .map(|(i, (score, class))| {
            let bbox = BoxPx::from_center(boxes[[0, i]], boxes[[1, i]], boxes[[2, i]], boxes[[3, i]]);
            Candidate::single(bbox, class, score)
        })
        .collect()
}

fn read_v5(output: ArrayView2<'_, f32>, floor: f32) -> Vec<Candidate> {
    let mut found = Vec::new();
    for row in output.outer_iter() {
        let objectness = row[4];
        // A class score is at most 1, so the product cannot rise above the floor again.
        if objectness <= floor {
            continue;
        }
        let (class, class_score) = best_class(row.slice_axis(Axis(0), (V5_HEAD..).into()));
        let score = objectness * class_score;
        if score > floor {
            found.push(Candidate::single(BoxPx::from_center(row[0], row[1], row[2], row[3]), class, score));
        }
    }
    found
}

/// The first of the highest.
fn best_class(scores: ArrayView1<'_, f32>) -> (usize, f32) {
    scores
        .iter()
        .copied()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (i, s)| if s > best.1 { (i, s) } else { best })
}

fn read_end2end(output: ArrayView2<'_, f32>, classes: usize, floor: f32) -> Result<Vec<Candidate>, RowError> {
    let mut found = Vec::new();
    for row in output.outer_iter().filter(|row| row[4] > floor) {
        let class = row[5].round();
        if class < 0.0 || class >= classes as f32 {
            return Err(RowError::new(RowCode::Model, format!("the detector gave class {class} of {classes}")));
        }
        let bbox = BoxPx { x0: row[0], y0: row[1], x1: row[2], y1: row[3] };
        found.push(Candidate::single(bbox, class as usize, row[4]));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, arr2};

    use super::*;

    /// Three places, two classes: place 1 is the best, place 2 has two classes above the floor.
    fn v8() -> Array2<f32> {
        arr2(&[
            [10.0, 50.0, 80.0],
            [20.0, 60.0, 30.0],
            [4.0, 20.0, 8.0],
            [6.0, 10.0, 2.0],
            [0.01, 0.2, 0.7],
            [0.02, 0.9, 0.6],
        ])
    }

    #[test]
    fn a_v8_output_gives_the_best_class_of_each_place() {
        let found = Layout::V8.read(v8().view(), 2, 0.05).unwrap();
        assert_eq!(
            found,
            [
                Candidate::single(BoxPx { x0: 40.0, y0: 55.0, x1: 60.0, y1: 65.0 }, 1, 0.9),
                Candidate::single(BoxPx { x0: 76.0, y0: 29.0, x1: 84.0, y1: 31.0 }, 0, 0.7),
            ]
        );
    }

    #[test]
    fn a_v5_output_multiplies_objectness_and_class() {
        let output = arr2(&[
            [50.0, 60.0, 20.0, 10.0, 0.5, 0.2, 0.9],
            [50.0, 60.0, 20.0, 10.0, 0.04, 1.0, 1.0],
            [50.0, 60.0, 20.0, 10.0, 0.5, 0.05, 0.09],
        ]);
        let found = Layout::V5.read(output.view(), 2, 0.05).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].scores[0].label, found[0].best()), (1, 0.45));
        assert_eq!(found[0].bbox, BoxPx { x0: 40.0, y0: 55.0, x1: 60.0, y1: 65.0 });
    }

    #[test]
    fn an_end_to_end_output_has_corners_and_a_class_number() {
        let output = arr2(&[[40.0, 55.0, 60.0, 65.0, 0.9, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]);
        let found = Layout::End2End.read(output.view(), 2, 0.05).unwrap();
        assert_eq!(found, [Candidate::single(BoxPx { x0: 40.0, y0: 55.0, x1: 60.0, y1: 65.0 }, 1, 0.9)]);
        let wrong = arr2(&[[40.0, 55.0, 60.0, 65.0, 0.9, 7.0]]);
        assert_eq!(Layout::End2End.read(wrong.view(), 2, 0.05).unwrap_err().code, RowCode::Model);
    }

    #[test]
    fn a_number_that_is_not_finite_fails_the_image_even_below_the_floor() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut output = v8();
            output[[0, 0]] = bad;
            assert_eq!(Layout::V8.read(output.view(), 2, 0.05).unwrap_err().code, RowCode::NanOutput);
        }
    }

    #[test]
    fn the_layout_is_known_by_shape_and_number_of_classes() {
        assert_eq!(Layout::guess(84, 8400, 80, false), Ok(Layout::V8));
        assert_eq!(Layout::guess(25200, 85, 80, false), Ok(Layout::V5));
        assert_eq!(Layout::guess(300, 6, 80, false), Ok(Layout::End2End));
        assert_eq!(Layout::guess(300, 6, 1, true), Ok(Layout::End2End));
        assert_eq!(Layout::guess(6, 8400, 2, false), Ok(Layout::V8));
    }

    #[test]
    fn an_unclear_layout_is_refused() {
        assert!(Layout::guess(25200, 6, 1, false).unwrap_err().contains("more than one"));
        assert!(Layout::guess(116, 8400, 80, false).unwrap_err().contains("no known"));
        assert!(Layout::guess(84, 8400, 80, true).unwrap_err().contains("no known"));
    }
}
