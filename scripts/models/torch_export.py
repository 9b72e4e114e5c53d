"""From a PyTorch module to an ONNX graph that gives the same numbers at every size it claims to take.

`torch.onnx.export` by tracing freezes whatever Python computes on the way. Three such places are shared by several
families of transformers and are mended here while exporting, without changing a number in ordinary use:

- `functools.lru_cache` around position embeddings and anchors hands a tensor of an earlier call to the trace;
- `torch.as_tensor` of a Python list of sizes (deformable attention) becomes a constant of the traced size;
- `torch.linspace` is exported as a division by steps - 1, which goes wrong where a feature map has one row.

Nothing is trusted: `require_equal` runs the graph against PyTorch at several sizes and batch sizes, and a graph that
differs is not kept. Needs the packages of requirements-export.txt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hf_folder import ExportError

OPSET = 17

# A protobuf file holds less than 2 GiB. Beyond this the weights go into one file beside the graph.
EXTERNAL_FROM_BYTES = 1_900_000_000
EXTERNAL_FILE = "model.onnx.data"

Feed = dict[str, np.ndarray]


@dataclass(frozen=True)
class Signature:
    """Names and free dimensions of a graph: {"pixel_values": {0: "batch_size", 2: "height"}}."""

    inputs: dict[str, dict[int, str]]
    outputs: dict[str, dict[int, str]]


@dataclass
class Differences:
    """Largest absolute difference to PyTorch, per output, over all that was compared."""

    largest: dict[str, float] = field(default_factory=dict)
    cases: int = 0

    def add(self, name: str, value: float) -> None:
        self.largest[name] = max(value, self.largest.get(name, 0.0))

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {value:.1e}" for name, value in self.largest.items())
        return f"{self.cases} cases against PyTorch, largest difference: {listed}"


@contextlib.contextmanager
def traceable_transformers() -> Iterator[None]:
    import torch
    import transformers.pytorch_utils as pytorch_utils

    is_compiling = pytorch_utils.is_torchdynamo_compiling
    as_tensor, linspace = torch.as_tensor, torch.linspace

    def as_tensor_of_sizes(data, *args, **kwargs):
        """A list of rows of traced scalars stays traced."""
        rows = data if isinstance(data, (list, tuple)) else []
        if rows and all(isinstance(row, tuple) and any(isinstance(v, torch.Tensor) for v in row) for row in rows):
            return torch.stack([torch.stack([as_tensor(value) for value in row]) for row in rows])
        return as_tensor(data, *args, **kwargs)

    def linspace_of_one_or_more(start, end, steps, *, dtype=None, device=None):
        if not isinstance(steps, torch.Tensor):
            return linspace(start, end, steps, dtype=dtype, device=device)
        step = (as_tensor(end, dtype=dtype) - start) / (steps - 1).clamp(min=1)
        return start + torch.arange(steps, dtype=dtype, device=device) * step

    # The cache of transformers steps aside while a compiler is at work; tracing is one.
    pytorch_utils.is_torchdynamo_compiling = lambda: True
    torch.as_tensor, torch.linspace = as_tensor_of_sizes, linspace_of_one_or_more
    try:
        yield
    finally:
        pytorch_utils.is_torchdynamo_compiling = is_compiling
        torch.as_tensor, torch.linspace = as_tensor, linspace


def run_torch(module, feed: Feed) -> dict[str, np.ndarray]:
    """Outputs by name of a module that takes its inputs by position and gives a dict."""
    import torch

    with torch.no_grad():
        outputs = module(*(torch.from_numpy(value) for value in feed.values()))
    return {name: value.numpy() for name, value in outputs.items()}


def export_graph(module, feed: Feed, signature: Signature, path: Path, opset: int = OPSET) -> None:
    """Writes `path`, and `EXTERNAL_FILE` beside it where the weights are too large for one file.

    `module` takes the inputs of `feed` in order and gives a dict of the signature's outputs; its `model` holds the
    weights, and its `tracing()` is a context in which the model can be traced.
    """
    import torch

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            # Registered, so that the tracer sees weights and not constants.
            self.model = module.model

        def forward(self, *inputs):
            outputs = self.module(*inputs)
            return tuple(outputs[name] for name in signature.outputs)

    # A wrapper left in train mode would put the model back into it after the export.
    wrapper = Positional().eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for guard in (without_stdout(), warnings.catch_warnings(), torch.no_grad()):
            stack.enter_context(guard)
        # The exporter may write a file for each large weight.
        traced = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent))) / "traced.onnx"
        warnings.simplefilter("ignore")
        for guard in (traceable_transformers(), module.tracing()):
            stack.enter_context(guard)
        try:
            torch.onnx.export(
                wrapper,
                tuple(torch.from_numpy(value) for value in feed.values()),
                str(traced),
                input_names=list(signature.inputs),
                output_names=list(signature.outputs),
                dynamic_axes={**signature.inputs, **signature.outputs},
                opset_version=opset,
                dynamo=False,
            )
        except torch.onnx.errors.OnnxExporterError as e:
            raise ExportError(f"PyTorch cannot export this model: {e}") from e
        write_named(traced, signature, path)


@contextlib.contextmanager
def without_stdout() -> Iterator[None]:
    """A failing export prints its whole graph, megabytes of it, from C++: past `sys.stdout`."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def write_named(traced: Path, signature: Signature, path: Path) -> None:
    """The tracer invents names for dimensions of outputs it could not work out; ours stay, its own go."""
    import onnx

    model = onnx.load(traced)
    for value in [*model.graph.input, *model.graph.output]:
        free = {**signature.inputs, **signature.outputs}[value.name]
        for i, dimension in enumerate(value.type.tensor_type.shape.dim):
            if i in free:
                dimension.dim_param = free[i]
            elif dimension.HasField("dim_param"):
                dimension.dim_param = f"{value.name}_{i}"
    model.producer_name, model.producer_version = "croprow-scripts", ""
    model.doc_string = model.graph.doc_string = ""
    for node in model.graph.node:
        node.doc_string = ""
    weights_bytes = sum(len(weight.raw_data) for weight in model.graph.initializer)
    if weights_bytes > EXTERNAL_FROM_BYTES:
        # onnx appends to such a file.
        path.with_name(EXTERNAL_FILE).unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=EXTERNAL_FILE)
    else:
        onnx.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)


def open_session(path: Path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_graph(session, feed: Feed) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    wanted = {graph_input.name for graph_input in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: v for k, v in feed.items() if k in wanted})))


Compare = Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], dict[str, float]]


def largest_differences(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> dict[str, float]:
    """Per output; infinite where shapes differ or a NaN is on either side."""
    result = {}
    for name, values in expected.items():
        same = values.shape == got[name].shape and np.isfinite(got[name]).all() and np.isfinite(values).all()
        result[name] = float(np.abs(values - got[name]).max()) if same else float("inf")
    return result


def require_equal(
    module, path: Path, feeds: list[Feed], tolerances: dict[str, float], compare: Compare = largest_differences
) -> Differences:
    """Runs all feeds through both. Raises `ExportError` at the first output beyond its tolerance."""
    session = open_session(path)
    differences = Differences()
    for feed in feeds:
        shapes = {name: list(value.shape) for name, value in feed.items()}
        expected = run_torch(module, feed)
        try:
            got = run_graph(session, feed)
        except Exception as e:  # onnxruntime has no base class of its own
            raise ExportError(f"the graph does not run with {shapes}: {e}") from e
        for name, difference in compare(expected, got).items():
            differences.add(name, difference)
            if not difference <= tolerances[name]:
                raise ExportError(
                    f"the graph differs from PyTorch with {shapes}: {name} by {difference:.2e}, "
                    f"allowed are {tolerances[name]:.0e}; no graph was written"
                )
        differences.cases += 1
    return differences
