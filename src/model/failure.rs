//! What the runtime's words mean. It reports nearly everything as a sentence, so sentences are matched, in
//! one table for calls and one for loading; each entry was seen in the wild or in the runtime's source.

use super::ModelError;

/// What a failed call means for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Terminated,
    OutOfMemory,
    DeviceLost,
}

/// Lower-case fragments, the first that occurs decides. Device loss stands before memory: a poisoned device
/// also fails to allocate.
const CALLS: [(&str, Meaning); 24] = [
    ("terminate flag being set", Meaning::Terminated),
    ("illegal memory access", Meaning::DeviceLost),
    ("unspecified launch failure", Meaning::DeviceLost),
    ("launch timed out", Meaning::DeviceLost),
    ("device-side assert", Meaning::DeviceLost),
    ("uncorrectable ecc error", Meaning::DeviceLost),
    ("misaligned address", Meaning::DeviceLost),
    ("driver shutting down", Meaning::DeviceLost),
    ("no cuda-capable device", Meaning::DeviceLost),
    ("cuda-capable device(s) is/are busy", Meaning::DeviceLost),
    ("initialization error", Meaning::DeviceLost),
    ("gpu is lost", Meaning::DeviceLost),
    ("device lost", Meaning::DeviceLost),
    ("device removed", Meaning::DeviceLost),
    ("cudaerrorillegaladdress", Meaning::DeviceLost),
    ("cudaerrorlaunchfailure", Meaning::DeviceLost),
    ("cudaerrorunknown", Meaning::DeviceLost),
    ("failed to allocate memory", Meaning::OutOfMemory),
    ("out of memory", Meaning::OutOfMemory),
    ("smaller than requested bytes", Meaning::OutOfMemory),
    ("bad_alloc", Meaning::OutOfMemory),
    ("alloc_failed", Meaning::OutOfMemory),
    ("allocation_failed", Meaning::OutOfMemory),
    ("cudaerrormemoryallocation", Meaning::OutOfMemory),
];

/// `cudaError_t` after which every later call of the process fails too, from the CUDA runtime's headers:
/// driver gone (3, 4), no or unusable device (46, 100, 101), ECC and NVLink (214, 220), and the kernel faults
/// that poison a context (700, 702, 709, 710, 714 to 719), unknown (999).
const STICKY_CUDA: [u32; 19] =
    [3, 4, 46, 100, 101, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 802, 999];

/// `cudaErrorMemoryAllocation`.
const CUDA_OUT_OF_MEMORY: u32 = 2;

/// The error of a call, from what the runtime says.
pub(super) fn classify(text: &str) -> ModelError {
    let text = plain(text);
    let lower = text.to_lowercase();
    let by_words = || CALLS.iter().find(|(fragment, _)| lower.contains(fragment)).map(|(_, meaning)| *meaning);
    match by_number(&lower).or_else(by_words) {
        Some(Meaning::Terminated) => ModelError::Terminated,
        Some(Meaning::OutOfMemory) => ModelError::OutOfMemory(text),
        Some(Meaning::DeviceLost) => ModelError::DeviceLost(text),
        None => ModelError::Failed(text),
    }
}

/// `CUDA failure 719: ...` and `CUDA error 719`.
fn by_number(lower: &str) -> Option<Meaning> {
    let rest = ["cuda failure ", "cuda error "].iter().find_map(|p| lower.split_once(p)).map(|(_, rest)| rest)?;
    let digits: &str = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
    match digits.parse().ok()? {
        CUDA_OUT_OF_MEMORY => Some(Meaning::OutOfMemory),
        n if STICKY_CUDA.contains(&n) => Some(Meaning::DeviceLost),
        _ => None,
    }
}

/// Lower-case fragments of what loading a graph says, with the cause and the remedy for a person.
const LOADS: [(&str, &str); 12] = [
    ("protobuf parsing failed", "the file is no complete ONNX graph: cut short or damaged; fetch it again"),
    (
        "unsupported model ir version",
        "the graph is newer than this runtime library: fetch a newer library, or export the model with an older `onnx` package",
    ),
    (
        "under development and support for this is limited",
        "the graph uses a newer opset than this runtime library knows: export it with a lower opset, or use a newer library",
    ),
    (
        "escapes",
        "its external weights lie outside the model's folder, which is refused: put them beside the graph and export or save it anew",
    ),
    (
        "absolute path not allowed",
        "its external weights are named by an absolute path, which is refused: put them beside the graph and export or save it anew",
    ),
    (
        "external data",
        "its external weights are missing or damaged: the file of weights must lie beside the graph under the name it was saved with",
    ),
    (
        "external initializer",
        "its external weights are missing or damaged: the file of weights must lie beside the graph under the name it was saved with",
    ),
    (
        "getfilelength",
        "its external weights are missing: the file of weights must lie beside the graph under the name it was saved with",
    ),
    (
        "is not a registered function/op",
        "the graph uses an operator that this runtime library does not have: export it without custom operators",
    ),
    (
        "no op registered for",
        "the graph uses an operator that this runtime library does not have: export it without custom operators",
    ),
    (
        "could not find an implementation for",
        "this device has no kernel for an operator of the graph: try --device cpu, or export the model in fp32",
    ),
    ("modelproto does not have a graph", "the file holds no graph: cut short or damaged; fetch it again"),
];

/// Cause and remedy of a graph that does not load, followed by the runtime's own words.
pub(super) fn explain_load(text: &str) -> String {
    let text = plain(text);
    let lower = text.to_lowercase();
    match LOADS.iter().find(|(fragment, _)| lower.contains(fragment)) {
        Some((_, cause)) => format!("{cause} (the runtime says: {text})"),
        None => format!("the runtime refuses it: {text}"),
    }
}

/// The runtime's sentence on one line, without the place in its source, which nobody here can use.
fn plain(text: &str) -> String {
    let mut rest = text;
    let mut kept = String::new();
    // A place reads `/onnxruntime_src/<file>:<line> <function>(<types>) `.
    while let Some((before, after)) = rest.split_once("/onnxruntime_src/") {
        kept.push_str(before);
        match after.split_once(") ") {
            Some((_, sentence)) => rest = sentence,
            None => {
                rest = after;
                break;
            }
        }
    }
    kept.push_str(rest);
    kept.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> &'static str {
        match classify(text) {
            ModelError::Terminated => "terminated",
            ModelError::OutOfMemory(_) => "memory",
            ModelError::DeviceLost(_) => "lost",
            ModelError::Failed(_) => "failed",
        }
    }

    #[test]
    fn real_sentences_of_the_runtime_are_understood() {
        for (text, expected) in [
            ("Exiting due to terminate flag being set to true.", "terminated"),
            (
                "Non-zero status code returned while running Conv node. Name:'/conv1/Conv' Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Failed to allocate memory for requested buffer of size 1073741824",
                "memory",
            ),
            ("bfc_arena.cc:358 Available memory of 12582912 is smaller than requested bytes of 51380224", "memory"),
            (
                "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=box ; expr=cublasCreate(&cublas_handle_)",
                "memory",
            ),
            ("CUDA failure 2: out of memory ; GPU=0 ; hostname=box ; expr=cudaMalloc((void**)&p, size)", "memory"),
            ("CUDNN failure 4001: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0", "memory"),
            ("CUDNN failure 4: CUDNN_STATUS_ALLOC_FAILED ; GPU=0", "memory"),
            ("std::bad_alloc", "memory"),
            ("CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; expr=cudaMemcpyAsync", "lost"),
            ("CUDA failure 719: unspecified launch failure ; GPU=0 ; hostname=box", "lost"),
            ("CUDA failure 999: unknown error ; GPU=0 ; hostname=box ; expr=cudaSetDevice(device_id)", "lost"),
            ("CUDA failure 100: no CUDA-capable device is detected ; GPU=-1", "lost"),
            ("CUDA failure 702: the launch timed out and was terminated ; GPU=0", "lost"),
            ("CUDA error cudaErrorIllegalAddress:an illegal memory access was encountered", "lost"),
            ("CUDA failure 1: invalid argument ; GPU=0", "failed"),
            (
                "Got invalid dimensions for input: images for the following indices\n index: 0 Got: 8 Expected: 1",
                "failed",
            ),
            ("CUDNN failure 3000: CUDNN_STATUS_NOT_SUPPORTED ; GPU=0", "failed"),
        ] {
            assert_eq!(kind(text), expected, "{text}");
        }
    }

    #[test]
    fn a_lost_device_is_not_taken_for_a_lack_of_memory() {
        assert_eq!(kind("CUDA failure 719: unspecified launch failure ; then failed to allocate memory"), "lost");
    }

    #[test]
    fn a_graph_that_does_not_load_is_told_with_cause_and_words() {
        let text = explain_load("Load model from /m/model.onnx failed:Protobuf parsing failed.");
        assert!(text.contains("cut short or damaged") && text.contains("Protobuf parsing failed"), "{text}");
        let ir = "Load model from /m failed:/onnxruntime_src/onnxruntime/core/graph/model.cc:256 \
                  onnxruntime::Model::Model(onnx::ModelProto&&, const onnxruntime::ModelOptions&) Unsupported model IR \
                  version: 99, max supported IR version: 13\n";
        let text = explain_load(ir);
        assert!(text.contains("fetch a newer library") && !text.contains("onnxruntime_src"), "{text}");
        assert!(text.ends_with("(the runtime says: Load model from /m failed:Unsupported model IR version: 99, max supported IR version: 13)"), "{text}");
        assert!(explain_load("External data path validation failed for initializer: w. Error: Absolute path not allowed for external data location").contains("absolute path, which is refused"));
        assert!(explain_load("something new").contains("the runtime refuses it: something new"));
    }
}
