"""OwnBlocks: where the kernels find the newest tokens of the rows of a decode session.

They are where they stay, in the blocks of the rows' segments: whoever decodes has reserved these
before a token is computed, and what is stored is only counted. Rows without a segment, and tokens
beyond what is reserved, which nobody keeps, are in the pool's spare block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from beamwright.attention.kernels.worklist import entry_size
from beamwright.kv.segments import Segment
from beamwright.kv.store import KVReader
from beamwright.kv.streams import sent

_LEAST_ROWS = 64


class OwnBlocks:
    """Of one group of layers: a `kv.tails.Tail` that holds no KV, for a view of the kernels.

    table: [rows, entries] int32, entries of the pool that hold up to `capacity` tokens a row.
    counts: [rows] int32, tokens of these, the current one included.
    group: number of the group.
    """

    def __init__(self, store: KVReader, capacity: int, group: int = 0) -> None:
        self._size = store.kv.block_tokens
        self._entry, self._group = entry_size(self._size), group
        self.capacity = self.num_tokens = capacity
        self.num_rows, self.num_moves = 0, 0
        self._spare = len(store.kv.storage) - 1  # see `BlockPool`
        self._per_row = capacity // self._entry
        self._flat = torch.zeros(0, dtype=torch.int32, device=store.compute_device)
        self._blocks = np.zeros((0, 1), dtype=np.int32)
        self._firsts = np.zeros(0, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        return self._flat.nbytes

    @property
    def counts(self) -> torch.Tensor:
        return self._flat[: self.num_rows]

    @property
    def table(self) -> torch.Tensor:
        used = self._flat[self.num_rows : self.num_rows * (1 + self._per_row)]
        return used.view(self.num_rows, self._per_row)

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Go on with so many rows."""
        needed = max(_LEAST_ROWS, num_rows) * (1 + self._per_row)
        if needed > len(self._flat):
            self._flat = self._flat.new_zeros(needed)
            self.num_moves += 1
        self.num_rows = num_rows

    def restore(self, row: int, held: object) -> None:
        """Nothing: a row's tokens are in its blocks."""

    def take(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Nothing is missing in the blocks of segments."""
        return []

    def find(self, rows: Sequence[tuple[Segment, int] | None]) -> None:
        """Rows go on in the blocks of these segments, behind so many tokens of them."""
        size, shape = self._size, (self.num_rows, max(1, self.capacity // self._size))
        self._blocks = np.full(shape, self._spare, dtype=np.int32)
        self._firsts = np.zeros((self.num_rows, 1), dtype=np.int32)
        for place, row in enumerate(rows):
            if row is not None:
                first = row[1] // size
                held = row[0].group_segments[self._group].blocks[first : first + shape[1]]
                self._blocks[place, : len(held)] = held
                self._firsts[place] = row[1] % size // self._entry

    def begin(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Rows hold so many tokens each; None for unread rows."""
        del max_tokens
        pieces = self._size // self._entry
        held = self._blocks.repeat(self._per_row // self._blocks.shape[1], axis=1) * pieces
        counts = [1 if length is None else length + 1 for length in lengths]
        table = held + (self._firsts + np.arange(self._per_row, dtype=np.int32)) % pieces
        both = np.concatenate([np.array(counts, dtype=np.int32), table.ravel()])
        self._flat[: len(both)].copy_(sent(both, self._flat.device))

    def advance(self) -> None:
        """The current token is complete, on the device."""
        self.counts.add_(1)

    def close(self) -> None:
        """No rows are left."""
        self.num_rows = 0

    def release(self) -> None:
        """Give the memory back: it is little, and stays."""
