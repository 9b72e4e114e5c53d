//! One graph in one session: opening it, what it wants and gives, and calling it. Knows no family of models.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ndarray::{Array4, ArrayD, ArrayViewD, Axis, CowArray, Ix4, s};
use ort::session::{RunOptions, Session, SessionInputValue};
use ort::value::{DynValue, TensorElementType};

use super::bound::Bound;
use super::device::{EffectiveDevice, builder};
use super::library::Runtime;
use super::memory::{self, ImageBatch, Lent};
use super::port::{self, Feed, ImagePort, Port};
use super::{ModelError, Terminator, failure};
use crate::error::Error;
use crate::geometry::Size;

/// Images in the call that shows whether the batch is really free. Some graphs declare a free batch and
/// have a fixed one inside.
const BATCH_TRIAL: usize = 2;

/// `kOrtRunOptionsConfigEnableMemoryArenaShrinkage`. It works as an option of a call; as one of the session it does
/// nothing.
const ARENA_SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";

/// A graph that is loaded.
pub(super) struct Graph {
    /// For calls whose outputs come into memory that the device writes by itself. Before the session, which it must not
    /// outlive.
    bound: Option<Bound>,
    /// `None` only while it is opened anew.
    session: Option<Session>,
    runtime: Runtime,
    device: EffectiveDevice,
    options: Arc<RunOptions>,
    /// The same, and the arena gives back what it does not use when the call ends.
    thrifty: Arc<RunOptions>,
    /// The next call is thrifty.
    memory_is_short: bool,
    path: PathBuf,
    /// Its inputs, in the graph's order.
    pub inputs: Vec<Port>,
    /// The one that takes the pixels.
    pub image: ImagePort,
    /// Its outputs, in the graph's order.
    pub outputs: Vec<Port>,
    /// Images per call, where the graph does not leave it open.
    pub fixed_batch: Option<usize>,
}

/// The images of a call, `[n, 3, height, width]`.
pub(super) struct Images<'a> {
    array: CowArray<'a, f32, Ix4>,
    /// The same as a value of the runtime.
    lent: Option<Lent<'a>>,
}

impl<'a> Images<'a> {
    pub(super) fn of(batch: &'a dyn ImageBatch) -> Self {
        Self { array: batch.images().into(), lent: batch.lent() }
    }

    /// How many.
    pub(super) fn len(&self) -> usize {
        self.array.len_of(Axis(0))
    }
}

impl From<Array4<f32>> for Images<'_> {
    fn from(array: Array4<f32>) -> Self {
        Self { array: array.into(), lent: None }
    }
}

/// What the other inputs get, for so many images of that size.
pub(super) type Extra<'a> = &'a dyn Fn(usize, Size) -> Vec<Feed>;

/// For graphs whose only input is the images.
pub(super) fn nothing_more(_: usize, _: Size) -> Vec<Feed> {
    Vec::new()
}

impl Graph {
    /// Loads the graph at `path`, by path so that external weights are found beside it. `image_name` is the
    /// input of the images, where the user names one.
    ///
    /// # Errors
    /// The runtime refuses the graph, or it has no input for images.
    pub(super) fn open(
        path: &Path,
        runtime: &Runtime,
        device: &EffectiveDevice,
        image_name: Option<&str>,
    ) -> Result<Self, Error> {
        let refused = |e: &ort::Error| refused_load(path, e);
        let session = open_session(path, runtime, device)?;
        let options = Arc::new(RunOptions::new().map_err(|e| refused(&e))?);
        let mut thrifty = RunOptions::new().map_err(|e| refused(&e))?;
        thrifty.set(ARENA_SHRINKAGE, device.arena_word()).map_err(|e| refused(&e))?;
        let (inputs, outputs) = (port::inputs_of(&session), port::outputs_of(&session));
        let image = ImagePort::find(&inputs, image_name).map_err(|why| {
            Error::StartUp(format!("model {}: {why}; its inputs: {}", path.display(), port::describe(&inputs)))
        })?;
        let fixed_batch = image.batch;
        Ok(Self {
            bound: device.is_bound().then(|| bind(path, &session, device, &image)).flatten(),
            session: Some(session),
            runtime: runtime.clone(),
            device: device.clone(),
            options,
            thrifty: Arc::new(thrifty),
            memory_is_short: false,
            path: path.to_path_buf(),
            inputs,
            image,
            outputs,
            fixed_batch,
        })
    }

    /// Drops the session, and only then opens another: memory of a session that ran out of it may never come back
    /// otherwise.
    ///
    /// # Errors
    /// As [`Self::open`]; the graph cannot be called any more.
    pub(super) fn reopen(&mut self) -> Result<(), Error> {
        let is_bound = self.bound.take().is_some();
        drop(self.session.take());
        let session = open_session(&self.path, &self.runtime, &self.device)?;
        self.bound = is_bound.then(|| bind(&self.path, &session, &self.device, &self.image)).flatten();
        self.session = Some(session);
        Ok(())
    }

    /// The next call gives back what its arena holds beyond it.
    pub(super) fn give_back_memory(&mut self) {
        self.memory_is_short = true;
    }

    /// An error about this graph.
    pub(super) fn refuse(&self, why: impl std::fmt::Display) -> Error {
        Error::StartUp(format!("model {}: {why}", self.path.display()))
    }

    /// A value of the graph's metadata.
    pub(super) fn metadata(&self, key: &str) -> Option<String> {
        self.session.as_ref()?.metadata().ok()?.custom(key)
    }

    /// Names, types and shapes of the inputs, for messages.
    pub(super) fn describe_inputs(&self) -> String {
        port::describe(&self.inputs)
    }

    /// Names, types and shapes of the outputs, for messages.
    pub(super) fn describe_outputs(&self) -> String {
        port::describe(&self.outputs)
    }

    /// Where outputs come, in words; `None` for ordinary memory.
    pub(super) fn output_memory(&self) -> Option<&'static str> {
        self.bound.as_ref().map(|_| memory::word(&self.device))
    }

    /// Place of the input of the first of these names that the graph has.
    pub(super) fn input(&self, names: &[&str]) -> Option<usize> {
        names.iter().find_map(|name| self.inputs.iter().position(|p| p.name == *name))
    }

    /// Place of the output of the first of these names that the graph has.
    pub(super) fn output(&self, names: &[&str]) -> Option<usize> {
        names.iter().find_map(|name| self.outputs.iter().position(|p| p.name == *name))
    }

    /// Ends the call in flight and all later ones.
    pub(super) fn terminator(&self) -> Terminator {
        let both = [Arc::clone(&self.options), Arc::clone(&self.thrifty)];
        // Setting the flag fails only for a null pointer.
        Terminator::new(move || both.iter().for_each(|options| drop(options.terminate())))
    }

    /// The size of the input: what the graph fixes, else `wanted`.
    ///
    /// # Errors
    /// The two differ.
    pub(super) fn settle_size(&self, wanted: Option<Size>, whose: &str) -> Result<Option<Size>, Error> {
        match wanted {
            Some(size) if !self.image.fits(size) => Err(self.refuse(format!(
                "{whose} asks for {}x{} (width x height), the graph's input is {}",
                size.width_px,
                size.height_px,
                self.inputs[self.image.index].text()
            ))),
            _ => Ok(self.image.fixed_size().or(wanted)),
        }
    }

    /// One call with a blank image, so that a broken graph fails now and not in the middle of the night. The
    /// outputs' dimensions are known afterwards.
    ///
    /// # Errors
    /// The call failed.
    pub(super) fn try_blank(&mut self, size: Size, extra: Extra<'_>) -> Result<(), Error> {
        let images = self.fixed_batch.unwrap_or(1);
        let shapes =
            self.call_blank(images, size, extra).map_err(|e| self.refuse(format!("a blank image fails: {e}")))?;
        for (port, dims) in self.outputs.iter_mut().zip(shapes) {
            port.dims = dims;
        }
        self.try_bound(images, size, extra);
        Ok(())
    }

    /// The graph works; where it does not with bound outputs, it is called without.
    fn try_bound(&mut self, images: usize, size: Size, extra: Extra<'_>) {
        if self.bound.is_none() {
            return;
        }
        let read: Vec<usize> = (0..self.outputs.len()).filter(|o| self.outputs[*o].is_float()).collect();
        let shapes = self.call(&blank(images, size).into(), &extra(images, size), &read, |given| {
            given.iter().map(|values| values.shape().iter().map(|d| *d as i64).collect()).collect::<Vec<Vec<i64>>>()
        });
        let failed = match shapes {
            Ok(shapes) if read.iter().map(|o| &self.outputs[*o].dims).eq(&shapes) => {
                return log::info!(
                    "model {}: its outputs come into {}",
                    self.path.display(),
                    memory::word(&self.device)
                );
            }
            Ok(shapes) => format!("the outputs have the shapes {shapes:?}"),
            Err(error) => error.to_string(),
        };
        log::warn!("model {}: its outputs cannot be bound, which makes calls slower: {failed}", self.path.display());
        self.bound = None;
    }

    /// Finds out whether the batch is really free, after [`Self::try_blank`]: sets `fixed_batch` to 1 where the graph
    /// declares a free one but fails with two images. Then there is something to say, in one line.
    ///
    /// # Errors
    /// Output number `output` has not one entry per image.
    pub(super) fn settle_batch(
        &mut self,
        size: Size,
        output: usize,
        extra: Extra<'_>,
    ) -> Result<Option<String>, Error> {
        let images = self.fixed_batch.unwrap_or(1) as i64;
        if self.outputs[output].dims.first() != Some(&images) {
            return Err(self.refuse(format!(
                "for {images} blank images its output is {}; its first dimension must be the batch",
                self.outputs[output].text()
            )));
        }
        if self.fixed_batch.is_some() {
            return Ok(None);
        }
        if let Ok(shapes) = self.call_blank(BATCH_TRIAL, size, extra)
            && shapes[output].first() == Some(&(BATCH_TRIAL as i64))
        {
            return Ok(None);
        }
        self.fixed_batch = Some(1);
        Ok(Some(format!(
            "model {}: takes one image at a time, whatever its graph declares; an export with a dynamic batch is faster",
            self.path.display()
        )))
    }

    /// True where two blank images pass.
    pub(super) fn takes_two(&mut self, size: Size, extra: Extra<'_>) -> bool {
        self.call_blank(BATCH_TRIAL, size, extra).is_ok()
    }

    fn call_blank(&mut self, images: usize, size: Size, extra: Extra<'_>) -> Result<Vec<Vec<i64>>, ModelError> {
        let blank = blank(images, size);
        let view = blank.view();
        let feeds = self.feeds(self.image.value(&view).map_err(wrong)?, &extra(images, size))?;
        let session = self.session.as_mut().ok_or_else(closed)?;
        let given = session.run_with_options(feeds, &*self.options).map_err(wrong)?;
        Ok(given.values().map(|v| v.dtype().tensor_shape().map(|s| s.to_vec()).unwrap_or_default()).collect())
    }

    /// Everything that a call gets: its images, and the rest in the graph's order.
    fn feeds<'v>(
        &self,
        images: SessionInputValue<'v>,
        extra: &[Feed],
    ) -> Result<Vec<(String, SessionInputValue<'v>)>, ModelError> {
        let mut feeds = vec![(self.image.name.clone(), images)];
        for feed in extra {
            let port = &self.inputs[feed.port];
            feeds.push((port.name.clone(), feed.value(port).map_err(wrong)?));
        }
        Ok(feeds)
    }

    /// With as many images as the graph demands: blank ones are added at the end.
    ///
    /// # Errors
    /// There are more than it takes.
    pub(super) fn filled<'a>(&self, batch: Images<'a>) -> Result<Images<'a>, ModelError> {
        let (images, c, h, w) = batch.array.dim();
        match self.fixed_batch {
            Some(fixed) if images > fixed => {
                Err(ModelError::Failed(format!("{images} images in a call of a graph that takes {fixed}")))
            }
            Some(fixed) if images < fixed => {
                let mut filled = Array4::zeros((fixed, c, h, w));
                filled.slice_mut(s![..images, .., .., ..]).assign(&batch.array);
                Ok(filled.into())
            }
            _ => Ok(batch),
        }
    }

    /// Calls the graph with `batch` (`[n, 3, height, width]`) and hands output number `output`
    /// (`[n, ...]`, host memory) to `read`. What `read` returns must not point into it: the runtime reuses
    /// the memory. A batch below `fixed_batch` is filled with blank images, whose results are cut off. Zero
    /// images are no call.
    ///
    /// # Errors
    /// The call failed as a whole.
    pub(super) fn run<T>(
        &mut self,
        batch: &dyn ImageBatch,
        extra: Extra<'_>,
        output: usize,
        read: impl FnMut(ArrayViewD<'_, f32>) -> T,
    ) -> Result<Vec<T>, ModelError> {
        let (images, _, height, width) = batch.images().dim();
        if images == 0 {
            return Ok(Vec::new());
        }
        let filled = self.filled(Images::of(batch))?;
        let rows = filled.len();
        let feeds = extra(rows, Size::new(width as u32, height as u32));
        self.call(&filled, &feeds, &[output], |given| {
            let all = &given[0];
            if all.ndim() == 0 || all.len_of(Axis(0)) != rows {
                return Err(ModelError::Failed(format!("the output has shape {:?} for {rows} images", all.shape())));
            }
            Ok(port::first(all, images).axis_iter(Axis(0)).map(read).collect())
        })?
    }

    /// Calls the graph with `batch` and `feeds` as they are, and hands the named outputs to `read`, in host
    /// memory and as f32. What `read` returns must not point into them.
    ///
    /// # Errors
    /// The call failed.
    pub(super) fn call<T>(
        &mut self,
        batch: &Images<'_>,
        feeds: &[Feed],
        outputs: &[usize],
        read: impl FnOnce(&[ArrayViewD<'_, f32>]) -> T,
    ) -> Result<T, ModelError> {
        let (images, view) = (batch.len(), batch.array.view());
        let value = match &self.bound {
            None => self.image.value(&view),
            Some(bound) => self.image.value_in(&view, batch.lent.as_ref(), bound.allocator()),
        };
        let feeds = self.feeds(value.map_err(wrong)?, feeds)?;
        let options = if std::mem::take(&mut self.memory_is_short) { &self.thrifty } else { &self.options };
        let session = self.session.as_mut().ok_or_else(closed)?;
        let half = |output: &usize| self.outputs[*output].kind == Some(TensorElementType::Float16);
        let halves: Vec<bool> = outputs.iter().map(half).collect();
        if let Some(bound) = &mut self.bound {
            let called = bound.call(session, &feeds, (outputs, images), options, |given| hand(given, &halves, read));
            return called.map_err(wrong);
        }
        let given = session.run_with_options(feeds, &**options).map_err(wrong)?;
        let read_of: Vec<&DynValue> = outputs.iter().map(|output| &given[*output]).collect();
        hand(&read_of, &halves, read).map_err(wrong)
    }
}

/// Hands outputs to `read` as f32; `halves` says which are f16.
fn hand<T>(given: &[&DynValue], halves: &[bool], read: impl FnOnce(&[ArrayViewD<'_, f32>]) -> T) -> ort::Result<T> {
    let mut owned: Vec<Option<ArrayD<f32>>> = Vec::new();
    for (value, half) in given.iter().zip(halves) {
        let numbers = if *half { Some(value.try_extract_array::<half::f16>()?) } else { None };
        owned.push(numbers.map(|numbers| numbers.mapv(half::f16::to_f32)));
    }
    let mut views: Vec<ArrayViewD<'_, f32>> = Vec::new();
    for (value, owned) in given.iter().zip(&owned) {
        views.push(match owned {
            Some(converted) => converted.view(),
            None => value.try_extract_array::<f32>()?,
        });
    }
    Ok(read(&views))
}

fn blank(images: usize, size: Size) -> Array4<f32> {
    Array4::zeros((images, 3, size.height_px as usize, size.width_px as usize))
}

/// `None` where the device's provider has no memory for it, which is said.
fn bind(path: &Path, session: &Session, device: &EffectiveDevice, image: &ImagePort) -> Option<Bound> {
    match Bound::open(session, device, &image.name) {
        Ok(bound) => Some(bound),
        Err(error) => {
            log::warn!("model {}: its outputs are not bound: {}", path.display(), error.message());
            None
        }
    }
}

fn open_session(path: &Path, runtime: &Runtime, device: &EffectiveDevice) -> Result<Session, Error> {
    let session = builder(runtime, device).and_then(|mut builder| builder.commit_from_file(path));
    session.map_err(|e| refused_load(path, &e))
}

fn refused_load(path: &Path, error: &ort::Error) -> Error {
    let why = failure::explain_load(error.message());
    match failure::classify(error.message()) {
        ModelError::OutOfMemory(_) => Error::OutOfMemory(format!("model {}: {why}", path.display())),
        _ => Error::StartUp(format!("model {}: {why}", path.display())),
    }
}

fn closed() -> ModelError {
    ModelError::Failed("the session could not be opened anew".to_owned())
}

fn wrong(error: ort::Error) -> ModelError {
    failure::classify(error.message())
}
