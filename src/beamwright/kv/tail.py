"""What a decode session and its attention views ask of a tail, wherever its layers reside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Tail(Protocol):
    """The newest tokens of the rows being decoded, contiguous per row.

    `RowTails` has them on the device; `layerwise` has a tail whose layers are streamed.
    capacity: most tokens of a row. num_rows: padding included. num_tokens: for which every row has
    places. num_moves: how often memory was allocated anew.
    places: [rows] where each row's current token is written. mask: additive [rows, 1, 1, tokens]
    over what `read` returns; None where all of it is seen.
    """

    capacity: int

    @property
    def num_rows(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_moves(self) -> int: ...

    @property
    def places(self) -> torch.Tensor: ...

    @property
    def mask(self) -> torch.Tensor | None: ...

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Go on with these rows in this order, and with free ones behind them."""
        ...

    def restore(self, row: int, held: torch.Tensor) -> None:
        """Put back a row's tokens [layers, 2, tokens, kv_heads, head_dim]."""
        ...

    def begin(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Rows hold so many tokens each, and get up to `max_tokens` more; None for unread rows."""
        ...

    def advance(self) -> None:
        """The current token is complete."""
        ...

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""
        ...

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim], the current token included."""
        ...

    def take(self, row: int, first: int, end: int) -> Any:
        """A row's tokens [first, end), as the `append` of its store wants them."""
        ...

    def close(self) -> None:
        """No rows are left."""
        ...

    def release(self) -> None:
        """Give the memory back."""
        ...
