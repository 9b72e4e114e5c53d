//! Which device computes. CUDA is tried by opening a session of a built-in graph on it, so that a fault of
//! the device is never taken for a fault of the model, and a run never believes in a GPU that it does not use.

use std::path::Path;

use ort::ep::{self, ArenaExtendStrategy, ExecutionProviderDispatch};
use ort::session::Session;
use ort::session::builder::{AutoDevicePolicy, SessionBuilder};

use super::elf;
use super::library::{self, Runtime};
use crate::config::{CudnnSearch, Device, GpuConfig};
use crate::error::Error;
use crate::printable;

/// One of these is there where an NVIDIA driver is loaded; the last is WSL's.
const DRIVER_SIGNS: [&str; 4] = ["/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"];

/// What the runtime library loads for CUDA, from beside itself.
const PROVIDER_LIBRARIES: [&str; 2] = ["libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so"];

/// `y = Identity(x)`, x of one f32: ONNX, IR 8, opset 13. The smallest graph that makes the runtime open a device.
const PROBE: &[u8] = b"\x08\x08\x3a\x37\x0a\x10\x0a\x01x\x12\x01y\x22\x08Identity\x12\x01p\x5a\x0f\x0a\x01x\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01\x62\x0f\x0a\x01y\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01\x42\x04\x0a\x00\x10\x0d";

/// The device that sessions run on, after the choice was made. Stored with the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectiveDevice {
    /// `cpu`, or `cuda:` and the number of the device.
    pub word: String,
    /// Why it is not the one that would be faster. One line, to be logged by the caller.
    pub note: Option<String>,
    /// `None` is the CPU.
    cuda: Option<Cuda>,
    /// Threads of a session on the host that does not share the pool of all others.
    own_threads: Option<usize>,
    /// Tensors of calls lie where the device reads and writes by itself.
    bound: bool,
}

/// How sessions use a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cuda {
    number: u32,
    search: CudnnSearch,
    max_workspace: bool,
    /// Most that the arena of a session may grow to.
    arena_bytes: Option<u64>,
}

impl EffectiveDevice {
    /// The CPU.
    pub fn cpu(note: Option<String>) -> Self {
        Self { word: "cpu".to_owned(), note, cuda: None, own_threads: None, bound: false }
    }

    fn cuda(number: u32, gpu: &GpuConfig) -> Self {
        let cuda = Cuda { number, search: gpu.cudnn_search, max_workspace: gpu.cudnn_max_workspace, arena_bytes: None };
        Self { word: format!("cuda:{number}"), note: None, cuda: Some(cuda), own_threads: None, bound: true }
    }

    /// The same for sessions whose arena may grow to `arena_bytes`. Nothing changes on the CPU.
    pub(super) fn with_arena(&self, arena_bytes: Option<u64>) -> Self {
        Self { cuda: self.cuda.map(|cuda| Cuda { arena_bytes, ..cuda }), ..self.clone() }
    }

    /// The same for sessions that compute with so many threads of their own; `None` for the pool that all share.
    pub(super) fn with_own_threads(&self, own_threads: Option<usize>) -> Self {
        Self { own_threads, ..self.clone() }
    }

    /// The same, with the tensors of calls in memory of the runtime's allocators, as on a GPU. On the host that gains
    /// nothing: it is how the tests come that way without one.
    pub fn bound(&self) -> Self {
        Self { bound: true, ..self.clone() }
    }

    /// True where the tensors of calls lie in memory that the device reads and writes by itself.
    pub(super) fn is_bound(&self) -> bool {
        self.bound
    }

    /// Number of the CUDA device.
    pub fn cuda_number(&self) -> Option<u32> {
        self.cuda.map(|cuda| cuda.number)
    }

    /// The arena of its sessions, in the words of the runtime's run options.
    pub(super) fn arena_word(&self) -> String {
        self.cuda.map_or_else(|| "cpu:0".to_owned(), |cuda| format!("gpu:{}", cuda.number))
    }

    /// True for a CUDA device, which is faster with fp16.
    pub fn is_cuda(&self) -> bool {
        self.cuda.is_some()
    }
}

/// Decides where sessions run.
///
/// # Errors
/// A CUDA device was asked for and cannot be had; the message names what is missing.
pub fn choose(runtime: &Runtime, wanted: Device, gpu: &GpuConfig) -> Result<EffectiveDevice, Error> {
    let cuda = |number| EffectiveDevice::cuda(number, gpu);
    match wanted {
        Device::Cpu => Ok(EffectiveDevice::cpu(None)),
        Device::Cuda(number) => match try_cuda(runtime, &cuda(number)) {
            Ok(()) => Ok(cuda(number)),
            Err(why) => Err(Error::StartUp(format!("cuda:{number} cannot be used: {why}"))),
        },
        Device::Auto => {
            let outcome = if has_driver() {
                try_cuda(runtime, &cuda(0))
            } else {
                Err("no NVIDIA driver on this machine".to_owned())
            };
            Ok(match outcome {
                Ok(()) => cuda(0),
                Err(why) => EffectiveDevice::cpu(Some(format!("using the CPU, many times slower than a GPU: {why}"))),
            })
        }
    }
}

/// True where `wanted` means CUDA. Asks for the runtime library only where that decides: with `auto`, and a driver
/// on this machine.
///
/// # Errors
/// The runtime library cannot be had.
pub fn is_cuda(
    wanted: Device,
    gpu: &GpuConfig,
    runtime: impl FnOnce() -> Result<Runtime, Error>,
) -> Result<bool, Error> {
    match wanted {
        Device::Cpu => Ok(false),
        Device::Cuda(_) => Ok(true),
        Device::Auto if has_driver() => Ok(choose(&runtime()?, wanted, gpu)?.is_cuda()),
        Device::Auto => Ok(false),
    }
}

/// A builder with everything that is the same for all sessions.
pub(super) fn builder(runtime: &Runtime, device: &EffectiveDevice) -> ort::Result<SessionBuilder> {
    // Memory patterns are kept per input shape, and the last batch of a page has another: off.
    let builder = Session::builder(&runtime.env)?.with_memory_pattern(false)?.with_log_level(library::level())?;
    match device.cuda {
        // Said aloud, because the default policy may choose a device of its own.
        None => {
            let builder = builder.with_auto_device(AutoDevicePolicy::PreferCPU)?;
            match device.own_threads {
                None => Ok(builder),
                Some(threads) => Ok(builder
                    .with_independent_thread_pool()?
                    .with_intra_threads(threads)?
                    .with_intra_op_spinning(false)?),
            }
        }
        // Weights outside the arena: inside, they pin its regions, and it can never shrink.
        Some(cuda) => Ok(builder.with_device_allocated_initializers()?.with_execution_providers([provider(cuda)])?),
    }
}

/// A session of the built-in graph: the device is there, and its allocators can be had.
///
/// # Errors
/// The runtime cannot open it there.
pub(super) fn probe(runtime: &Runtime, device: &EffectiveDevice) -> ort::Result<Session> {
    builder(runtime, device)?.commit_from_memory(PROBE)
}

fn has_driver() -> bool {
    DRIVER_SIGNS.iter().any(|sign| Path::new(sign).exists())
}

fn try_cuda(runtime: &Runtime, device: &EffectiveDevice) -> Result<(), String> {
    for name in PROVIDER_LIBRARIES {
        let path = runtime.path.with_file_name(name);
        if path.is_file() && elf::is_cut_short(&path).unwrap_or(false) {
            return Err(format!(
                "{} is cut short; fetch it again with scripts/fetch-runtime.sh --cuda",
                printable::path(&path)
            ));
        }
    }
    preload_neighbours(&runtime.path);
    match probe(runtime, device) {
        Ok(_) => Ok(()),
        Err(error) => Err(explain(error.message(), &runtime.path)),
    }
}

/// CUDA's libraries may lie beside the runtime library, where the loader does not look. One that does not load
/// is reported by the runtime when it needs it.
fn preload_neighbours(library: &Path) {
    let Some(folder) = library.parent() else { return };
    for name in ep::cuda::CUDA_DYLIBS.iter().chain(ep::cuda::CUDNN_DYLIBS) {
        let path = folder.join(name);
        if path.is_file() && ort::util::preload_dylib(&path).is_err() {
            log::debug!("{}: cannot be preloaded", printable::path(&path));
        }
    }
}

/// The provider's settings. Memory grows by what is asked for, so that it plateaus; convolution algorithms come
/// from cuDNN's heuristics unless told otherwise, because the exhaustive search costs up to a second for each new
/// batch size; no TF32, so that results equal the CPU's within the tolerances of a recipe.
fn provider(cuda: Cuda) -> ExecutionProviderDispatch {
    let search = match cuda.search {
        CudnnSearch::Heuristic => ep::cuda::ConvAlgorithmSearch::Heuristic,
        CudnnSearch::Exhaustive => ep::cuda::ConvAlgorithmSearch::Exhaustive,
        CudnnSearch::Default => ep::cuda::ConvAlgorithmSearch::Default,
    };
    let provider = ep::CUDA::default()
        .with_device_id(i32::try_from(cuda.number).unwrap_or(i32::MAX))
        .with_arena_extend_strategy(ArenaExtendStrategy::SameAsRequested)
        .with_conv_algorithm_search(search)
        .with_conv_max_workspace(cuda.max_workspace)
        .with_tf32(false);
    match cuda.arena_bytes {
        Some(bytes) => provider.with_memory_limit(usize::try_from(bytes).unwrap_or(usize::MAX)),
        None => provider,
    }
    .build()
    .error_on_failure()
}

/// The cause of a CUDA provider that does not start, from the runtime's words.
fn explain(text: &str, library: &Path) -> String {
    if text.contains("not enabled in this build") {
        return format!(
            "this runtime library is built without CUDA: {}; fetch the other with scripts/fetch-runtime.sh --cuda",
            printable::path(library)
        );
    }
    if let Some((before, _)) = text.split_once(": cannot open shared object file") {
        let name = before.rsplit([' ', '\n', '\'', '"']).next().unwrap_or(before);
        return format!(
            "the library {name} is missing; this runtime needs CUDA 13 and cuDNN 9 (put their libraries beside {} or on \
             the loader's path)",
            printable::path(library)
        );
    }
    let driver = if has_driver() { "" } else { "; there is no NVIDIA driver on this machine" };
    format!("the runtime says: {}{driver}", text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_cuda_is_named_with_the_remedy() {
        let text = explain("CUDA execution provider is not enabled in this build. ", Path::new("/r/libonnxruntime.so"));
        assert!(text.contains("built without CUDA: /r/libonnxruntime.so"), "{text}");
        assert!(text.contains("scripts/fetch-runtime.sh --cuda"), "{text}");
    }

    #[test]
    fn the_missing_library_is_named_and_not_the_one_that_wanted_it() {
        let text = explain(
            "/onnxruntime_src/onnxruntime/core/session/provider_bridge_ort.cc:1778 onnxruntime::Provider& \
             onnxruntime::ProviderLibrary::Get() [ONNXRuntimeError] : 1 : FAIL : Failed to load library \
             /r/libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: cannot open shared object file: No such \
             file or directory",
            Path::new("/r/libonnxruntime.so"),
        );
        assert!(text.starts_with("the library libcublasLt.so.13 is missing"), "{text}");
        assert!(text.contains("needs CUDA 13 and cuDNN 9") && text.contains("beside /r/libonnxruntime.so"), "{text}");
    }

    #[test]
    fn other_words_are_passed_on() {
        let text =
            explain("CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version", Path::new("/r"));
        assert!(text.contains("driver version is insufficient"), "{text}");
    }
}
