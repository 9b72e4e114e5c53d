//! Calls as on a GPU, with tensors in memory of the runtime's allocators and outputs bound to it: bit for bit what they
//! are without, whatever shapes come after one another.

use super::onnx::{F16, F32, Graph};
use super::refused::folder_with;
use super::*;

/// The fact that a model tells where its outputs are bound.
const OUTPUTS_IN: &str = "outputs in";

fn devices() -> [EffectiveDevice; 2] {
    let plain = EffectiveDevice::cpu(None);
    [plain.clone(), plain.bound()]
}

fn assert_bound(models: [&dyn Loaded; 2], what: &str) {
    let tells = models.map(|model| model.describe().iter().any(|(name, _)| *name == OUTPUTS_IN));
    assert_eq!(tells, [false, true], "{what}");
}

fn detector_on(device: &EffectiveDevice, model: &str) -> Box<dyn Detector> {
    let files = locate(&tiny(model), Precision::Auto, false).unwrap();
    detector::load(&files, &detect_config(selection(0.3)), &runtime(), device).unwrap().0
}

fn embedder_on(device: &EffectiveDevice, model: &Path) -> VectorModel {
    let files = locate(model, Precision::Auto, false).unwrap();
    let config = EmbedConfig { model: model.into(), precision: Precision::Auto, crop_fit: None, normalize: None };
    VectorModel::load(&files, &config, &runtime(), device).unwrap().0
}

/// Images that are unlike each other and unlike those of another `call`.
fn pattern(call: usize, images: usize, size: Size) -> Array4<f32> {
    Array4::from_shape_fn((images, 3, size.height_px as usize, size.width_px as usize), |(i, c, y, x)| {
        ((x * 7 + y * 13 + c * 29 + i * 31 + call * 17) % 64) as f32 / 32.0 - 1.0
    })
}

#[test]
fn detectors_find_the_same_with_bound_outputs_for_every_shape_prompt_and_batch() {
    for model in
        ["detr-tiny", "deformable_detr-tiny", "grounding-dino-tiny", "owlvit-tiny", "yolo-v8-tiny", "yolos-tiny"]
    {
        let [mut plain, mut bound] = devices().map(|device| detector_on(&device, model));
        assert_bound([plain.as_ref(), bound.as_ref()], model);
        let sizes = match plain.input().fit {
            Fit::Scale { .. } => [Size::new(96, 64), Size::new(64, 128)],
            _ => [plain.input().size; 2],
        };
        // A batch, another shape, a short last batch, more labels than before, and after the session was opened anew.
        let calls =
            [(3, 0, "a cat."), (2, 1, "a cat."), (1, 0, "a dog."), (1, 0, "a cat. a dog. a big tree."), (2, 0, "x.")];
        for (number, (images, shape, prompt)) in calls.into_iter().enumerate() {
            if number == 4 {
                bound.reopen().unwrap();
                assert_bound([plain.as_ref(), bound.as_ref()], model);
            }
            let batch = pattern(number, images, sizes[shape]);
            let asked = vec![Asked { prompt: Some(prompt), valid: sizes[shape] }; images];
            let [theirs, ours] = [&mut plain, &mut bound].map(|detector| {
                let found = detector.detect(&batch, &asked, -1.0).unwrap();
                found.into_iter().map(Result::unwrap).collect::<Vec<Found>>()
            });
            assert!(theirs.iter().all(|found| !found.candidates.is_empty()), "{model}");
            assert_eq!(ours, theirs, "{model}, call {number}");
        }
    }
}

#[test]
fn vectors_are_the_same_with_bound_outputs_in_every_type_and_order_of_axes() {
    let plain = Graph::reshape(&[-1, 48]);
    let last = vec![-1, 4, 4, 3];
    for (input_type, input_dims, output_dims) in [
        (F32, plain.input_dims.clone(), vec![-1, 48]),
        (F16, plain.input_dims.clone(), vec![-1, 48]),
        (F16, plain.input_dims.clone(), vec![-1, -1]),
        (F32, last.clone(), vec![-1, 48]),
        (F16, last, vec![-1, -1]),
    ] {
        let what = format!("type {input_type}, {input_dims:?} to {output_dims:?}");
        let folder = folder_with(&Graph { input_type, input_dims, output_dims, ..plain.clone() }.encoded());
        let [mut plain, mut bound] = devices().map(|device| embedder_on(&device, folder.path()));
        assert_bound([&plain, &bound], &what);
        for (number, images) in [3, 2, 3, 1, 5].into_iter().enumerate() {
            if number == 3 {
                bound.reopen().unwrap();
            }
            let batch = pattern(number, images, Size::new(4, 4));
            let [theirs, ours] = [&mut plain, &mut bound]
                .map(|model| model.embed(&batch).unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>());
            assert_eq!(ours, theirs, "{what}, call {number}");
            // As many different numbers as there are pixels: nothing is left of another call.
            assert_eq!(ours.concat().iter().sum::<f32>(), batch.sum(), "{what}, call {number}");
        }
    }
}

#[test]
fn a_graph_of_four_images_is_filled_up_with_bound_outputs_too() {
    let graph = Graph { input_dims: vec![4, 3, 4, 4], output_dims: vec![4, 48], ..Graph::reshape(&[-1, 48]) };
    let folder = folder_with(&graph.encoded());
    let [mut plain, mut bound] = devices().map(|device| embedder_on(&device, folder.path()));
    assert_bound([&plain, &bound], "a fixed batch");
    for images in [4, 1, 3] {
        let batch = pattern(images, images, Size::new(4, 4));
        let [theirs, ours] = [&mut plain, &mut bound].map(|model| model.embed(&batch).unwrap());
        assert_eq!(ours.len(), images);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert_eq!(ours.as_ref().unwrap(), theirs.as_ref().unwrap());
        }
    }
}

#[test]
fn a_terminated_call_is_one_and_a_refused_one_leaves_the_next_alone() {
    let [mut plain, mut bound] = devices().map(|device| detector_on(&device, "yolo-v8-tiny"));
    let wrong = bound.detect(&Array4::zeros((1, 3, 8, 8)), &[], 0.3);
    assert!(matches!(wrong, Err(ModelError::Failed(_))), "a tensor of another size");
    let batch = one_batch(&["red", "gradient"]);
    let [theirs, ours] = [&mut plain, &mut bound].map(|detector| detections(detector.as_mut(), &batch, 0.05));
    assert_eq!(
        ours.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
        theirs.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    );
    bound.terminator().terminate();
    assert!(matches!(bound.detect(&batch, &[], 0.3), Err(ModelError::Terminated)));
}
