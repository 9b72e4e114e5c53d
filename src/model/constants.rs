//! What an embedder's graph gets where it wants more than pixels: a model of pictures and text also wants a text,
//! whatever it says. Its constants are short and change no vector of a picture.

use ndarray::{ArrayD, IxDyn};

use super::port::{Feed, Port};
use super::session::Graph;
use crate::error::Error;
use crate::geometry::Size;

/// Lengths of text that are tried where the graph leaves it open: short is fast, and 64 and 77 are what SigLIP
/// and CLIP were trained with, which some exports insist on.
const TEXT_LENGTHS: [usize; 3] = [8, 64, 77];

/// What an input holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Zeros: the first token of every vocabulary, the first segment.
    Zeros,
    /// Ones: everything counts.
    Ones,
    /// 0, 1, 2, ... along the last axis.
    Positions,
    /// Ones, as large as the picture.
    PixelMask,
}

impl Content {
    fn of(name: &str) -> Option<Self> {
        match name {
            "input_ids" | "text" | "token_type_ids" => Some(Self::Zeros),
            "attention_mask" => Some(Self::Ones),
            "position_ids" => Some(Self::Positions),
            "pixel_mask" | "pixel_attention_mask" => Some(Self::PixelMask),
            _ => None,
        }
    }
}

/// How many texts go with a batch of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Texts {
    One,
    AsManyAsImages,
}

/// The feeds of a graph beside its images.
#[derive(Clone, Debug)]
pub(super) struct Constants {
    ports: Vec<(usize, Port, Content)>,
    texts: Texts,
    text_length: usize,
}

impl Constants {
    /// # Errors
    /// The graph has an input that nobody knows.
    pub(super) fn of(graph: &Graph) -> Result<Self, Error> {
        let mut ports = Vec::new();
        for (index, port) in graph.inputs.iter().enumerate().filter(|(i, _)| *i != graph.image.index) {
            match Content::of(&port.name).filter(|_| Feed::can_be(port)) {
                Some(content) => ports.push((index, port.clone(), content)),
                None => {
                    return Err(graph.refuse(format!(
                        "its input {} is none that an embedder is fed with; inputs: {}; export its image half alone",
                        port.text(),
                        graph.describe_inputs()
                    )));
                }
            }
        }
        Ok(Self { ports, texts: Texts::One, text_length: TEXT_LENGTHS[0] })
    }

    /// The ways to feed the graph, the cheapest first.
    fn ways(&self) -> Vec<Self> {
        if self.ports.iter().all(|(_, _, content)| *content == Content::PixelMask) {
            return vec![self.clone()];
        }
        let ways = [Texts::One, Texts::AsManyAsImages].into_iter().flat_map(|t| TEXT_LENGTHS.map(|l| (t, l)));
        ways.map(|(texts, text_length)| Self { texts, text_length, ..self.clone() }).collect()
    }

    /// Finds the way that the graph takes, by calling it with a blank image, and with two. Of several that take one
    /// image only the first is kept, and the graph is then given one at a time. Afterwards the outputs' dimensions
    /// are known.
    ///
    /// # Errors
    /// It takes none; the message is that of the first.
    pub(super) fn settle(self, graph: &mut Graph, size: Size) -> Result<Self, Error> {
        let mut first_error = None;
        let mut for_one_image = None;
        for way in self.ways() {
            match graph.try_blank(size, &|images, size| way.feeds(images, size)) {
                Ok(()) if way.takes_two(graph, size) => return Ok(way),
                Ok(()) => for_one_image = for_one_image.or(Some(way)),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        match (for_one_image, first_error) {
            (Some(way), _) => {
                graph.try_blank(size, &|images, size| way.feeds(images, size))?;
                Ok(way)
            }
            (None, Some(error)) => Err(error),
            (None, None) => Ok(self),
        }
    }

    /// True where nothing is lost by this way: the batch is fixed anyway, or two images pass.
    fn takes_two(&self, graph: &mut Graph, size: Size) -> bool {
        graph.fixed_batch.is_some() || graph.takes_two(size, &|images, size| self.feeds(images, size))
    }

    /// For so many images of that size.
    pub(super) fn feeds(&self, images: usize, size: Size) -> Vec<Feed> {
        let one = |(index, port, content): &(usize, Port, Content)| {
            let rows = if *content == Content::PixelMask || self.texts == Texts::AsManyAsImages { images } else { 1 };
            let open = |axis: usize| match (axis, content) {
                (0, _) => rows,
                (1, Content::PixelMask) => size.height_px as usize,
                (_, Content::PixelMask) => size.width_px as usize,
                _ => self.text_length,
            };
            let shape: Vec<usize> =
                (0..port.dims.len()).map(|axis| port.fixed(axis).unwrap_or_else(|| open(axis))).collect();
            let last = shape.len().saturating_sub(1);
            let values = ArrayD::from_shape_fn(IxDyn(&shape), |place| match content {
                Content::Zeros => 0,
                Content::Ones | Content::PixelMask => 1,
                Content::Positions => {
                    if shape.is_empty() {
                        0
                    } else {
                        place[last] as i64
                    }
                }
            });
            Feed { port: *index, values }
        };
        self.ports.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use ort::value::TensorElementType;

    use super::*;

    fn constants(ports: &[(&str, &[i64])], texts: Texts, text_length: usize) -> Constants {
        let port = |(index, (name, dims)): (usize, &(&str, &[i64]))| {
            let kind = Some(TensorElementType::Int64);
            (index + 1, Port { name: (*name).to_owned(), kind, dims: dims.to_vec() }, Content::of(name).unwrap())
        };
        Constants { ports: ports.iter().enumerate().map(port).collect(), texts, text_length }
    }

    #[test]
    fn fixed_dimensions_are_kept_and_open_ones_filled() {
        let ports: [(&str, &[i64]); 4] = [
            ("input_ids", &[-1, -1]),
            ("attention_mask", &[-1, 77]),
            ("position_ids", &[1, -1]),
            ("pixel_mask", &[-1, -1, -1]),
        ];
        let size = Size::new(6, 4);
        let shapes = |texts| -> Vec<Vec<usize>> {
            constants(&ports, texts, 8).feeds(3, size).iter().map(|f| f.values.shape().to_vec()).collect()
        };
        assert_eq!(shapes(Texts::One), [vec![1, 8], vec![1, 77], vec![1, 8], vec![3, 4, 6]]);
        assert_eq!(shapes(Texts::AsManyAsImages), [vec![3, 8], vec![3, 77], vec![1, 8], vec![3, 4, 6]]);
        let feeds = constants(&ports, Texts::One, 3).feeds(1, size);
        assert_eq!(feeds[2].values.iter().copied().collect::<Vec<_>>(), [0, 1, 2]);
        assert!(feeds[0].values.iter().all(|v| *v == 0) && feeds[1].values.iter().all(|v| *v == 1));
        assert_eq!(feeds[0].port, 1);
    }

    #[test]
    fn without_a_text_there_is_one_way() {
        assert_eq!(constants(&[], Texts::One, 8).ways().len(), 1);
        assert_eq!(constants(&[("pixel_mask", &[-1, -1, -1])], Texts::One, 8).ways().len(), 1);
        assert_eq!(constants(&[("input_ids", &[-1, -1])], Texts::One, 8).ways().len(), 6);
    }

    #[test]
    fn inputs_of_other_names_are_unknown() {
        assert_eq!(Content::of("bool_masked_pos"), None);
    }
}
