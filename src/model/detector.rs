//! Which adapter a detector's graph gets: by `model_type` of `config.json`, by what `croprow.toml` says, by the
//! metadata of Ultralytics, else by the names of its inputs and outputs.

use super::Detector;
use super::card::{Card, Family};
use super::detr::{Detr, SIGMOID_FAMILIES, SOFTMAX_FAMILIES};
use super::device::EffectiveDevice;
use super::files::{ModelFiles, TOKENIZER};
use super::grounding_dino::GroundingDino;
use super::hub::HubConfig;
use super::input::{Draft, input_of};
use super::library::Runtime;
use super::owl::Owl;
use super::session::Graph;
use super::text::Text;
use super::transformer::MaskPort;
use super::yolo::Yolo;
use crate::config::DetectConfig;
use crate::error::Error;
use crate::geometry::Size;
use crate::printable;
use crate::recipe::{Filter, Fit, ImageInput, Labels};

/// Mean and deviation of ImageNet, which the detection transformers were trained with.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];

/// Loads a detector and calls it with blank images. The second value is a line for the user, where there is
/// something to say.
///
/// # Errors
/// The graph or what lies beside it cannot be used; the message names the file, what was found and what helps.
pub fn load(
    files: &ModelFiles,
    detect: &DetectConfig,
    runtime: &Runtime,
    device: &EffectiveDevice,
) -> Result<(Box<dyn Detector>, Option<String>), Error> {
    let card = Card::read(files)?;
    let config = HubConfig::read(files)?;
    let graph = Graph::open(&files.onnx, runtime, device, card.input.name.as_deref())?;
    let family = family_of(&graph, &card, &config)?;
    if detect.labels == Labels::Phrases && family != Family::GroundingDino {
        return Err(Error::Usage("--labels phrases is the rule of GroundingDINO; this is another detector".to_owned()));
    }
    if detect.prompt.is_some() && matches!(family, Family::Yolo | Family::Detr) {
        return Err(Error::Usage(format!(
            "--prompt: the detector {} finds its own fixed classes and reads no text; take --prompt none",
            printable::path(&files.onnx)
        )));
    }
    if detect.shape_step_px.is_some() && MaskPort::of(&graph).is_none() {
        return Err(Error::Usage(format!(
            "--shape-step fills tensors up, and the detector {} has no pixel_mask that tells it where a picture ends; take \
             --shape-step none",
            printable::path(&files.onnx)
        )));
    }
    let stepped = |input| stepped(input, files, detect.shape_step_px);
    Ok(match family {
        Family::Yolo => boxed(Yolo::load(graph, &card)?),
        Family::Detr => {
            let input = input_of(&graph, files, &card, Draft::default(), Fit::Corner)?;
            boxed(Detr::load(graph, stepped(input)?, &card, &config)?)
        }
        Family::GroundingDino => {
            let input = input_of(&graph, files, &card, grounding_dino_habit(), Fit::Corner)?;
            let text = text_of(&graph, files)?;
            boxed(GroundingDino::load(graph, stepped(input)?, text, &config, detect)?)
        }
        Family::Owl => {
            let input = input_of(&graph, files, &card, Draft::default(), Fit::Corner)?;
            let text = text_of(&graph, files)?;
            boxed(Owl::load(graph, input, text, detect)?)
        }
    })
}

/// # Errors
/// Pictures of every size have the same tensor already.
fn stepped(input: ImageInput, files: &ModelFiles, step_px: Option<u32>) -> Result<ImageInput, Error> {
    match (step_px, input.fit) {
        (None, _) => Ok(input),
        (Some(step_px), Fit::Scale { shortest_px, longest_px, multiple_px, .. }) => {
            let fit = Fit::Scale { shortest_px, longest_px, multiple_px, step_px };
            Ok(ImageInput { fit, ..input })
        }
        (Some(_), _) => Err(Error::Usage(format!(
            "--shape-step: every picture has {}x{} pixels in the detector {} already; take --shape-step none",
            input.size.width_px,
            input.size.height_px,
            printable::path(&files.onnx)
        ))),
    }
}

fn boxed<D: Detector + 'static>((detector, note): (D, Option<String>)) -> (Box<dyn Detector>, Option<String>) {
    (Box::new(detector), note)
}

/// The family that `model_type` names.
pub(super) fn by_type(config: &HubConfig) -> Option<Family> {
    match config.model_type.as_deref()? {
        "grounding-dino" | "mm-grounding-dino" => Some(Family::GroundingDino),
        "owlvit" | "owlv2" => Some(Family::Owl),
        other if SOFTMAX_FAMILIES.contains(&other) || SIGMOID_FAMILIES.contains(&other) => Some(Family::Detr),
        _ => None,
    }
}

fn family_of(graph: &Graph, card: &Card, config: &HubConfig) -> Result<Family, Error> {
    if let Some(family) = card.detector.family {
        return Ok(family);
    }
    let by_type = by_type(config);
    let has = |names: &[&str]| graph.input(names).is_some();
    let two_heads =
        graph.output(&["logits", "pred_logits"]).is_some() && graph.output(&["pred_boxes", "boxes"]).is_some();
    let by_ports = || match (has(&["input_ids"]), two_heads) {
        (true, true) if has(&["token_type_ids", "text_token_mask"]) => Some(Family::GroundingDino),
        (true, true) => Some(Family::Owl),
        (false, true) => Some(Family::Detr),
        (false, false) if config.model_type.is_none() || graph.metadata("names").is_some() => Some(Family::Yolo),
        _ => None,
    };
    by_type.or_else(by_ports).ok_or_else(|| {
        graph.refuse(format!(
            "no detector that is known{}: `[detector] family` in croprow.toml beside it can be yolo, detr, grounding-dino or \
             owl; inputs: {}; outputs: {}",
            config.model_type.as_ref().map_or_else(String::new, |t| format!(" (its model_type is {t})")),
            graph.describe_inputs(),
            graph.describe_outputs()
        ))
    })
}

/// The values of the published checkpoints, for a graph without its preprocessor's file.
fn grounding_dino_habit() -> Draft {
    Draft {
        size: Some(Size::new(1333, 1333)),
        filter: Some(Filter::Bilinear),
        fit: Some(Fit::Scale { shortest_px: 800, longest_px: 1333, multiple_px: 1, step_px: 1 }),
        mean: Some(MEAN),
        std: Some(STD),
    }
}

fn text_of(graph: &Graph, files: &ModelFiles) -> Result<Text, Error> {
    let path = files.companion(TOKENIZER).ok_or_else(|| {
        graph.refuse("it reads text, and there is no tokenizer.json beside it: fetch it from where the model came from")
    })?;
    Text::load(path).map_err(Error::StartUp)
}
