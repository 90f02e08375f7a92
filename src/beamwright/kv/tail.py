"""TailBuffer: the newest tokens of the rows being decoded, contiguous per row.

Rows of one decode session advance together, so the KV of token t is one strided write and reading
the tail is a view. Tokens of one head stand next to each other: at 256 rows that reads four to six
times as fast as token by token (docs/experiments.md). It grows by doubling; when it is full, whole
blocks move to the pool. The limit is a constant of the attention backend, so the order of
partial sums does not depend on the memory budget.
"""

from __future__ import annotations

import torch

from beamwright.kv.budget import DeviceBudget
from beamwright.kv.pool import KVLayout

_FIRST_TOKENS = 16


class TailBuffer:
    """KV [layer, K or V, row, kv_head, token, head_dim] of up to `capacity` tokens a row.

    length: tokens that every row holds; the token being decoded is written at `length`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_rows: int,
        capacity: int,
        budget: DeviceBudget,
        device: str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self._layout, self._budget, self._device = layout, budget, device
        self._charged = 0
        self.storage = self._allocate(num_rows, min(_FIRST_TOKENS, capacity))

    @property
    def num_rows(self) -> int:
        """Rows of the present batch."""
        return self.storage.shape[2]

    @property
    def full(self) -> bool:
        """True if the next token has no place."""
        return self.length == self.capacity

    def make_room(self) -> None:
        """Make sure that the next token has a place.

        Raises:
            CapacityError: if the larger tail does not fit the budget.
        """
        held = self.storage.shape[4]
        if self.length < held:
            return
        old, old_bytes = self.storage, self._charged
        self.storage = self._allocate(old.shape[2], min(2 * held, self.capacity))
        self.storage[..., :held, :] = old
        self._release(old_bytes)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""
        self.storage[layer, :, :, :, self.length] = key_value.transpose(0, 1)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim], the current token included."""
        held = self.storage[layer, ..., : self.length + 1, :]
        return held[0], held[1]

    def take(self, row: int, num_tokens: int) -> torch.Tensor:
        """A row's first tokens in the pool's order [tokens, layers, 2, kv_heads, head_dim]."""
        return self.storage[:, :, row, :, :num_tokens].permute(3, 0, 1, 2, 4)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, in this order."""
        self.storage = self.storage.index_select(2, rows)
        self._release(self._charged - self._bytes(len(rows), self.storage.shape[4]))

    def clear(self) -> None:
        """Forget the tokens (they are in the pool)."""
        self.length = 0

    def close(self) -> None:
        """Release the tail's bytes."""
        self._release(self._charged)

    def _bytes(self, num_rows: int, num_tokens: int) -> int:
        return num_rows * num_tokens * self._layout.bytes_per_token

    def _allocate(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        num_bytes = self._bytes(num_rows, num_tokens)
        self._budget.charge(num_bytes, f"the tails of {num_rows} beams")
        self._charged += num_bytes
        layout = self._layout
        shape = (layout.num_layers, 2, num_rows, layout.num_kv_heads, num_tokens, layout.head_dim)
        return torch.empty(shape, dtype=layout.dtype, device=self._device)

    def _release(self, num_bytes: int) -> None:
        self._budget.release(num_bytes)
        self._charged -= num_bytes
