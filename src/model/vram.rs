//! What sessions may take of a GPU's memory, and what is really taken.
//!
//! The runtime can be held to a limit for its arenas only, and for each session by itself: two at 80 % are 160 %. So
//! the budget is divided: first what no arena covers (the CUDA context, handles and workspaces of cuBLAS and cuDNN,
//! and the weights, which are kept outside the arenas), then the rest evenly. What the libraries allocate for
//! themselves is estimated and not enforced; the figure to trust is the driver's, in `samples.device_bytes`.

use std::env;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

use crate::config::Vram;

/// Context, handles and workspaces: 300 to 500 MiB were seen with CUDA 12 and 13.
const OUTSIDE_BYTES: u64 = 512 << 20;

/// Weights are copied once more while they are loaded, the largest tensor at least; part of the headroom.
const WEIGHTS_FACTOR: f64 = 1.1;

/// A session with a smaller arena could not call most detectors with one image.
const ARENA_LEAST_BYTES: u64 = 256 << 20;

/// Why a budget cannot be divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// What is needed at least.
    pub needed_bytes: u64,
    /// What `--vram` gives.
    pub budget_bytes: u64,
}

/// The most that `vram` allows of a device with `total_bytes`. `None` for a share of an unknown total.
pub fn budget_bytes(vram: Vram, total_bytes: Option<u64>) -> Option<u64> {
    match vram {
        Vram::Bytes(bytes) => Some(total_bytes.map_or(bytes, |total| bytes.min(total))),
        Vram::Share(share) => total_bytes.map(|total| (total as f64 * f64::from(share)) as u64),
    }
}

/// The limit of each session's arena, for sessions with weights of `weights_bytes`. Arenas, weights and what lies
/// outside add up to `budget_bytes` at most.
///
/// # Errors
/// An arena would be too small to be of use.
pub fn arenas(budget_bytes: u64, weights_bytes: &[u64]) -> Result<Vec<u64>, TooSmall> {
    let sessions = weights_bytes.len() as u64;
    let weights = (weights_bytes.iter().sum::<u64>() as f64 * WEIGHTS_FACTOR) as u64;
    let outside = OUTSIDE_BYTES + weights;
    let each = budget_bytes.saturating_sub(outside) / sessions.max(1);
    if each < ARENA_LEAST_BYTES {
        return Err(TooSmall { needed_bytes: outside + sessions * ARENA_LEAST_BYTES, budget_bytes });
    }
    Ok(vec![each; weights_bytes.len()])
}

/// The driver's view of one GPU. Its library is loaded at run time; without a driver there is none.
pub struct Gpu {
    nvml: Nvml,
    index: u32,
}

impl Gpu {
    /// The GPU that CUDA calls `number`. `CUDA_VISIBLE_DEVICES` is followed where it holds numbers; where GPUs differ, CUDA
    /// counts the fastest first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set, and the driver never does.
    pub fn find(number: u32) -> Option<Self> {
        let nvml = Nvml::init().ok()?;
        let index = physical(number, env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())?;
        nvml.device_by_index(index).ok()?;
        Some(Self { nvml, index })
    }

    /// Its memory.
    pub fn total_bytes(&self) -> Option<u64> {
        Some(self.nvml.device_by_index(self.index).ok()?.memory_info().ok()?.total)
    }

    /// Its product name.
    pub fn name(&self) -> Option<String> {
        self.nvml.device_by_index(self.index).ok()?.name().ok()
    }

    /// Memory that this process uses on it; where the driver does not tell processes apart (in containers), all that
    /// is used.
    pub fn used_bytes(&self) -> Option<u64> {
        let device = self.nvml.device_by_index(self.index).ok()?;
        let own = device.running_compute_processes().ok().and_then(|processes| {
            let own = processes.into_iter().find(|p| p.pid == std::process::id())?;
            match own.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            }
        });
        own.or_else(|| device.memory_info().ok().map(|memory| memory.used))
    }
}

/// The driver's number of CUDA's device `number`. `None` for names (UUIDs), which the driver numbers in its own way.
fn physical(number: u32, visible: Option<&str>) -> Option<u32> {
    match visible.map(str::trim).filter(|list| !list.is_empty()) {
        None => Some(number),
        Some(list) => list.split(',').nth(number as usize)?.trim().parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_budget_is_a_share_of_the_device_or_bytes_within_it() {
        assert_eq!(budget_bytes(Vram::Share(0.5), Some(8 * GIB)), Some(4 * GIB));
        assert_eq!(budget_bytes(Vram::Share(0.5), None), None);
        assert_eq!(budget_bytes(Vram::Bytes(6 * GIB), Some(4 * GIB)), Some(4 * GIB));
        assert_eq!(budget_bytes(Vram::Bytes(6 * GIB), None), Some(6 * GIB));
    }

    #[test]
    fn arenas_weights_and_what_lies_outside_never_exceed_the_budget() {
        for budget in [2 * GIB, 6 * GIB, 24 * GIB] {
            for weights in [vec![100 << 20], vec![700 << 20, 90 << 20], vec![0, 0]] {
                let Ok(limits) = arenas(budget, &weights) else { continue };
                let sum = limits.iter().sum::<u64>() + weights.iter().sum::<u64>() + OUTSIDE_BYTES;
                assert!(sum <= budget && sum > budget - budget / 8, "{budget} {weights:?} {limits:?}");
            }
        }
    }

    #[test]
    fn a_budget_without_room_for_both_sessions_is_refused_and_for_one_it_is_not() {
        let weights = [700 << 20, 700 << 20];
        let refused = arenas(2 * GIB, &weights).unwrap_err();
        assert!(refused.needed_bytes > 2 * GIB, "{refused:?}");
        assert!(arenas(2 * GIB, &weights[..1]).is_ok());
    }

    #[test]
    fn devices_are_counted_as_cuda_shows_them() {
        assert_eq!(physical(1, None), Some(1));
        assert_eq!(physical(1, Some("3, 2")), Some(2));
        assert_eq!(physical(2, Some("3,2")), None);
        assert_eq!(physical(0, Some("GPU-8932f937")), None);
        assert_eq!(physical(1, Some(" ")), Some(1));
    }
}
