"""Tensors as they are stored: safetensors or `pytorch_model*.bin` files, single or sharded.

No page of a file stays mapped, as it would count as this process's memory.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from beamwright.errors import InputError, line_of, said_by
from beamwright.io import read_regular
from beamwright.models.formats.rows import StoredRows

DAMAGED = (
    SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, EOFError, ValueError, TypeError,
    AttributeError, LookupError, ArithmeticError,
)  # fmt: skip
_LENGTH_BYTES = 8  # of safetensors' header, which says where a tensor lies behind it


class PlainFiles:
    """Tensors by name from safetensors or `pytorch_model*.bin` files, single or sharded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where = dict(self._index())
        if not self._where:
            raise InputError(f"model {folder}: no *.safetensors or pytorch_model*.bin weights")

    def _index(self) -> Iterator[tuple[str, Path]]:
        safe = sorted(
            path for path in self.folder.glob("*.safetensors") if path.name.startswith("model")
        )
        bins = sorted(self.folder.glob("pytorch_model*.bin"))
        indexes = [*self.folder.glob("*.safetensors.index.json")]
        if not safe and not indexes:
            indexes = [*self.folder.glob("pytorch_model*.bin.index.json")]
        for index in indexes:
            for file in set(_weight_map(index).values()):
                if not (self.folder / file).exists():
                    raise InputError(f"model {self.folder}: shard {file} is missing")
        for path in safe or bins:
            names = self._open(path).keys()
            yield from ((name, path) for name in names)

    def _open(self, path: Path) -> Any:
        """A file, mapped until what is returned, and what was read of it, is dropped."""
        try:
            if path.suffix == ".safetensors":
                return safe_open(path, framework="pt")
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(tensors, dict):
                raise ValueError(f"a {type(tensors).__name__}, not tensors by name")
            return {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
        except DAMAGED as error:
            raise InputError(f"model file {path}: cannot be read ({said_by(error)})") from error

    def tensor(self, name: str) -> Tensor | None:
        """A copy of the tensor of that name, or None; its file is not mapped any more."""
        if name not in self._where:
            return None
        handle = self._open(self._where[name])
        mapped: Tensor
        mapped = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        return mapped.clone()

    def rows(self, name: str, dtype: torch.dtype) -> StoredRows | None:
        """None of a pickle."""
        path = self._where[name]
        if path.suffix != ".safetensors":
            return None
        first = self._open(path).get_slice(name)[:1]
        stored, row_bytes = first.dtype, first.nbytes
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            start, _ = json.loads(stream.read(size))[name]["data_offsets"]
        start += _LENGTH_BYTES + size
        return StoredRows(path, start, row_bytes, lambda read: read.view(stored).to(dtype))

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._where)

    def linear(self, name: str) -> None:
        """None: values are plain here."""


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files: dict[str, str] = json.loads(read_regular(index))["weight_map"]
        if not all(isinstance(file, str) for file in files.values()):
            raise TypeError("weight_map names something that is no file")
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"model index {index}: cannot be read ({line_of(error)})") from error
