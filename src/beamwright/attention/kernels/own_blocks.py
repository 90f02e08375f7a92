"""OwnBlocks: tables of the blocks to which decode kernels write each row's newest tokens.

Other backends hold KV of a row's newest tokens in a tail buffer. The kernels write this KV directly
into the blocks of the row's segment. The session reserves these blocks before a token is computed,
so storing tokens only updates counts. KV of rows without a segment, and of tokens past the reserved
blocks, is written to the pool's spare block, that is, discarded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from beamwright.attention.kernels.worklist import entry_size
from beamwright.kv.segments import Segment
from beamwright.kv.store import KVReader
from beamwright.kv.streams import send_to_device

_LEAST_ROWS = 64


class OwnBlocks:
    """The `SessionTail` of the kernels, for one group of layers. It holds addresses but no KV.

    An entry is a block of the pool, or a piece of a block with `entry_size` tokens.

    table: [rows, entries] int32, the entries that hold up to `capacity` newest tokens per row.
    counts: [rows] int32, the number of newest tokens per row, the current token included.
    """

    def __init__(self, store: KVReader, capacity: int, group: int = 0) -> None:
        self._size = store.kv.block_tokens
        self._entry, self._group = entry_size(self._size), group
        self.capacity = self.num_tokens = capacity
        self.num_rows, self.num_moves = 0, 0
        self._spare = len(store.kv.storage) - 1  # the pool's last block, which no segment owns
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
        """Set the number of rows. Later, `set_segments` and `set_lengths` fill the tables."""
        needed = max(_LEAST_ROWS, num_rows) * (1 + self._per_row)
        if needed > len(self._flat):
            self._flat = self._flat.new_zeros(needed)
            self.num_moves += 1
        self.num_rows = num_rows

    def restore(self, row: int, held: object) -> None:
        """Do nothing: the tokens of `row` are already in its blocks."""

    def read_tokens(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Return no tokens: the blocks of the segments already contain all of them."""
        return []

    def set_segments(self, rows: Sequence[tuple[Segment, int] | None]) -> None:
        """Set each row's segment, and the number of the segment's tokens before the newest ones.

        None in place of a row: it has no segment, and uses the spare block.
        """
        size, shape = self._size, (self.num_rows, max(1, self.capacity // self._size))
        self._blocks = np.full(shape, self._spare, dtype=np.int32)
        self._firsts = np.zeros((self.num_rows, 1), dtype=np.int32)
        for place, row in enumerate(rows):
            if row is not None:
                first = row[1] // size
                held = row[0].group_segments[self._group].blocks[first : first + shape[1]]
                self._blocks[place, : len(held)] = held
                self._firsts[place] = row[1] % size // self._entry

    def set_lengths(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Write the tables to the device.

        lengths: number of newest tokens that each row already has; None for padding rows.
        """
        del max_tokens
        pieces = self._size // self._entry
        held = self._blocks.repeat(self._per_row // self._blocks.shape[1], axis=1) * pieces
        counts = [1 if length is None else length + 1 for length in lengths]
        table = held + (self._firsts + np.arange(self._per_row, dtype=np.int32)) % pieces
        both = np.concatenate([np.array(counts, dtype=np.int32), table.ravel()])
        self._flat[: len(both)].copy_(send_to_device(both, self._flat.device))

    def advance(self) -> None:
        """Add the current token to the counts, by an operation that a CUDA graph can capture."""
        self.counts.add_(1)

    def close(self) -> None:
        """Remove all rows."""
        self.num_rows = 0

    def release(self) -> None:
        """Do nothing: the tables are small, so their memory is kept."""
