"""Where weights live that are not on the device: host memory, or a temporary file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from beamwright.errors import InputError, format_bytes
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
        InputError: from `store`, if the disk is full.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix="beamwright-weights-")  # noqa: SIM115
        self._kept: dict[Hashable, list[FileBytes]] = {}

    def store(self, key: Hashable, parts: Sequence[Tensor]) -> None:
        kept = []
        for part in parts:
            start = self._file.seek(0, os.SEEK_END)
            values = part.numpy()
            try:
                self._file.write(values.data)
                self._file.flush()
            except OSError as error:
                raise InputError(
                    f"--weights-home disk: writing {format_bytes(part.nbytes)} of weights to "
                    f"{tempfile.gettempdir()} failed ({error.strerror}). Free disk space there, "
                    "or set TMPDIR to another folder."
                ) from error
            kept.append(FileBytes.of(self._file.fileno(), start, values))
        self._kept[key] = kept

    def pieces(self, key: Hashable, parts: Sequence[Tensor]) -> list[Piece]:
        return [
            Piece(to, source, source.num_bytes)
            for to, source in zip(parts, self._kept[key], strict=True)
        ]
