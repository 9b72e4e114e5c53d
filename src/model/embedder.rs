//! Embedders: any graph with an image in and a vector out. `croprow.toml` or `preprocessor_config.json` beside
//! it says how it is fed; nothing is guessed, because a nearly right input gives nearly right vectors.

use super::card::Card;
use super::constants::Constants;
use super::device::EffectiveDevice;
use super::facts::Facts;
use super::files::ModelFiles;
use super::hub::HubConfig;
use super::input::{self, Draft};
use super::library::Runtime;
use super::memory::ImageBatch;
use super::pooling::{self, Reading};
use super::session::Graph;
use super::{Embedder, ModelError, detector, loaded_graph};
use crate::config::EmbedConfig;
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::{Fit, ImageInput};
use crate::row::{RowCode, RowError};

/// Goes into the recipe; raised when the same graph and image give other vectors than before.
pub const ADAPTER_VERSION: u32 = 2;

/// Smaller patches are the stem of a convolutional or windowed network, as of ConvNeXt and Swin.
const PATCH_LEAST_PX: usize = 8;

/// An embedder that is loaded.
pub struct VectorModel {
    graph: Graph,
    input: ImageInput,
    constants: Constants,
    reading: Reading,
    dim: usize,
    normalize: bool,
    has_patches: bool,
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
        let config_of_hub = HubConfig::read(files)?;
        let mut graph = Graph::open(&files.onnx, runtime, device, card.input.name.as_deref())?;
        if let (Some(_), Some(name)) = (detector::by_type(&config_of_hub), &config_of_hub.model_type) {
            return Err(graph.refuse(format!("this is a detector ({name}): give it as --detector")));
        }
        let input = input_of(&graph, files, &card, config)?;
        let constants = Constants::of(&graph)?.settle(&mut graph, input.size)?;
        let choice = pooling::choose(&graph.outputs, &card.embedder, &config_of_hub)
            .and_then(|reading| reading.dim(&graph.outputs).map(|dim| (reading, dim)));
        let (reading, dim) = choice.map_err(|why| {
            graph.refuse(format!(
                "{why}; outputs: {}; croprow.toml beside it can name one ([embedder] output, pooling)",
                graph.describe_outputs()
            ))
        })?;
        let extra = |images: usize, size: Size| constants.feeds(images, size);
        let note = graph.settle_batch(input.size, reading.output, &extra)?;
        let normalize = config.normalize.or(card.embedder.normalize).unwrap_or(false);
        let has_patches = config_of_hub.patch_px.is_some_and(|px| px >= PATCH_LEAST_PX);
        Ok((Self { graph, input, constants, reading, dim, normalize, has_patches }, note))
    }
}

loaded_graph!(VectorModel);

impl VectorModel {
    fn own_facts(&self) -> Facts {
        let output = &self.graph.outputs[self.reading.output].name;
        vec![
            ("pooling", format!("{} of {output}", self.reading.pooling.word())),
            ("normalize", if self.normalize { "L2" } else { "no" }.to_owned()),
        ]
    }
}

impl Embedder for VectorModel {
    fn dim(&self) -> usize {
        self.dim
    }

    fn has_patches(&self) -> bool {
        self.has_patches
    }

    fn embed(&mut self, batch: &dyn ImageBatch) -> Result<Vec<Result<Vec<f32>, RowError>>, ModelError> {
        let (reading, dim, normalize) = (self.reading, self.dim, self.normalize);
        let constants = &self.constants;
        let extra = |images: usize, size: Size| constants.feeds(images, size);
        self.graph.run(batch, &extra, reading.output, |image| {
            let vector = reading.vector(image);
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
    use super::*;

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
