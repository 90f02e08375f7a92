"""Where weights live that are not on the device: host memory, or a temporary file."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from beamwright.errors import InputError
from beamwright.kv.streams import FileBytes, LockedBlocks, Piece


class WeightHome(Protocol):
    """Memory in which the weights live that are not on the device, by a key."""

    def store(self, key: Hashable, parts: Sequence[Tensor]) -> None:
        """Keep the bytes of weights. parts: uint8 tensors, on the device or on the CPU."""

    def pieces(self, key: Hashable, parts: Sequence[Tensor]) -> list[Piece]:
        """Return the copies that bring the bytes to `parts`, in the order of `store`."""


class HostTable:
    """An embedding table in host memory, of which each pass copies a few rows to the device."""

    def __init__(self, table: Tensor) -> None:
        self._device, self._rows = table.device, table.cpu()

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """Return the rows [tokens, columns] of `token_ids` [tokens], on the device."""
        return self._rows[token_ids.cpu()].to(self._device)


class HostHome:
    """A `WeightHome` in host memory, page-locked if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._locks = device.type == "cuda"
        self._kept: dict[Hashable, list[Tensor]] = {}
        self._owners: list[LockedBlocks] = []

    def store(self, key: Hashable, parts: Sequence[Tensor]) -> None:
        self._kept[key] = [self._copy(part) for part in parts]

    def pieces(self, key: Hashable, parts: Sequence[Tensor]) -> list[Piece]:
        return [
            Piece(to, source, source.nbytes)
            for to, source in zip(parts, self._kept[key], strict=True)
        ]

    def _copy(self, part: Tensor) -> Tensor:
        if not self._locks:
            return part.clone()
        blocks = LockedBlocks(1, part.nbytes)
        self._owners.append(blocks)
        return blocks.memory.by_block[0].copy_(part)


class FileHome:
    """A `WeightHome` in a temporary file, which the system removes when the process ends.

    Raises:
        InputError: if the file cannot be created; from `store`, if the disk is full.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[FileBytes]] = {}
        self._num_bytes = 0
        with _explain_disk_errors():
            file = tempfile.TemporaryFile(prefix="beamwright-weights-", buffering=0)  # noqa: SIM115
        self._handle = file.fileno()
        weakref.finalize(self, file.close)

    def store(self, key: Hashable, parts: Sequence[Tensor]) -> None:
        kept = self._kept[key] = []
        for part in parts:
            with _explain_disk_errors():
                written = FileBytes.write(self._handle, self._num_bytes, part.numpy())
            kept.append(written)
            self._num_bytes += written.num_bytes

    def pieces(self, key: Hashable, parts: Sequence[Tensor]) -> list[Piece]:
        return [
            Piece(to, source, source.num_bytes)
            for to, source in zip(parts, self._kept[key], strict=True)
        ]


@contextmanager
def _explain_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--weights-home disk: weights cannot be written to a temporary file ({error}). Free "
            "disk space there, or set TMPDIR to another folder."
        ) from error
