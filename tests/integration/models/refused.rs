//! Graphs that croprow cannot feed, does not understand, or must treat with care.

use super::onnx::Graph;
use super::*;

/// A folder with one graph and a card that feeds it.
pub(crate) fn folder_with(graph: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.onnx"), graph).unwrap();
    fs::write(
        folder.path().join("croprow.toml"),
        "[input]\nresize = \"bilinear\"\nmean = [0, 0, 0]\nstd = [1, 1, 1]\n",
    )
    .unwrap();
    folder
}

#[test]
fn a_graph_that_cannot_be_loaded_is_refused_with_cause_path_and_remedy() {
    let whole = fs::read(tiny("yolo-v8-tiny").join("model.onnx")).unwrap();
    for (graph, words) in [
        (whole[..whole.len() / 2].to_vec(), "cut short or damaged; fetch it again"),
        (b"not a graph at all".to_vec(), "cut short or damaged; fetch it again"),
        (Graph { ir_version: 99, ..Graph::reshape(&[-1, 48]) }.encoded(), "fetch a newer library"),
        (Graph { opset: 99, ..Graph::reshape(&[-1, 48]) }.encoded(), "newer opset than this runtime library knows"),
        (Graph::add("weights.bin").encoded(), "its external weights are missing or damaged"),
        (Graph::add("short.bin").encoded(), "its external weights are missing or damaged"),
        (Graph::add("../../etc/passwd").encoded(), "outside the model's folder, which is refused"),
        (Graph::add("/etc/passwd").encoded(), "absolute path, which is refused"),
        (Graph::add("link.bin").encoded(), "outside the model's folder, which is refused"),
    ] {
        let folder = folder_with(&graph);
        fs::write(folder.path().join("short.bin"), [0; 100]).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("link.bin")).unwrap();
        let text = embedder(folder.path()).err().unwrap();
        assert!(text.contains(words), "{text}");
        assert!(text.contains(&folder.path().join("model.onnx").display().to_string()), "{text}");
    }
}

#[test]
fn external_weights_beside_the_graph_are_found_also_through_the_links_of_a_hub_cache() {
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("snapshots/0/onnx");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(cache.path().join("blobs")).unwrap();
    fs::write(cache.path().join("blobs/a"), Graph::add("model.onnx_data").encoded()).unwrap();
    fs::write(cache.path().join("blobs/b"), [0; 192]).unwrap();
    std::os::unix::fs::symlink("../../../blobs/a", snapshot.join("model.onnx")).unwrap();
    std::os::unix::fs::symlink("../../../blobs/b", snapshot.join("model.onnx_data")).unwrap();
    let card = "[input]\nresize = \"bilinear\"\nmean = [0, 0, 0]\nstd = [1, 1, 1]\n";
    fs::write(cache.path().join("snapshots/0/croprow.toml"), card).unwrap();
    assert_eq!(embedder(&cache.path().join("snapshots/0")).unwrap().0.dim(), 3);
}

#[test]
fn a_graph_that_is_fed_otherwise_is_refused_with_names_and_shapes() {
    let plain = Graph::reshape(&[-1, 48]);
    for (graph, words) in [
        (Graph { input_type: onnx::F64, ..plain.clone() }, "x f64 [?, 3, 4, 4]"),
        (Graph { extra_input: true, ..plain.clone() }, "prompt i64 [?, 16]"),
        (Graph { input_dims: vec![-1, 48], ..plain.clone() }, "x f32 [?, 48]"),
        (Graph { input_dims: vec![-1, 3, -1, -1], ..plain.clone() }, "width, height missing"),
        (Graph { input_dims: vec![-1, 1, 4, 12], ..plain }, "x f32 [?, 1, 4, 12]"),
    ] {
        let text = embedder(folder_with(&graph.encoded()).path()).err().unwrap();
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn an_output_that_does_not_follow_the_batch_is_refused() {
    let text = embedder(folder_with(&Graph::reshape(&[-1, 24]).encoded()).path()).err().unwrap();
    assert!(text.contains("for 1 blank images its output is y f32 [2, 24]"), "{text}");
}

#[test]
fn a_graph_that_hides_a_fixed_batch_is_fed_one_by_one() {
    let (mut model, note) = embedder(folder_with(&Graph::reshape(&[1, -1]).encoded()).path()).unwrap();
    assert_eq!(model.fixed_batch(), Some(1));
    assert!(note.unwrap().contains("takes one image at a time"));
    assert_eq!(model.embed(&Array4::from_elem((1, 3, 4, 4), 0.5)).unwrap().len(), 1);
}

#[test]
fn a_graph_of_four_images_is_filled_with_blank_ones() {
    let graph = Graph { input_dims: vec![4, 3, 4, 4], ..Graph::reshape(&[-1, 48]) };
    let (mut model, _) = embedder(folder_with(&graph.encoded()).path()).unwrap();
    assert_eq!((model.fixed_batch(), model.dim()), (Some(4), 48));
    let vectors = model.embed(&Array4::from_shape_fn((3, 3, 4, 4), |(i, ..)| i as f32)).unwrap();
    assert_eq!(vectors.len(), 3);
    assert_eq!(vectors[0].as_ref().unwrap_err().code, RowCode::NanOutput, "a vector of zeros");
    assert_eq!(vectors[2].as_ref().unwrap(), &[2.0; 48]);
}

#[test]
fn a_detector_without_labels_or_with_an_unclear_output_is_refused_with_its_outputs() {
    let names = ("names", "{0: 'cat'}");
    let unclear = Graph { metadata: vec![names], input_dims: vec![-1, 3, 4, 4], ..Graph::reshape(&[-1, 8, 6]) };
    let other_task = Graph { metadata: vec![names, ("task", "segment")], ..unclear.clone() };
    let unread = Graph { metadata: vec![("names", "cat, dog")], ..unclear.clone() };
    for (graph, words) in [
        (Graph::reshape(&[-1, 48]), "no labels in its metadata"),
        (unclear, "more than one layout has shape [b, 8, 6] with 1 classes"),
        (other_task, "task `segment`"),
        (unread, "`names` is not understood"),
        (Graph { metadata: vec![names], ..Graph::reshape(&[-1, 48]) }, "no output that reads as detections"),
    ] {
        let text = yolo(folder_with(&graph.encoded()).path()).err().unwrap();
        assert!(text.contains(words) && text.contains("model.onnx"), "{text}");
    }
}

#[test]
fn a_card_settles_what_the_graph_leaves_open() {
    let graph =
        Graph { input_dims: vec![-1, 3, -1, -1], output_dims: vec![-1, -1, -1], ..Graph::reshape(&[-1, 16, 6]) };
    let folder = folder_with(&graph.encoded());
    let card =
        "[detector]\nlayout = \"v5\"\nlabels = [\"cat\"]\n[input]\nname = \"x\"\nwidth = 8\nheight = 4\npad_fill = 0\n";
    fs::write(folder.path().join("croprow.toml"), card).unwrap();
    let (mut detector, _) = yolo(folder.path()).unwrap();
    assert_eq!((detector.input().size, detector.input().fit), (Size::new(8, 4), Fit::Pad { fill: 0 }));
    let found = detections(detector.as_mut(), &Array4::zeros((2, 3, 4, 8)), 0.3);
    assert!(found.len() == 2 && found.iter().all(|f| f.as_ref().unwrap().candidates.is_empty()));
    for (wrong, words) in [
        ("width = 8", "width"),
        ("layuot = \"v5\"", "layuot"),
        ("[input]\nname = \"y\"", "which the graph does not have"),
    ] {
        fs::write(folder.path().join("croprow.toml"), format!("{wrong}\n[detector]\nlabels = [\"cat\"]\n")).unwrap();
        let text = yolo(folder.path()).err().unwrap();
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn without_a_gpu_auto_is_the_cpu_with_a_reason_and_cuda_is_an_error() {
    let runtime = runtime();
    let begun = Instant::now();
    let auto = device::choose(&runtime, Device::Auto, &GPU).unwrap();
    if auto.word == "cpu" {
        assert!(auto.note.unwrap().starts_with("using the CPU"));
        let text = device::choose(&runtime, Device::Cuda(0), &GPU).unwrap_err().to_string();
        assert!(text.starts_with("cuda:0 cannot be used"), "{text}");
    }
    assert_eq!(device::choose(&runtime, Device::Cpu, &GPU).unwrap(), EffectiveDevice::cpu(None));
    assert!(begun.elapsed() < REFUSED_WITHIN);
}
