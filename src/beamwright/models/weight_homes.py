"""Where weights live that are not on the device: host memory, or a temporary file."""

from __future__ import annotations

import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from beamwright.errors import InputError
from beamwright.kv.streams import FileBytes, LockedBlocks, Piece


class WeightHome(ABC):
    """Keeps the bytes of weights that are not on the device, by a key."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Any]] = {}

    def store(self, key: Hashable, parts: Sequence[Tensor]) -> None:
        """Keep the bytes of weights. parts: uint8 tensors, on the device or on the CPU."""
        self._kept[key] = [self._keep(part) for part in parts]

    def pieces(self, key: Hashable, parts: Sequence[Tensor]) -> list[Piece]:
        """Return the copies that bring the bytes to `parts`, in the order of `store`."""
        sources = self._kept[key]
        return [Piece(to, source, to.nbytes) for to, source in zip(parts, sources, strict=True)]

    @abstractmethod
    def _keep(self, part: Tensor) -> Any:
        """Keep the bytes of one tensor, and return the source of copies of them."""


class HostTable:
    """An embedding table in host memory, of which each pass copies a few rows to the device."""

    def __init__(self, table: Tensor) -> None:
        self._device, self._rows = table.device, table.cpu()

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """Return the rows [tokens, columns] of `token_ids` [tokens], on the device."""
        return self._rows[token_ids.cpu()].to(self._device)


class HostHome(WeightHome):
    """A `WeightHome` in host memory, page-locked if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._locks = device.type == "cuda"

    def _keep(self, part: Tensor) -> Tensor:
        if not self._locks:
            return part.clone()
        return LockedBlocks(1, part.nbytes).memory.by_block[0].copy_(part)


class FileHome(WeightHome):
    """A `WeightHome` in a temporary file, which the system removes when the process ends.

    Raises:
        InputError: if the file cannot be created; from `store`, if the disk is full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = 0
        with _explain_disk_errors():
            file = tempfile.TemporaryFile(prefix="beamwright-weights-", buffering=0)  # noqa: SIM115
        self._handle = file.fileno()
        weakref.finalize(self, file.close)

    def _keep(self, part: Tensor) -> FileBytes:
        with _explain_disk_errors():
            written = FileBytes.write(self._handle, self._num_bytes, part.numpy())
        self._num_bytes += written.num_bytes
        return written


@contextmanager
def _explain_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--weights-home disk: weights cannot be written to a temporary file ({error}). Free "
            "disk space there, or set TMPDIR to another folder."
        ) from error
