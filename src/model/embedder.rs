//! Embedders: any graph with an image in and a vector out. `croprow.toml` or `preprocessor_config.json` beside
//! it says how it is fed; nothing is guessed, because a nearly right input gives nearly right vectors.

use ndarray::{Array4, ArrayViewD, Axis};

use super::card::{Card, EmbedderCard, Pooling};
use super::device::EffectiveDevice;
use super::files::ModelFiles;
use super::input::{self, Draft};
use super::library::Runtime;
use super::port::Port;
use super::session::{Graph, nothing_more};
use super::{Embedder, ModelError, Terminator};
use crate::config::EmbedConfig;
use crate::error::Error;
use crate::recipe::{Fit, ImageInput};
use crate::row::{RowCode, RowError};

/// Goes into the recipe; raised when the same graph and image give other vectors than before.
pub const ADAPTER_VERSION: u32 = 1;

/// Names that exporters give to a pooled vector, the most specific first.
const VECTOR_NAMES: [&str; 7] =
    ["image_embeds", "pooler_output", "embedding", "embeddings", "image_embedding", "sentence_embedding", "features"];

/// The name of a transformer's tokens.
const TOKENS_NAME: &str = "last_hidden_state";

/// An embedder that is loaded.
pub struct VectorModel {
    graph: Graph,
    input: ImageInput,
    output: usize,
    pooling: Pooling,
    dim: usize,
    normalize: bool,
}

impl VectorModel {
    /// Loads the embedder and calls it with blank images. The second value is a line for the user, where there
    /// is something to say.
    ///
    /// # Errors
    /// The graph or what lies beside it cannot be used; the message names the file, what was found and what
    /// helps.
    pub fn load(
        files: &ModelFiles,
        config: &EmbedConfig,
        runtime: &Runtime,
        device: &EffectiveDevice,
    ) -> Result<(Self, Option<String>), Error> {
        let card = Card::read(files)?;
        let mut graph = Graph::open(&files.onnx, runtime, device, card.input.name.as_deref())?;
        let input = input_of(&graph, files, &card, config)?;
        graph.try_blank(input.size, &nothing_more)?;
        let (output, pooling) = choose(&graph.outputs, &card.embedder).map_err(|why| {
            graph.refuse(format!(
                "{why}; outputs: {}; croprow.toml beside it can name one ([embedder] output, pooling)",
                graph.describe_outputs()
            ))
        })?;
        let dim = dim_of(&graph.outputs[output].dims, pooling);
        let note = graph.settle_batch(input.size, output, &nothing_more)?;
        let normalize = config.normalize.or(card.embedder.normalize).unwrap_or(false);
        Ok((Self { graph, input, output, pooling, dim, normalize }, note))
    }
}

impl Embedder for VectorModel {
    fn input(&self) -> &ImageInput {
        &self.input
    }

    fn dim(&self) -> usize {
        self.dim
    }

    fn fixed_batch(&self) -> Option<usize> {
        self.graph.fixed_batch
    }

    fn take_one_by_one(&mut self) {
        self.graph.fixed_batch = Some(1);
    }

    fn terminator(&self) -> Terminator {
        self.graph.terminator()
    }

    fn embed(&mut self, batch: &Array4<f32>) -> Result<Vec<Result<Vec<f32>, RowError>>, ModelError> {
        let (pooling, dim, normalize) = (self.pooling, self.dim, self.normalize);
        self.graph.run(batch, &nothing_more, self.output, |image| {
            let vector = pooled(image, pooling);
            if vector.len() != dim {
                return Err(RowError::new(
                    RowCode::Model,
                    format!("the embedder gave {} numbers, not {dim}", vector.len()),
                ));
            }
            finished(vector, normalize)
        })
    }
}

fn input_of(graph: &Graph, files: &ModelFiles, card: &Card, config: &EmbedConfig) -> Result<ImageInput, Error> {
    let input = input::input_of(graph, files, card, Draft::default(), Fit::Squash)?;
    if matches!(input.fit, Fit::Scale { .. }) {
        return Err(graph.refuse("its preprocessor gives pictures no fixed size: write `[input]` with width, height and crop_fit into croprow.toml beside it"));
    }
    let input = match config.crop_fit {
        Some(crop_fit) => input::with_crop_fit(input, crop_fit),
        None => input,
    };
    if input::cuts_too_much(&input) {
        return Err(graph.refuse("the short side after resizing is smaller than the part that is cut out of it"));
    }
    Ok(input)
}

/// The output that holds the vector, and how it is pooled: what the card says, else by name and rank.
fn choose(outputs: &[Port], card: &EmbedderCard) -> Result<(usize, Pooling), String> {
    if let Some(name) = &card.output {
        let index =
            outputs.iter().position(|o| &o.name == name).ok_or_else(|| format!("no output is called {name}"))?;
        return pooling_of(&outputs[index], card.pooling).map(|pooling| (index, pooling));
    }
    let usable: Vec<(usize, Pooling)> = outputs
        .iter()
        .enumerate()
        .filter_map(|(i, o)| pooling_of(o, card.pooling).ok().map(|pooling| (i, pooling)))
        .collect();
    let named = |name: &str| usable.iter().copied().find(|(i, _)| outputs[*i].name == name);
    let ranked = |rank: usize| {
        let mut those = usable.iter().copied().filter(|(i, _)| outputs[*i].dims.len() == rank);
        those.next().filter(|_| those.next().is_none())
    };
    let vector = VECTOR_NAMES.iter().find_map(|name| named(name).filter(|(i, _)| outputs[*i].dims.len() == 2));
    let has_rank = |rank: usize| usable.iter().any(|(i, _)| outputs[*i].dims.len() == rank);
    let chosen = vector.or_else(|| {
        if has_rank(2) { ranked(2) } else { named(TOKENS_NAME).or_else(|| ranked(3)).or_else(|| ranked(4)) }
    });
    chosen.ok_or_else(|| "no output that is clearly the vector".to_owned())
}

/// How the output is pooled. The batch is its first dimension.
fn pooling_of(output: &Port, wanted: Option<Pooling>) -> Result<Pooling, String> {
    let rank = output.dims.len();
    if !output.is_float() {
        return Err(format!("output {} is not f32 or f16", output.name));
    }
    let pooling = match (wanted, rank) {
        (Some(pooling), _) => pooling,
        (None, 2) => Pooling::Vector,
        (None, 3) => Pooling::Cls,
        (None, _) => Pooling::Mean,
    };
    let fits = match pooling {
        Pooling::Vector | Pooling::Pooled => rank == 2,
        Pooling::Cls => rank == 3,
        Pooling::Mean => rank == 3 || rank == 4,
    };
    if fits {
        Ok(pooling)
    } else {
        Err(format!("output {} of rank {rank} does not fit pooling {pooling:?}", output.name))
    }
}

fn dim_of(dims: &[i64], pooling: Pooling) -> usize {
    let axis = match (pooling, dims.len()) {
        (Pooling::Cls, _) | (Pooling::Mean, 3) => 2,
        _ => 1,
    };
    dims.get(axis).and_then(|d| usize::try_from(*d).ok()).unwrap_or(0)
}

/// One image's output, `[d]`, `[tokens, d]` or `[d, h, w]`, as one vector. Means are summed in f64.
fn pooled(image: ArrayViewD<'_, f32>, pooling: Pooling) -> Vec<f32> {
    let mean =
        |values: ArrayViewD<'_, f32>| (values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64) as f32;
    match (pooling, image.ndim()) {
        (Pooling::Vector | Pooling::Pooled, _) => image.iter().copied().collect(),
        (Pooling::Cls, _) if image.len_of(Axis(0)) > 0 => image.index_axis(Axis(0), 0).iter().copied().collect(),
        (Pooling::Cls, _) => Vec::new(),
        (Pooling::Mean, 2) => image.axis_iter(Axis(1)).map(mean).collect(),
        (Pooling::Mean, _) => image.axis_iter(Axis(0)).map(mean).collect(),
    }
}

/// The vector as it is stored. The norm is summed in f64, so that long vectors keep a length of 1.
fn finished(mut vector: Vec<f32>, normalize: bool) -> Result<Vec<f32>, RowError> {
    if vector.iter().any(|v| !v.is_finite()) {
        return Err(RowError::new(
            RowCode::NanOutput,
            "the embedder gave NaN or infinity for this image; try an fp32 export of the model",
        ));
    }
    let norm = vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    if norm == 0.0 {
        return Err(RowError::new(RowCode::NanOutput, "the embedder gave a vector of zeros for this image"));
    }
    if normalize {
        for v in &mut vector {
            *v = (f64::from(*v) / norm) as f32;
        }
    }
    Ok(vector)
}

#[cfg(test)]
mod tests {
    use ndarray::{arr1, arr2, arr3};

    use super::*;

    fn output(name: &str, dims: &[i64]) -> Port {
        Port { name: name.to_owned(), kind: Some(ort::value::TensorElementType::Float32), dims: dims.to_vec() }
    }

    fn chosen(outputs: &[Port]) -> Option<(&str, Pooling)> {
        choose(outputs, &EmbedderCard::default()).ok().map(|(i, p)| (outputs[i].name.as_str(), p))
    }

    #[test]
    fn a_pooled_vector_is_preferred_to_tokens() {
        let clip = [
            output("last_hidden_state", &[1, 50, 768]),
            output("pooler_output", &[1, 768]),
            output("image_embeds", &[1, 512]),
        ];
        assert_eq!(chosen(&clip), Some(("image_embeds", Pooling::Vector)));
        assert_eq!(chosen(&clip[..2]), Some(("pooler_output", Pooling::Vector)));
        assert_eq!(chosen(&clip[..1]), Some(("last_hidden_state", Pooling::Cls)));
    }

    #[test]
    fn the_only_output_of_its_kind_needs_no_name() {
        assert_eq!(chosen(&[output("x", &[1, 768])]), Some(("x", Pooling::Vector)));
        assert_eq!(chosen(&[output("x", &[1, 257, 384])]), Some(("x", Pooling::Cls)));
        assert_eq!(chosen(&[output("x", &[1, 1280, 7, 7])]), Some(("x", Pooling::Mean)));
        assert_eq!(chosen(&[output("a", &[1, 768]), output("b", &[1, 10])]), None);
        assert_eq!(
            chosen(&[output("embedding", &[1, 768]), output("logits", &[1, 10])]),
            Some(("embedding", Pooling::Vector))
        );
        assert_eq!(chosen(&[output("scalar", &[1])]), None);
    }

    #[test]
    fn the_card_names_the_output_and_is_checked() {
        let outputs = [output("tokens", &[1, 257, 384]), output("logits", &[1, 10])];
        let card = |output: &str, pooling| EmbedderCard { output: Some(output.to_owned()), pooling, normalize: None };
        assert_eq!(choose(&outputs, &card("tokens", Some(Pooling::Mean))), Ok((0, Pooling::Mean)));
        assert!(choose(&outputs, &card("tokens", Some(Pooling::Vector))).unwrap_err().contains("rank 3"));
        assert!(choose(&outputs, &card("token", None)).unwrap_err().contains("no output is called token"));
        let mut half = outputs.clone();
        half[0].kind = Some(ort::value::TensorElementType::Int64);
        assert!(choose(&half, &card("tokens", None)).unwrap_err().contains("not f32 or f16"));
    }

    #[test]
    fn tokens_and_maps_are_pooled_along_the_right_axis() {
        let tokens = arr2(&[[1.0, 2.0, 3.0], [3.0, 4.0, 8.0]]).into_dyn();
        assert_eq!(pooled(tokens.view(), Pooling::Cls), [1.0, 2.0, 3.0]);
        assert_eq!(pooled(tokens.view(), Pooling::Mean), [2.0, 3.0, 5.5]);
        let map = arr3(&[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]]).into_dyn();
        assert_eq!(pooled(map.view(), Pooling::Mean), [3.0, 1.0, 1.0]);
        assert_eq!(pooled(arr1(&[1.0, 2.0]).into_dyn().view(), Pooling::Vector), [1.0, 2.0]);
    }

    #[test]
    fn the_dimension_is_read_from_the_axis_that_is_kept() {
        assert_eq!(dim_of(&[1, 1280], Pooling::Vector), 1280);
        assert_eq!(dim_of(&[1, 257, 384], Pooling::Cls), 384);
        assert_eq!(dim_of(&[1, 257, 384], Pooling::Mean), 384);
        assert_eq!(dim_of(&[1, 1280, 7, 7], Pooling::Mean), 1280);
    }

    #[test]
    fn a_vector_gets_length_one_only_where_that_is_asked_for() {
        assert_eq!(finished(vec![3.0, 4.0], true).unwrap(), [0.6, 0.8]);
        assert_eq!(finished(vec![3.0, 4.0], false).unwrap(), [3.0, 4.0]);
        let tiny = finished(vec![3e-30, 4e-30], true).unwrap();
        assert!((tiny[0] - 0.6).abs() < 1e-6, "{tiny:?}");
    }

    #[test]
    fn nan_infinity_and_zeros_fail_the_image() {
        for bad in [vec![1.0, f32::NAN], vec![f32::INFINITY, 1.0], vec![0.0, 0.0], vec![]] {
            assert_eq!(finished(bad, true).unwrap_err().code, RowCode::NanOutput);
        }
    }
}
