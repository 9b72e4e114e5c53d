//! `croprow doctor` as a process: what it tells of models that can be used, and of those that cannot.

use std::fs;

use serde_json::Value;

use crate::cli::{call, expect};
use crate::support::root;

const DETECTOR: &str = "tests/data/models/yolo-v8-tiny";
const EMBEDDER: &str = "tests/data/models/dinov3_vit-tiny";

#[test]
fn usable_models_are_told_with_everything_that_decides_and_exit_0() {
    let output = call(&["doctor", "--detector", DETECTOR, "--embedder", EMBEDDER, "--device", "cpu", "--json"]);
    expect(&output, 0);
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["usable"], true);
    assert!(told["runtime"]["library"].as_str().unwrap().starts_with('/'));
    assert_eq!(told["device"]["device"], "cpu");
    for (part, key, words) in [
        ("detector", "family", "yolo, layout v8"),
        ("detector", "labels", "2: red, green"),
        ("detector", "prompts", "not read"),
        ("detector", "batch", "free"),
        ("detector", "input", "32 x 32"),
        ("detector", "fit", "pad: whole picture, the rest grey 114"),
        ("embedder", "graph", "dinov3_vit-tiny/model.onnx"),
        ("embedder", "model_type", "dinov3_vit"),
        ("embedder", "fed_as", "preprocessor_config.json"),
        ("embedder", "inputs", "pixel_values f32 [?, 3, ?, ?]"),
        ("embedder", "pooling", "cls of last_hidden_state"),
        ("embedder", "vector", "32 numbers"),
        ("embedder", "resize", "bilinear"),
        ("embedder", "mean", "0.485 0.456 0.406"),
        ("embedder", "self_test", "equals the original in 1 case"),
    ] {
        let value = told[part][key].as_str().unwrap_or_else(|| panic!("{part} {key}: {told}"));
        assert!(value.contains(words), "{part} {key}: {value}");
    }
    assert_eq!(told["embedder"]["digest"].as_str().unwrap().len(), 64);
    let said = expect(&call(&["doctor", "--embedder", EMBEDDER, "--device", "cpu"]), 0);
    assert!(
        said.contains("  pooling           cls of last_hidden_state\n")
            && said.ends_with("a run can start with this\n")
    );
}

#[test]
fn a_model_that_cannot_be_used_is_told_with_the_remedy_and_exit_1() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("onnx")).unwrap();
    fs::copy(root().join(EMBEDDER).join("model.onnx"), folder.path().join("onnx/model_fp16.onnx")).unwrap();
    let model = folder.path().to_str().unwrap();
    let said = expect(&call(&["doctor", "--embedder", model, "--device", "cpu", "--precision", "fp32"]), 1);
    assert!(said.contains("no fp32 graph in this folder; --precision can be fp16 (onnx/model_fp16.onnx)"), "{said}");
    let said = expect(&call(&["doctor", "--detector", DETECTOR, "--embedder", model, "--device", "cpu"]), 1);
    assert!(said.contains("yolo, layout v8") && said.contains("put its preprocessor_config.json beside it"), "{said}");
    assert!(said.contains("digest") && said.contains("a run cannot start with this"), "{said}");
}

#[test]
fn without_a_runtime_library_the_files_are_told_all_the_same() {
    let output = call(&["doctor", "--embedder", EMBEDDER, "--runtime", "/no/such/library.so", "--json"]);
    expect(&output, 1);
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["usable"], false);
    assert!(told["runtime"]["error"].as_str().unwrap().contains("/no/such/library.so"));
    assert_eq!(told["embedder"]["model_type"], "dinov3_vit");
}
