//! Writes small ONNX files byte by byte, for graphs that no exporter would make. Field numbers: `onnx.proto3`.

/// A graph with one node. Made with [`Graph::add`] or [`Graph::reshape`], then bent with struct update.
#[derive(Clone)]
pub(crate) struct Graph {
    pub(crate) ir_version: u64,
    pub(crate) opset: u64,
    pub(crate) input_type: u64,
    pub(crate) input_dims: Vec<i64>,
    pub(crate) extra_input: bool,
    pub(crate) output_dims: Vec<i64>,
    pub(crate) metadata: Vec<(&'static str, &'static str)>,
    pub(crate) op: &'static str,
    pub(crate) weights: Vec<u8>,
}

pub(crate) const F32: u64 = 1;
pub(crate) const F16: u64 = 10;
pub(crate) const F64: u64 = 11;

const INT64: u64 = 7;

impl Graph {
    /// `y = x + w`, one number for each value of an image of 4 x 4 pixels; `w` is read from the file
    /// `location`, 192 bytes.
    pub(crate) fn add(location: &str) -> Self {
        let entry = |key: &str, value: &str| text(1, key).into_iter().chain(text(2, value)).collect::<Vec<u8>>();
        let mut tensor = dims(1, &[1, 3, 4, 4]);
        tensor.extend(number(2, F32));
        tensor.extend(text(8, "w"));
        tensor.extend(bytes(13, &entry("location", location)));
        tensor.extend(number(14, 1));
        Self::of("Add", tensor, vec![-1, 3, 4, 4])
    }

    /// `y` = `x` in the shape `shape`, whatever the batch.
    pub(crate) fn reshape(shape: &[i64]) -> Self {
        let mut tensor = dims(1, &[shape.len() as i64]);
        tensor.extend(number(2, INT64));
        tensor.extend(text(8, "w"));
        tensor.extend(bytes(9, &shape.iter().flat_map(|d| d.to_le_bytes()).collect::<Vec<u8>>()));
        Self::of("Reshape", tensor, shape.iter().map(|_| -1).collect())
    }

    fn of(op: &'static str, weights: Vec<u8>, output_dims: Vec<i64>) -> Self {
        Self {
            ir_version: 8,
            opset: 13,
            input_type: F32,
            input_dims: vec![-1, 3, 4, 4],
            extra_input: false,
            output_dims,
            metadata: Vec::new(),
            op,
            weights,
        }
    }

    /// The file's content.
    pub(crate) fn encoded(&self) -> Vec<u8> {
        let node = [text(1, "x"), text(1, "w"), text(2, "y"), text(4, self.op)].concat();
        let mut graph = bytes(1, &node);
        graph.extend(text(2, "g"));
        graph.extend(bytes(5, &self.weights));
        graph.extend(bytes(11, &value("x", self.input_type, &self.input_dims)));
        if self.extra_input {
            graph.extend(bytes(11, &value("prompt", INT64, &[-1, 16])));
        }
        graph.extend(bytes(12, &value("y", self.input_type, &self.output_dims)));
        let mut model = number(1, self.ir_version);
        model.extend(bytes(7, &graph));
        model.extend(bytes(8, &number(2, self.opset)));
        for (key, value) in &self.metadata {
            model.extend(bytes(14, &[text(1, key), text(2, value)].concat()));
        }
        model
    }
}

fn value(name: &str, element: u64, shape: &[i64]) -> Vec<u8> {
    let dim = |d: &i64| {
        if *d < 0 { bytes(1, &text(2, "free")) } else { bytes(1, &number(1, *d as u64)) }
    };
    let tensor = [number(1, element), bytes(2, &shape.iter().flat_map(dim).collect::<Vec<u8>>())].concat();
    [text(1, name), bytes(2, &bytes(1, &tensor))].concat()
}

fn dims(field: u64, shape: &[i64]) -> Vec<u8> {
    shape.iter().flat_map(|d| number(field, *d as u64)).collect()
}

fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

fn text(field: u64, value: &str) -> Vec<u8> {
    bytes(field, value.as_bytes())
}

fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    [varint(field << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}
