"""TailBuffer: the newest tokens of the rows being decoded, contiguous per row.

Rows of one decode session advance together, so the KV of token t is one strided write and reading
the tail is a view. Tokens of one head lie next to each other: at 256 rows that reads four to six
times as fast as token by token (docs/experiments.md). It is a working copy in the layout that
attention wants; the blocks that are filled beside it own the tokens. It grows by doubling, up to a
constant of the attention backend, so that the order of partial sums does not depend on the memory
budget.
"""

from __future__ import annotations

import torch

from beamwright.kv.budget import ScratchMeter
from beamwright.kv.pool import KVLayout

FIRST_TOKENS = 16


class TailBuffer:
    """KV [layer, K or V, row, kv_head, token, head_dim] of up to `capacity` tokens a row.

    length: tokens that every row holds; the token being decoded is written at `length`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_rows: int,
        capacity: int,
        scratch: ScratchMeter,
        device: str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.layout = layout
        self._scratch, self._device = scratch, device
        self._counted = 0
        self.storage = self._allocate(num_rows, min(FIRST_TOKENS, capacity))

    @property
    def num_rows(self) -> int:
        """Rows of the present batch."""
        return self.storage.shape[2]

    @property
    def full(self) -> bool:
        """True if the next token has no place."""
        return self.length == self.capacity

    def make_room(self) -> None:
        """Make sure that the next token has a place."""
        held = self.storage.shape[4]
        if self.length < held:
            return
        old = self.storage
        self.storage = self._allocate(old.shape[2], min(2 * held, self.capacity))
        self.storage[..., :held, :] = old

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""
        self.storage[layer, :, :, :, self.length] = key_value.transpose(0, 1)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim], the current token included."""
        held = self.storage[layer, ..., : self.length + 1, :]
        return held[0], held[1]

    def take(self, row: int, first: int, end: int) -> torch.Tensor:
        """A row's tokens [first, end) in the pool's order [tokens, layers, 2, kv_heads, dim]."""
        return self.storage[:, :, row, :, first:end].permute(3, 0, 1, 2, 4)

    def restore(self, rows: list[torch.Tensor]) -> None:
        """Put back the tokens of rows that were parked: one [layers, 2, tokens, kv_heads, dim]
        per row, all of the same length."""
        self.length = 0
        for count in range(rows[0].shape[2]):
            self.length = count
            self.make_room()
        self.length = rows[0].shape[2]
        for row, held in enumerate(rows):
            self.storage[:, :, row, :, : self.length] = held.transpose(2, 3)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, in this order."""
        self.storage = self.storage.index_select(2, rows)
        self._count(self.storage)

    def clear(self) -> None:
        """Forget the tokens (they are in the pool)."""
        self.length = 0

    def close(self) -> None:
        """Give back the tail's bytes."""
        self._scratch.add(-self._counted)
        self._counted = 0

    def _allocate(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        shape = self._shape(num_rows, num_tokens)
        fresh = torch.empty(shape, dtype=self.layout.dtype, device=self._device)
        self._count(fresh)
        return fresh

    def _shape(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        layout = self.layout
        return (layout.num_layers, 2, num_rows, layout.num_kv_heads, num_tokens, layout.head_dim)

    def _count(self, storage: torch.Tensor) -> None:
        num_bytes = storage.numel() * storage.element_size()
        self._scratch.add(num_bytes - self._counted)
        self._counted = num_bytes
