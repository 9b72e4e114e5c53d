//! Inputs and outputs of a graph as it declares them, and what may be given to them. Knows no family of models.

use ndarray::{ArrayD, ArrayView4, Axis, Slice};
use ort::memory::Allocator;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynTensor, Outlet, PrimitiveTensorElementType, Tensor, TensorElementType, TensorRef};

use super::memory::Lent;
use crate::geometry::Size;

/// Names of inputs that hold pixels, the most usual first.
const IMAGE_NAMES: [&str; 7] = ["pixel_values", "images", "image", "input", "inputs", "img", "x"];

/// An input or output of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub name: String,
    /// `None` for what is no tensor.
    pub kind: Option<TensorElementType>,
    /// As they are declared, of an output then as a call gave them; negative is a free dimension.
    pub dims: Vec<i64>,
}

impl Port {
    pub(super) fn of(outlet: &Outlet) -> Self {
        Self {
            name: outlet.name().to_owned(),
            kind: outlet.dtype().tensor_type(),
            dims: outlet.dtype().tensor_shape().map(|s| s.to_vec()).unwrap_or_default(),
        }
    }

    /// A dimension that the graph fixes.
    pub(super) fn fixed(&self, axis: usize) -> Option<usize> {
        self.dims.get(axis).and_then(|d| usize::try_from(*d).ok()).filter(|d| *d > 0)
    }

    /// True for numbers that are read as f32.
    pub(super) fn is_float(&self) -> bool {
        matches!(self.kind, Some(TensorElementType::Float32 | TensorElementType::Float16))
    }

    /// Name, type and shape, for messages.
    pub(super) fn text(&self) -> String {
        let kind = self.kind.map_or_else(|| "no tensor".to_owned(), |t| t.to_string());
        format!("{} {kind} {}", self.name, dims_text(&self.dims))
    }
}

/// The order of the axes of an image input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axes {
    /// `[batch, 3, height, width]`.
    ChannelsFirst,
    /// `[batch, height, width, 3]`.
    ChannelsLast,
}

/// What an image input counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    F32,
    F16,
    /// Grey levels 0..=255; the graph normalises itself.
    U8,
}

/// The input that takes the pixels. `None` is a free dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImagePort {
    /// Place among the graph's inputs.
    pub index: usize,
    pub name: String,
    pub axes: Axes,
    pub numbers: Numbers,
    pub batch: Option<usize>,
    pub height_px: Option<u32>,
    pub width_px: Option<u32>,
}

impl ImagePort {
    /// The image input among `ports`: the one called `wanted`, else one of a usual name, else the only one that
    /// can be it.
    ///
    /// # Errors
    /// None, or no clear one; the text says what is wrong without the list of inputs.
    pub(super) fn find(ports: &[Port], wanted: Option<&str>) -> Result<Self, String> {
        let fitting: Vec<Self> = ports.iter().enumerate().filter_map(|(i, p)| Self::of(i, p)).collect();
        if let Some(name) = wanted {
            return match fitting.into_iter().find(|p| p.name == name) {
                Some(port) => Ok(port),
                None if ports.iter().any(|p| p.name == name) => {
                    Err(format!("croprow.toml names the input {name}, which is no batch of images"))
                }
                None => Err(format!("croprow.toml names the input {name}, which the graph does not have")),
            };
        }
        let usual = IMAGE_NAMES.iter().find_map(|name| fitting.iter().find(|p| p.name == *name));
        match (usual, fitting.as_slice()) {
            (Some(port), _) => Ok(port.clone()),
            (None, [only]) => Ok(only.clone()),
            (None, []) => {
                Err("no input is a batch of images, [batch, 3, height, width] or [batch, height, width, 3] of \
                               f32, f16 or u8"
                    .to_owned())
            }
            (None, _) => {
                Err("more than one input could be the images: name it in croprow.toml ([input] name)".to_owned())
            }
        }
    }

    fn of(index: usize, port: &Port) -> Option<Self> {
        let numbers = match port.kind? {
            TensorElementType::Float32 => Numbers::F32,
            TensorElementType::Float16 => Numbers::F16,
            TensorElementType::Uint8 => Numbers::U8,
            _ => return None,
        };
        let [batch, a, b, c] = port.dims[..] else { return None };
        // Channels that the graph leaves open are 3 by contract, and come first unless three come last.
        let (axes, height, width) = match (a, c) {
            (3, _) => (Axes::ChannelsFirst, b, c),
            (_, 3) => (Axes::ChannelsLast, a, b),
            (a, _) if a < 0 => (Axes::ChannelsFirst, b, c),
            _ => return None,
        };
        let fixed = |d: i64| u32::try_from(d).ok().filter(|d| *d > 0);
        Some(Self {
            index,
            name: port.name.clone(),
            axes,
            numbers,
            batch: fixed(batch).map(|b| b as usize),
            height_px: fixed(height),
            width_px: fixed(width),
        })
    }

    /// The size that the graph fixes, whole or in part.
    pub(super) fn fits(&self, size: Size) -> bool {
        self.width_px.is_none_or(|w| w == size.width_px) && self.height_px.is_none_or(|h| h == size.height_px)
    }

    /// True where every picture may have a size of its own.
    pub(super) fn leaves_sides_open(&self) -> bool {
        self.width_px.is_none() && self.height_px.is_none()
    }

    /// Width and height, where the graph fixes both.
    pub(super) fn fixed_size(&self) -> Option<Size> {
        self.width_px.zip(self.height_px).map(|(width, height)| Size::new(width, height))
    }

    /// `batch` (`[n, 3, height, width]`) as this input wants it.
    pub(super) fn value<'v>(&self, batch: &'v ArrayView4<'v, f32>) -> ort::Result<SessionInputValue<'v>> {
        if self.numbers == Numbers::F32 && self.turned(batch).is_standard_layout() {
            return Ok(TensorRef::from_array_view(batch.view().reborrow())?.into());
        }
        self.made(batch, None)
    }

    /// The same as a value that owns its memory, which `lent` is already where nothing has to be converted; else it is
    /// written to memory of `allocator`. (`ort` 2.0.0-rc.15 waits for itself for ever when a borrowed value is bound
    /// that the session wants where it is.)
    pub(super) fn value_in<'v>(
        &self,
        batch: &ArrayView4<'_, f32>,
        lent: Option<&Lent<'v>>,
        allocator: &Allocator,
    ) -> ort::Result<SessionInputValue<'v>> {
        match lent {
            Some(lent) if self.numbers == Numbers::F32 && self.axes == Axes::ChannelsFirst => Ok(lent.0.into()),
            _ => self.made(batch, Some(allocator)),
        }
    }

    fn made(
        &self,
        batch: &ArrayView4<'_, f32>,
        allocator: Option<&Allocator>,
    ) -> ort::Result<SessionInputValue<'static>> {
        let turned = self.turned(batch);
        match self.numbers {
            Numbers::F32 => converted(&turned, allocator, |v| v),
            Numbers::F16 => converted(&turned, allocator, half::f16::from_f32),
            // The numbers of a u8 input are grey levels by the input's own mean and deviation.
            Numbers::U8 => converted(&turned, allocator, |v| v.round().clamp(0.0, 255.0) as u8),
        }
    }

    fn turned<'v>(&self, batch: &'v ArrayView4<'_, f32>) -> ArrayView4<'v, f32> {
        match self.axes {
            Axes::ChannelsFirst => batch.view(),
            Axes::ChannelsLast => batch.view().permuted_axes([0, 2, 3, 1]),
        }
    }
}

/// In the order of `view`'s axes, whatever its order in memory.
fn converted<T>(
    view: &ArrayView4<'_, f32>,
    allocator: Option<&Allocator>,
    number: impl Fn(f32) -> T,
) -> ort::Result<SessionInputValue<'static>>
where
    T: PrimitiveTensorElementType + Copy + std::fmt::Debug + 'static,
{
    let dims = view.shape().to_vec();
    let numbers = view.iter().map(|v| number(*v));
    let Some(allocator) = allocator else {
        return Ok(Tensor::from_array((dims, numbers.collect::<Vec<T>>()))?.into());
    };
    let mut tensor = Tensor::<T>::new(allocator, dims)?;
    tensor.extract_tensor_mut().1.iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
    Ok(tensor.into())
}

/// Whole numbers for another input than the image: token ids, masks, sizes.
#[derive(Clone, Debug)]
pub(super) struct Feed {
    /// Place among the graph's inputs.
    pub port: usize,
    pub values: ArrayD<i64>,
}

impl Feed {
    /// In the type that the graph declares.
    pub(super) fn value(&self, port: &Port) -> ort::Result<SessionInputValue<'static>> {
        let tensor: DynTensor = match port.kind {
            Some(TensorElementType::Int32) => Tensor::from_array(self.values.mapv(|v| v as i32))?.upcast(),
            Some(TensorElementType::Bool) => Tensor::from_array(self.values.mapv(|v| v != 0))?.upcast(),
            Some(TensorElementType::Float32) => Tensor::from_array(self.values.mapv(|v| v as f32))?.upcast(),
            Some(TensorElementType::Float16) => {
                Tensor::from_array(self.values.mapv(|v| half::f16::from_f32(v as f32)))?.upcast()
            }
            Some(TensorElementType::Uint8) => Tensor::from_array(self.values.mapv(|v| v as u8))?.upcast(),
            _ => Tensor::from_array(self.values.clone())?.upcast(),
        };
        Ok(tensor.into())
    }

    /// True for types that [`Self::value`] can make.
    pub(super) fn can_be(port: &Port) -> bool {
        use TensorElementType::{Bool, Float16, Float32, Int32, Int64, Uint8};
        matches!(port.kind, Some(Int64 | Int32 | Bool | Float32 | Float16 | Uint8))
    }
}

/// The first `rows` entries along the batch.
pub(super) fn first<'a>(all: &'a ndarray::ArrayViewD<'_, f32>, rows: usize) -> ndarray::ArrayViewD<'a, f32> {
    all.slice_axis(Axis(0), Slice::from(..rows))
}

pub(super) fn inputs_of(session: &Session) -> Vec<Port> {
    session.inputs().iter().map(Port::of).collect()
}

pub(super) fn outputs_of(session: &Session) -> Vec<Port> {
    session.outputs().iter().map(Port::of).collect()
}

fn dims_text(dims: &[i64]) -> String {
    let each: Vec<String> = dims.iter().map(|d| if *d < 0 { "?".to_owned() } else { d.to_string() }).collect();
    format!("[{}]", each.join(", "))
}

/// Ports as one line, for messages.
pub(super) fn describe(ports: &[Port]) -> String {
    let all: Vec<String> = ports.iter().map(Port::text).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, kind: TensorElementType, dims: &[i64]) -> Port {
        Port { name: name.to_owned(), kind: Some(kind), dims: dims.to_vec() }
    }

    #[test]
    fn the_image_input_is_found_by_name_and_by_shape() {
        use TensorElementType::{Float16, Float32, Int64, Uint8};
        let mask = port("pixel_mask", Int64, &[-1, -1, -1]);
        let found = |ports: &[Port]| ImagePort::find(ports, None).map(|p| (p.name, p.axes, p.numbers));
        let usual = port("pixel_values", Float32, &[-1, 3, -1, -1]);
        assert_eq!(found(&[mask.clone(), usual]), Ok(("pixel_values".to_owned(), Axes::ChannelsFirst, Numbers::F32)));
        let last = port("picture", Uint8, &[1, 224, 224, 3]);
        assert_eq!(found(&[last]), Ok(("picture".to_owned(), Axes::ChannelsLast, Numbers::U8)));
        let open = port("img", Float16, &[-1, -1, -1, -1]);
        assert_eq!(found(&[open]), Ok(("img".to_owned(), Axes::ChannelsFirst, Numbers::F16)));
        assert!(found(&[mask]).unwrap_err().contains("no input is a batch of images"));
        let two = [port("a", Float32, &[1, 3, 8, 8]), port("b", Float32, &[1, 3, 8, 8])];
        assert!(found(&two).unwrap_err().contains("more than one"));
        assert_eq!(ImagePort::find(&two, Some("b")).unwrap().index, 1);
        assert!(ImagePort::find(&two, Some("c")).unwrap_err().contains("does not have"));
    }

    #[test]
    fn a_grey_graph_is_no_batch_of_images() {
        let grey = port("images", TensorElementType::Float32, &[-1, 1, 28, 28]);
        assert!(ImagePort::find(&[grey], None).is_err());
    }
}
