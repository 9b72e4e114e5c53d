//! One graph in one session: opening it, what it wants and gives, and calling it. Knows no family of models.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ndarray::{Array4, ArrayViewD, Axis, Slice, s};
use ort::session::{RunOptions, Session};
use ort::value::{Outlet, TensorElementType, TensorRef};

use super::device::{EffectiveDevice, builder};
use super::library::Runtime;
use super::{ModelError, Terminator, failure};
use crate::error::Error;
use crate::geometry::Size;

/// Images in the call that shows whether the batch is really free. Some graphs declare a free batch and
/// have a fixed one inside.
const BATCH_TRIAL: usize = 2;

/// A graph that is loaded, with one f32 input `[batch, 3, height, width]`.
pub(super) struct Graph {
    session: Session,
    options: Arc<RunOptions>,
    path: PathBuf,
    /// Its input.
    pub input: ImagePort,
    /// Its outputs, in the graph's order.
    pub outputs: Vec<OutputPort>,
    /// Images per call, where the graph does not leave it open.
    pub fixed_batch: Option<usize>,
}

/// The input of a graph. `None` is a free dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImagePort {
    pub name: String,
    pub batch: Option<usize>,
    pub height_px: Option<u32>,
    pub width_px: Option<u32>,
}

/// An output of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutputPort {
    pub name: String,
    pub is_f32: bool,
    /// As they are declared, then as a call gave them; -1 is a free dimension.
    pub dims: Vec<i64>,
}

impl Graph {
    /// Loads the graph at `path`, by path so that external weights are found beside it.
    ///
    /// # Errors
    /// The runtime refuses the graph, or its input is no batch of images.
    pub(super) fn open(path: &Path, runtime: &Runtime, device: &EffectiveDevice) -> Result<Self, Error> {
        let refused = |e: &ort::Error| {
            Error::StartUp(format!("model {}: {}", path.display(), failure::explain_load(e.message())))
        };
        let mut builder = builder(runtime, device).map_err(|e| refused(&e))?;
        let session = builder.commit_from_file(path).map_err(|e| refused(&e))?;
        let options = Arc::new(RunOptions::new().map_err(|e| refused(&e))?);
        let outputs = session.outputs().iter().map(output_port).collect();
        let input = image_port(&session).ok_or_else(|| {
            let ports = describe(session.inputs().iter().map(outlet_text));
            Error::StartUp(format!(
                "model {}: croprow feeds graphs with one input, f32 [batch, 3, height, width]; this one wants {ports}",
                path.display()
            ))
        })?;
        let fixed_batch = input.batch;
        Ok(Self { session, options, path: path.to_path_buf(), input, outputs, fixed_batch })
    }

    /// An error about this graph.
    pub(super) fn refuse(&self, why: impl std::fmt::Display) -> Error {
        Error::StartUp(format!("model {}: {why}", self.path.display()))
    }

    /// # Errors
    /// `wanted` is given and is not the name of the graph's input.
    pub(super) fn check_input_name(&self, wanted: Option<&str>) -> Result<(), Error> {
        match wanted {
            Some(name) if name != self.input.name => {
                Err(self.refuse(format!("croprow.toml names the input {name}, the graph's is {}", self.input.text())))
            }
            _ => Ok(()),
        }
    }

    /// A value of the graph's metadata.
    pub(super) fn metadata(&self, key: &str) -> Option<String> {
        self.session.metadata().ok()?.custom(key)
    }

    /// Names, types and shapes of the outputs, for messages.
    pub(super) fn describe_outputs(&self) -> String {
        describe(self.outputs.iter().map(OutputPort::text))
    }

    /// Ends the call in flight and all later ones.
    pub(super) fn terminator(&self) -> Terminator {
        let options = Arc::clone(&self.options);
        // Setting the flag fails only for a null pointer.
        Terminator::new(move || drop(options.terminate()))
    }

    /// The size of the input: what the graph fixes, else `wanted`.
    ///
    /// # Errors
    /// The two differ.
    pub(super) fn settle_size(&self, wanted: Option<Size>, whose: &str) -> Result<Option<Size>, Error> {
        let fixed = self.input.width_px.zip(self.input.height_px).map(|(w, h)| Size::new(w, h));
        let fits = |s: Size| {
            self.input.width_px.is_none_or(|w| w == s.width_px) && self.input.height_px.is_none_or(|h| h == s.height_px)
        };
        match wanted {
            Some(size) if !fits(size) => Err(self.refuse(format!(
                "{whose} asks for {}x{} (width x height), the graph's input is {}",
                size.width_px,
                size.height_px,
                self.input.text()
            ))),
            _ => Ok(fixed.or(wanted)),
        }
    }

    /// One call with a blank image, so that a broken graph fails now and not in the middle of the night. The
    /// outputs' dimensions are known afterwards.
    ///
    /// # Errors
    /// The call failed.
    pub(super) fn try_blank(&mut self, size: Size) -> Result<(), Error> {
        let images = self.fixed_batch.unwrap_or(1);
        let shapes = self.call_blank(images, size).map_err(|e| self.refuse(format!("a blank image fails: {e}")))?;
        for (port, dims) in self.outputs.iter_mut().zip(shapes) {
            port.dims = dims;
        }
        Ok(())
    }

    /// Finds out whether the batch is really free, after [`Self::try_blank`]: sets `fixed_batch` to 1 where the graph
    /// declares a free one but fails with two images. Then there is something to say, in one line.
    ///
    /// # Errors
    /// Output number `output` has not one entry per image.
    pub(super) fn settle_batch(&mut self, size: Size, output: usize) -> Result<Option<String>, Error> {
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
        if let Ok(shapes) = self.call_blank(BATCH_TRIAL, size)
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

    fn call_blank(&mut self, images: usize, size: Size) -> Result<Vec<Vec<i64>>, ModelError> {
        let blank = Array4::<f32>::zeros((images, 3, size.height_px as usize, size.width_px as usize));
        let input = TensorRef::from_array_view(&blank).map_err(|e| failure::classify(e.message()))?;
        let given = self
            .session
            .run_with_options(ort::inputs![self.input.name.as_str() => input], &*self.options)
            .map_err(|e| failure::classify(e.message()))?;
        Ok(given.values().map(|v| v.dtype().tensor_shape().map(|s| s.to_vec()).unwrap_or_default()).collect())
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
        batch: &Array4<f32>,
        output: usize,
        read: impl FnMut(ArrayViewD<'_, f32>) -> T,
    ) -> Result<Vec<T>, ModelError> {
        let images = batch.len_of(Axis(0));
        match self.fixed_batch {
            _ if images == 0 => Ok(Vec::new()),
            Some(fixed) if images > fixed => {
                Err(ModelError::Failed(format!("{images} images in a call of a graph that takes {fixed}")))
            }
            Some(fixed) if images < fixed => {
                let (_, c, h, w) = batch.dim();
                let mut filled = Array4::zeros((fixed, c, h, w));
                filled.slice_mut(s![..images, .., .., ..]).assign(batch);
                self.call(&filled, images, output, read)
            }
            _ => self.call(batch, images, output, read),
        }
    }

    fn call<T>(
        &mut self,
        batch: &Array4<f32>,
        images: usize,
        output: usize,
        read: impl FnMut(ArrayViewD<'_, f32>) -> T,
    ) -> Result<Vec<T>, ModelError> {
        let wrong = |e: ort::Error| failure::classify(e.message());
        let input = TensorRef::from_array_view(batch).map_err(wrong)?;
        let given = self
            .session
            .run_with_options(ort::inputs![self.input.name.as_str() => input], &*self.options)
            .map_err(wrong)?;
        let all = given[output].try_extract_array::<f32>().map_err(wrong)?;
        if all.ndim() == 0 || all.len_of(Axis(0)) != batch.len_of(Axis(0)) {
            return Err(ModelError::Failed(format!(
                "the output has shape {:?} for {} images",
                all.shape(),
                batch.len_of(Axis(0))
            )));
        }
        let wanted = all.slice_axis(Axis(0), Slice::from(..images));
        Ok(wanted.axis_iter(Axis(0)).map(read).collect())
    }
}

impl ImagePort {
    fn text(&self) -> String {
        let dim = |d: Option<u32>| d.map_or_else(|| "?".to_owned(), |v| v.to_string());
        let batch = self.batch.map_or_else(|| "?".to_owned(), |v| v.to_string());
        format!("{} f32 [{batch}, 3, {}, {}]", self.name, dim(self.height_px), dim(self.width_px))
    }
}

impl OutputPort {
    fn text(&self) -> String {
        format!("{} {}{}", self.name, if self.is_f32 { "f32 " } else { "(not f32) " }, dims_text(&self.dims))
    }
}

fn image_port(session: &Session) -> Option<ImagePort> {
    let [outlet] = session.inputs() else { return None };
    let dims = outlet.dtype().tensor_shape()?;
    if outlet.dtype().tensor_type() != Some(TensorElementType::Float32) {
        return None;
    }
    let [batch, channels, height, width] = dims[..] else {
        return None;
    };
    let fixed = |d: i64| u32::try_from(d).ok().filter(|d| *d > 0);
    // A channel dimension that the graph leaves open is 3 by contract.
    (channels == 3 || channels < 0).then(|| ImagePort {
        name: outlet.name().to_owned(),
        batch: fixed(batch).map(|b| b as usize),
        height_px: fixed(height),
        width_px: fixed(width),
    })
}

fn output_port(outlet: &Outlet) -> OutputPort {
    OutputPort {
        name: outlet.name().to_owned(),
        is_f32: outlet.dtype().tensor_type() == Some(TensorElementType::Float32),
        dims: outlet.dtype().tensor_shape().map(|s| s.to_vec()).unwrap_or_default(),
    }
}

fn outlet_text(outlet: &Outlet) -> String {
    let kind = outlet.dtype().tensor_type().map_or_else(|| "no tensor".to_owned(), |t| t.to_string());
    let dims = outlet.dtype().tensor_shape().map(|s| dims_text(s)).unwrap_or_default();
    format!("{} {kind} {dims}", outlet.name())
}

fn dims_text(dims: &[i64]) -> String {
    let each: Vec<String> = dims.iter().map(|d| if *d < 0 { "?".to_owned() } else { d.to_string() }).collect();
    format!("[{}]", each.join(", "))
}

fn describe(ports: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = ports.collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}
