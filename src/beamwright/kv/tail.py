"""TailBuffer: the newest tokens of the rows being decoded, contiguous per row.

Rows of one decode session advance together, so the KV of token t is one strided write and reading
the tail is a view. When it is full, whole blocks move to the pool (the capacity is a constant, so
the order of partial sums does not depend on the memory budget).
"""

from __future__ import annotations

import torch

from beamwright.kv.budget import DeviceBudget
from beamwright.kv.pool import KVLayout

TAIL_TOKENS = 64


class TailBuffer:
    """KV [layer, row, token, K or V, kv_head, head_dim] of up to `TAIL_TOKENS` tokens a row.

    length: tokens that every row holds; the token being decoded is written at `length`.
    """

    def __init__(
        self, layout: KVLayout, num_rows: int, budget: DeviceBudget, device: str = "cpu"
    ) -> None:
        self.capacity = TAIL_TOKENS
        self.length = 0
        self._budget = budget
        self._charged = num_rows * self.capacity * layout.bytes_per_token
        budget.charge(self._charged, f"the tails of {num_rows} beams")
        shape = (
            layout.num_layers,
            num_rows,
            self.capacity,
            2,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.storage = torch.empty(shape, dtype=layout.dtype, device=device)

    @property
    def num_rows(self) -> int:
        """Rows of the present batch."""
        return self.storage.shape[1]

    @property
    def full(self) -> bool:
        """True if the next token has no place."""
        return self.length == self.capacity

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""
        self.storage[layer, :, self.length] = key_value

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim], the current token included."""
        held = self.storage[layer, :, : self.length + 1]
        return held[:, :, 0].transpose(1, 2), held[:, :, 1].transpose(1, 2)

    def take(self, row: int, num_tokens: int) -> torch.Tensor:
        """A row's first tokens in the pool's order [tokens, layers, 2, kv_heads, head_dim]."""
        return self.storage[:, row, :num_tokens].transpose(0, 1)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, in this order."""
        self.storage = self.storage.index_select(1, rows)

    def clear(self) -> None:
        """Forget the tokens (they are in the pool)."""
        self.length = 0

    def close(self) -> None:
        """Release the tail's bytes."""
        self._budget.release(self._charged)
        self._charged = 0
