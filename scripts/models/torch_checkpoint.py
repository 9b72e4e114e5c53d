"""Read the tensors of a PyTorch checkpoint (.pth, .pt) into numpy, without PyTorch.

A checkpoint is a pickle, and a pickle may run any code. The reader here accepts only what a state dict
needs (ordered dicts and tensors over typed storages) and refuses every other class by name.

Both containers are read: the zip file of PyTorch 1.6 and later, and the older stream of pickles that is
followed by raw storages. Not read: sparse or quantised tensors, big-endian files, whole pickled modules.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

DTYPE_OF_STORAGE = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class Storage:
    """A flat array that tensors are views of. The legacy container brings the data after the tensors."""

    def __init__(self, dtype: type, data: np.ndarray | None = None) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.data = data


class TensorView:
    """What `torch._utils._rebuild_tensor_v2` is called with; offsets and strides count elements."""

    def __init__(self, storage: Storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> None:
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides

    def to_numpy(self) -> np.ndarray:
        flat = self.storage.data
        if flat is None:
            raise ValueError("checkpoint is cut short: a tensor's storage is missing")
        reach = self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        if min((self.offset, *self.strides)) < 0 or (0 not in self.shape and reach > flat.size):
            raise ValueError("tensor reaches outside its storage")
        strides_bytes = [s * flat.itemsize for s in self.strides]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides_bytes).copy()


class StateDictUnpickler(pickle.Unpickler):
    """Unpickles state dicts only. `storages` is filled as persistent ids are met."""

    def __init__(self, file: BinaryIO, read_storage: Any) -> None:
        super().__init__(file)
        self._read_storage = read_storage

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return TensorView
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *_: data
        if module == "torch" and name in DTYPE_OF_STORAGE:
            return DTYPE_OF_STORAGE[name]
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        raise pickle.UnpicklingError(f"refused: a state dict has no use for {module}.{name}")

    def persistent_load(self, pid: tuple) -> Storage:
        kind, dtype, key, _location, count = pid[:5]
        if kind != "storage":
            raise pickle.UnpicklingError(f"refused: persistent id of kind {kind!r}")
        return self._read_storage(dtype, key, count)


def load_state_dict(path: Path) -> "OrderedDict[str, np.ndarray]":
    """Tensors by name. Raises pickle.UnpicklingError for anything that is not a plain state dict."""
    content = _load_zip(path) if zipfile.is_zipfile(path) else _load_legacy(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a state dict, found {type(content).__name__}")
    return OrderedDict((name, t.to_numpy()) for name, t in content.items() if isinstance(t, TensorView))


def _load_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        pickle_name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        root = pickle_name[: -len("data.pkl")]
        storages: dict[str, Storage] = {}

        def read_storage(dtype: type, key: str, count: int) -> Storage:
            if key not in storages:
                storage = Storage(dtype)
                storage.data = np.frombuffer(archive.read(f"{root}data/{key}"), storage.dtype, count)
                storages[key] = storage
            return storages[key]

        return StateDictUnpickler(io.BytesIO(archive.read(pickle_name)), read_storage).load()


def _load_legacy(path: Path) -> Any:
    storages: dict[str, Storage] = {}

    def promise_storage(dtype: type, key: str, _count: int) -> Storage:
        return storages.setdefault(key, Storage(dtype))

    with open(path, "rb") as file:

        def next_pickle() -> Any:
            return StateDictUnpickler(file, promise_storage).load()

        # Three headers come first: a magic number, the protocol version, the machine's properties.
        for _ in range(3):
            next_pickle()
        content = next_pickle()
        for key in next_pickle():
            storage = storages[key]
            (count,) = struct.unpack("<q", file.read(8))
            storage.data = np.frombuffer(file.read(count * storage.dtype.itemsize), storage.dtype)
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description="List the tensors of a PyTorch checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    for name, tensor in load_state_dict(parser.parse_args().checkpoint).items():
        print(f"{name}  {tensor.dtype}  {list(tensor.shape)}")


if __name__ == "__main__":
    main()
