"""Reads unquantised tensors from safetensors or `pytorch_model*.bin` files, single or sharded.

Files do not stay mapped, because their pages would count as memory of this process.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from beamwright.errors import InputError, message_of
from beamwright.io import read_regular
from beamwright.models.formats.files import weight_files

DAMAGED = (
    SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, EOFError, ValueError, TypeError,
    AttributeError, LookupError, ArithmeticError,
)  # fmt: skip
_DAMAGED = "the file is damaged, truncated, or holds no named tensors; download it again"
_POINTER = b"version https://git-lfs"
# A safetensors file begins with the length of its header, which says where its tensors are.
_LENGTH_BYTES = 8


class RowReader:
    """A tensor whose rows are read from its file on demand, by indexing with row numbers.

    It is used for embeddings, because a forward pass needs few of their rows. The process maps no
    file and keeps no rows. Rows that are read often stay in the system's file cache.

    start: position of the first row in the file, in bytes. row_bytes: bytes of a row.
    convert: converts bytes [rows, row_bytes] to values [rows, columns].
    """

    def __init__(
        self, file: Path, start: int, row_bytes: int, convert: Callable[[Tensor], Tensor]
    ) -> None:
        self._where, self._convert = (file, start, row_bytes), convert
        self._handle = os.open(file, os.O_RDONLY)  # still reads this file if another replaces it
        finalize(self, os.close, self._handle)

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """Return the rows [tokens, columns] of `token_ids` [tokens].

        Raises:
            InputError: if the file is shorter than when it was opened.
        """
        file, start, size = self._where
        places = [start + size * token for token in token_ids.tolist()]
        read = bytearray().join([os.pread(self._handle, size, place) for place in places])
        if len(read) != size * len(places):
            raise InputError(f"model file {file}: the file is truncated")
        return self._convert(torch.frombuffer(read, dtype=torch.uint8).view(-1, size))


class PlainFiles:
    """`StoredWeights` of an unquantised folder: safetensors or `pytorch_model*.bin` files.

    sizes: the sizes of all tensors by name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[Path, dict[str, Tensor]] = {}
        self._where: dict[str, Path] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}
        indexed, files = weight_files(folder)
        for path in files:
            opened = self._open(path)
            for name in opened.keys():  # noqa: SIM118 - safetensors' is no mapping
                if indexed.get(name, path) == path:
                    shape = opened[name].shape if isinstance(opened, dict) else None
                    self.sizes[name] = tuple(shape or opened.get_slice(name).get_shape())
                    self._where[name] = path
        for name, path in indexed.items():
            if name not in self._where:
                raise InputError(
                    f"model {folder}: the index says that {path.name} contains {name:.200}, but it "
                    "does not; download the model again"
                )
        if not self._where:
            raise InputError(f"model {files[0]}: cannot be read: the file holds no named tensors")

    def _open(self, path: Path) -> Any:
        """Open a weight file, which stays mapped until the result and all its tensors are freed."""
        try:
            if path.suffix == ".safetensors":
                return safe_open(path, framework="pt")
            if path not in self._kept:
                # Files from before torch 1.6 cannot be mapped. The last such file stays in memory.
                old = not is_zipfile(path)
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=not old)
                if not isinstance(tensors, dict):
                    raise ValueError(f"a {type(tensors).__name__}, not named tensors")
                tensors = {n: t for n, t in tensors.items() if isinstance(t, Tensor)}
                if not old:
                    return tensors
                self._kept = {path: tensors}
            return self._kept[path]
        except DAMAGED as error:
            pointer = path.is_file() and read_regular(path, len(_POINTER)) == _POINTER
            why = "the file is a Git LFS pointer; run git lfs pull" if pointer else _DAMAGED
            line = f"model file {path}: cannot be read: {why} ({message_of(error)})"
            raise InputError(line) from error

    def tensor(self, name: str) -> Tensor | None:
        """Return a copy of a tensor; None if it does not exist. Its file does not stay mapped."""
        if name not in self._where:
            return None
        handle = self._open(self._where[name])
        mapped: Tensor
        mapped = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        return mapped.clone()

    def row_reader(self, name: str, dtype: torch.dtype) -> RowReader | None:
        """Return a reader of single rows, which casts them to `dtype`; None for a pickle file."""
        path = self._where[name]
        if path.suffix != ".safetensors":
            return None
        first = self._open(path).get_slice(name)[:1]
        stored, row_bytes = first.dtype, first.nbytes
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            start, _ = json.loads(stream.read(size))[name]["data_offsets"]
        start += _LENGTH_BYTES + size
        return RowReader(path, start, row_bytes, lambda read: read.view(stored).to(dtype))

    def quantised_linear(self, name: str) -> None:
        """Return None, because no weight in these files is quantised (see `StoredWeights`)."""
