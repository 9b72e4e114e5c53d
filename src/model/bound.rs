//! Calls through the runtime's `IoBinding`: outputs that are read come into memory that the device writes by itself,
//! outputs that are not read stay where they are. Knows no family of models.
//!
//! The runtime's rules, which this file keeps: what is bound outlives the call; an output that was bound without a
//! size keeps that of the first call, and has to be bound again for another; nothing is read before the device is
//! through with it; an allocator must not outlive its session.

use ort::memory::{Allocator, MemoryInfo, MemoryType};
use ort::session::{IoBinding, RunOptions, Session, SessionInputValue, SessionOutputs};
use ort::value::{DynTensor, DynValue, Outlet, TensorElementType, ValueType};

use super::device::EffectiveDevice;
use super::memory;

/// What one session needs for such calls. Dropped before the session.
pub(super) struct Bound {
    binding: IoBinding,
    /// What the outputs are bound for now.
    now: Option<Wanted>,
    outputs: Vec<Target>,
    allocator: Allocator,
    info: MemoryInfo<'static>,
}

/// Outputs of a call, by their places, and its images.
#[derive(PartialEq, Eq)]
struct Wanted {
    outputs: Vec<usize>,
    images: usize,
}

/// Where an output goes.
struct Target {
    name: String,
    /// Its type and its dimensions after the first, where the graph fixes them and the first is that of the images.
    known: Option<(TensorElementType, Vec<i64>)>,
}

impl Bound {
    /// For calls of `session`; `image` is its input of images.
    ///
    /// # Errors
    /// The device's provider has no such memory.
    pub(super) fn open(session: &Session, device: &EffectiveDevice, image: &str) -> ort::Result<Self> {
        let info = memory::info(device, MemoryType::CPUOutput)?;
        let batch = session.inputs().iter().find(|input| input.name() == image).and_then(batch_of);
        let outputs = session.outputs().iter().map(|output| Target::of(output, batch.as_ref())).collect();
        Ok(Self {
            binding: session.create_binding()?,
            now: None,
            outputs,
            allocator: Allocator::new(session, info.clone())?,
            info,
        })
    }

    /// Where inputs that have to be converted are written.
    pub(super) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Calls `session` with `feeds` for so many images, and hands the values of `outputs` to `read`. Inputs are copied
    /// to the device before this returns, and what it held of them is given back.
    ///
    /// # Errors
    /// The call failed.
    pub(super) fn call<T>(
        &mut self,
        session: &mut Session,
        feeds: &[(String, SessionInputValue<'_>)],
        (outputs, images): (&[usize], usize),
        options: &RunOptions,
        read: impl FnOnce(&[&DynValue]) -> ort::Result<T>,
    ) -> ort::Result<T> {
        let result = self.bind(feeds, outputs, images).and_then(|()| {
            let given = session.run_binding_with_options(&self.binding, options)?;
            self.binding.synchronize_outputs()?;
            read(&self.values(&given, outputs)?)
        });
        // What they point to is the caller's, and the device's copies would be memory beside those of the next call.
        self.binding.clear_inputs();
        if result.is_err() {
            self.now = None;
        }
        result
    }

    fn bind(&mut self, feeds: &[(String, SessionInputValue<'_>)], outputs: &[usize], images: usize) -> ort::Result<()> {
        for (name, value) in feeds {
            self.binding.bind_input(name, value)?;
        }
        let wanted = Some(Wanted { outputs: outputs.to_vec(), images });
        let anew = self.now != wanted;
        if anew {
            self.now = None;
            self.binding.clear_outputs();
        }
        for target in outputs.iter().map(|output| &self.outputs[*output]) {
            match &target.known {
                Some((kind, inner)) if anew => {
                    let dims: Vec<i64> = std::iter::once(images as i64).chain(inner.iter().copied()).collect();
                    self.binding.bind_output(&target.name, DynTensor::new(&self.allocator, *kind, dims)?)?;
                }
                Some(_) => {}
                None => self.binding.bind_output_to_device(&target.name, &self.info)?,
            }
        }
        self.now = wanted;
        self.binding.synchronize_inputs()
    }

    fn values<'v>(&self, given: &'v SessionOutputs<'_>, outputs: &[usize]) -> ort::Result<Vec<&'v DynValue>> {
        let value = |output: &usize| {
            let name = &self.outputs[*output].name;
            given.get(name).ok_or_else(|| ort::Error::new(format!("the runtime gave no output {name}")))
        };
        outputs.iter().map(value).collect()
    }
}

impl Target {
    fn of(output: &Outlet, batch: Option<&Axis>) -> Self {
        let known = match output.dtype() {
            ValueType::Tensor { ty, shape, dimension_symbols } => {
                inner(shape, dimension_symbols, batch).map(|inner| (*ty, inner))
            }
            _ => None,
        };
        Self { name: output.name().to_owned(), known }
    }
}

/// The first dimension of an input or output.
struct Axis {
    length: i64,
    symbol: String,
}

impl Axis {
    fn of(dims: &[i64], symbols: &[String]) -> Self {
        Self { length: dims.first().copied().unwrap_or(-1), symbol: symbols.first().cloned().unwrap_or_default() }
    }

    fn is_like(&self, other: &Self) -> bool {
        self.length == other.length && (self.length > 0 || (!self.symbol.is_empty() && self.symbol == other.symbol))
    }
}

fn batch_of(image: &Outlet) -> Option<Axis> {
    match image.dtype() {
        ValueType::Tensor { shape, dimension_symbols, .. } => Some(Axis::of(shape, dimension_symbols)),
        _ => None,
    }
}

/// The dimensions after the first, where they are fixed and the first is that of the images: one of another name may be
/// anything, as a number of detections.
fn inner(dims: &[i64], symbols: &[String], batch: Option<&Axis>) -> Option<Vec<i64>> {
    let (_, inner) = dims.split_first()?;
    let known = Axis::of(dims, symbols).is_like(batch?) && inner.iter().all(|d| *d > 0);
    known.then(|| inner.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_output_whose_size_cannot_be_another_is_made_beforehand() {
        let known = |dims: &[i64], symbol: &str, images: &Axis| inner(dims, &[symbol.to_owned()], Some(images));
        let free = Axis { length: -1, symbol: "batch".to_owned() };
        assert_eq!(known(&[-1, 384], "batch", &free), Some(vec![384]));
        assert_eq!(known(&[-1, 384], "detections", &free), None, "as many as there are");
        assert_eq!(known(&[-1, -1, 384], "batch", &free), None);
        assert_eq!(known(&[1, 384], "", &free), None);
        assert_eq!(known(&[-1, 384], "", &Axis { length: -1, symbol: String::new() }), None, "nothing is said");
        let four = Axis { length: 4, symbol: String::new() };
        assert_eq!(known(&[4, 900, 256], "", &four), Some(vec![900, 256]));
        assert_eq!(known(&[1, 384], "", &four), None);
        assert_eq!(known(&[], "", &four), None);
        assert_eq!(inner(&[-1, 384], &[], None), None);
    }
}
