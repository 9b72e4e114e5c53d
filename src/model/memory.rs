//! Host memory for the tensors of calls. A GPU copies from page-locked memory at the speed of its bus and without the
//! host's help; any other memory is copied twice. Page-locked memory is the runtime's own (`CudaPinned`): what is
//! locked stays locked, so it is taken once per buffer and used again.

use std::sync::{Arc, Mutex, PoisonError};

use ndarray::{Array4, ArrayRef, ArrayView4};
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::Session;
use ort::value::Tensor;

use super::device::{self, EffectiveDevice};
use super::library::Runtime;
use crate::geometry::Size;

/// Where the buffers of tensors lie. The default is ordinary memory. Cheap to clone.
#[derive(Clone, Default)]
pub struct HostMemory(Option<Arc<Source>>);

/// An allocator and the session that it belongs to. Not a model's session: those are opened anew when memory runs out,
/// and buffers must outlive that.
struct Source {
    /// Before its session, which it must not outlive. The runtime's allocators are not for several threads at once.
    allocator: Mutex<Allocator>,
    _session: Session,
}

/// A batch of images before a call.
pub trait ImageBatch {
    /// `[n, 3, height, width]`, normalised.
    fn images(&self) -> ArrayView4<'_, f32>;

    /// The same as a value of the runtime, where it is one.
    fn lent(&self) -> Option<Lent<'_>> {
        None
    }
}

impl ImageBatch for Array4<f32> {
    fn images(&self) -> ArrayView4<'_, f32> {
        ArrayRef::view(self)
    }
}

/// A batch that a session can take as it is.
pub struct Lent<'a>(pub(super) &'a Tensor<f32>);

/// Memory for one batch after the other.
pub struct Block {
    values: Values,
    images: usize,
    size: Size,
    /// After the values, which must not outlive it.
    memory: HostMemory,
}

enum Values {
    Ordinary(Vec<f32>),
    /// `[images, 3, height, width]`: the runtime lets nobody change the shape of a value.
    Runtime(Tensor<f32>),
}

impl HostMemory {
    /// Memory that `device` reads by itself, where it is a GPU. Ordinary memory where that cannot be had: it is slower and
    /// nothing else.
    pub(super) fn open(runtime: &Runtime, device: &EffectiveDevice) -> Self {
        if !device.is_bound() {
            return Self::default();
        }
        match Source::open(runtime, device) {
            Ok(source) => {
                log::info!("tensors of calls are filled in {}", word(device));
                Self(Some(Arc::new(source)))
            }
            Err(error) => {
                log::warn!("no {} for tensors, which makes calls slower: {}", word(device), error.message());
                Self::default()
            }
        }
    }

    /// An empty block of it.
    pub fn block(&self) -> Block {
        Block { values: Values::Ordinary(Vec::new()), images: 0, size: Size::new(0, 0), memory: self.clone() }
    }

    /// `None` where there is nothing to be had.
    fn allocate(&self, images: usize, size: Size) -> Option<Tensor<f32>> {
        let source = self.0.as_ref()?;
        let allocator = source.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        match Tensor::new(&allocator, dims(images, size)) {
            Ok(tensor) => Some(tensor),
            Err(error) => {
                log::warn!("a tensor of {images} images lies in ordinary memory: {}", error.message());
                None
            }
        }
    }
}

impl Source {
    fn open(runtime: &Runtime, device: &EffectiveDevice) -> ort::Result<Self> {
        let session = device::probe(runtime, device)?;
        let allocator = Allocator::new(&session, info(device, MemoryType::CPUInput)?)?;
        Ok(Self { allocator: Mutex::new(allocator), _session: session })
    }
}

impl Block {
    /// Room for so many images of that size, one after the other. What is in it is not said.
    pub fn room(&mut self, images: usize, size: Size) -> &mut [f32] {
        let values = values_of(images, size);
        let fits = match &self.values {
            Values::Ordinary(all) => all.len() >= values && self.memory.0.is_none(),
            Values::Runtime(_) => (self.images, self.size) == (images, size),
        };
        if !fits {
            // The old one first: both at once would be memory for nothing.
            self.values = Values::Ordinary(Vec::new());
            self.values = match self.memory.allocate(images, size) {
                Some(tensor) => Values::Runtime(tensor),
                None => {
                    // Not asked again for every batch.
                    self.memory = HostMemory::default();
                    Values::Ordinary(vec![0.0; values])
                }
            };
        }
        (self.images, self.size) = (images, size);
        match &mut self.values {
            Values::Ordinary(all) => &mut all[..values],
            Values::Runtime(tensor) => tensor.extract_tensor_mut().1,
        }
    }
}

impl ImageBatch for Block {
    /// What [`Self::room`] was made for.
    fn images(&self) -> ArrayView4<'_, f32> {
        let values = match &self.values {
            Values::Ordinary(all) => &all[..values_of(self.images, self.size)],
            Values::Runtime(tensor) => tensor.extract_tensor().1,
        };
        ArrayView4::from_shape(dims(self.images, self.size), values)
            .unwrap_or_else(|_| unreachable!("there is room for as many values as the shape has"))
    }

    fn lent(&self) -> Option<Lent<'_>> {
        match &self.values {
            Values::Ordinary(_) => None,
            Values::Runtime(tensor) => Some(Lent(tensor)),
        }
    }
}

fn dims(images: usize, size: Size) -> [usize; 4] {
    [images, 3, size.height_px as usize, size.width_px as usize]
}

fn values_of(images: usize, size: Size) -> usize {
    3 * images * size.pixels() as usize
}

/// The memory that `device` reads and writes by itself, in the runtime's words; the host's own where it computes.
pub(super) fn info(device: &EffectiveDevice, kind: MemoryType) -> ort::Result<MemoryInfo<'static>> {
    match device.cuda_number() {
        Some(number) => {
            let number = i32::try_from(number).unwrap_or(i32::MAX);
            MemoryInfo::new(AllocationDevice::CUDA_PINNED, number, AllocatorType::Device, kind)
        }
        None => MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::Default),
    }
}

/// That memory in words, for logs.
pub(super) fn word(device: &EffectiveDevice) -> &'static str {
    if device.is_cuda() { "page-locked memory" } else { "memory of the runtime" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Device;
    use crate::model::library;

    fn runtime() -> Runtime {
        library::load(None, Device::Cpu, 2).unwrap_or_else(|e| panic!("run scripts/test.sh ({e})"))
    }

    const SIZE: Size = Size::new(2, 1);

    #[test]
    fn a_block_of_the_runtime_keeps_its_place_takes_other_shapes_and_outlives_who_gave_it() {
        let memory = HostMemory::open(&runtime(), &EffectiveDevice::cpu(None).bound());
        assert!(memory.0.is_some(), "the allocator of the host is always there");
        let mut block = memory.block();
        drop(memory);
        assert_eq!(block.images().dim(), (0, 3, 0, 0));
        block.room(1, SIZE).copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(block.lent().unwrap().0.shape().to_vec(), [1, 3, 1, 2]);
        let place = block.images().as_ptr();
        block.room(1, SIZE)[1] = 9.0;
        assert_eq!((block.images().sum(), block.images().as_ptr()), (28.0, place));
        for (images, size) in [(5, SIZE), (1, Size::new(1, 2))] {
            block.room(images, size).fill(1.0);
            assert_eq!(block.images().dim(), (images, 3, size.height_px as usize, size.width_px as usize));
            assert_eq!(block.images().sum(), (6 * images) as f32);
        }
    }

    #[test]
    fn where_nothing_is_bound_memory_is_ordinary_and_used_again() {
        let mut block = HostMemory::open(&runtime(), &EffectiveDevice::cpu(None)).block();
        block.room(2, SIZE).fill(1.0);
        let place = block.images().as_ptr();
        assert_eq!(block.room(1, SIZE).len(), 6);
        assert_eq!((block.images().dim(), block.images().as_ptr()), ((1, 3, 1, 2), place));
        assert!(block.lent().is_none());
    }
}
