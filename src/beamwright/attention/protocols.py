"""What a model's layers ask of attention, and what makes it. Types only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


class AttentionView(Protocol):
    """KV of a fixed batch of rows, read and extended layer by layer.

    `attend(layer, query, key_value)` stores the tokens' own keys and values
    [tokens, 2, kv_heads, head_dim], then returns their context [tokens, heads, head_dim] for
    `query` [tokens, heads, head_dim]. Scores are divided by the root of head_dim. It may wait (for
    a transfer) before it answers.
    sinks: a score per head [heads] that joins the softmax, and brings no value.
    """

    def attend(self, layer: int, query: Any, key_value: Any, sinks: Any = None) -> Any: ...

    def close(self) -> None:
        """Give back what the view charged to the budget."""


@runtime_checkable
class LooksAhead(Protocol):
    """An `AttentionView` that wants to know a layer's queries while the one before it is computed.

    They are computed from what that layer begins with: its own part is missing.
    """

    @property
    def looks_ahead(self) -> bool: ...

    def foresee(self, layer: int, query: Any) -> None:
        """query [tokens, heads, head_dim]."""


class DecodeView(AttentionView, Protocol):
    """One token per row and call; rows share a tail that `advance` moves on.

    A view with `spread(rows)` computes several tokens of some rows and none of others: number i is
    one of row rows[i], at the place that the tail says; None: one of every row again.
    """

    def keep_rows(self, rows: Any) -> None:
        """Continue with these rows only (a compacted batch)."""

    def count_rows(self, num_rows: int) -> None:
        """The first `num_rows` rows are real; the others pad the batch and move no bytes."""

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Nobody reads these rows' context: their KV may be evicted or freed at any time."""


class AttentionBackend(Protocol):
    """Makes views over stored paths. `paths` are tuples of (segment, visible tokens).

    tail_tokens: most tokens of a row that are in its tail before attention reads them as sealed.
    copies_per_beam: every beam reads its own copy of its path (the LBS paper's layout).
    """

    name: str
    tail_tokens: int
    copies_per_beam: bool

    def decode_view(self, store: Any, paths: Sequence[Any], tail: Any) -> DecodeView: ...

    def prefill_view(
        self, store: Any, paths: Sequence[Any], lengths: Sequence[int]
    ) -> AttentionView: ...
