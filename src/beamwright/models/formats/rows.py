"""Rows of one tensor, read from its file when they are asked for: an embedding has many, and a pass
wants few.

Nothing is mapped or kept: what is read often is in the system's cache, which it may drop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from beamwright.errors import InputError


class StoredRows:
    """Indexed as the whole tensor would be, with the same values.

    start: of its first row in the file. turn: from bytes [rows, row_bytes] to values
    [rows, columns].
    """

    def __init__(
        self, file: Path, start: int, row_bytes: int, turn: Callable[[Tensor], Tensor]
    ) -> None:
        self._where, self._turn = (file, start, row_bytes), turn
        self._handle = os.open(file, os.O_RDONLY)  # who replaces the file does not change it
        finalize(self, os.close, self._handle)

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """[tokens, columns] of [tokens].

        Raises:
            InputError: if the file has become shorter.
        """
        file, start, size = self._where
        places = [start + size * token for token in token_ids.tolist()]
        read = bytearray().join([os.pread(self._handle, size, place) for place in places])
        if len(read) != size * len(places):
            raise InputError(f"model file {file}: it ends too early")
        return self._turn(torch.frombuffer(read, dtype=torch.uint8).view(-1, size))
