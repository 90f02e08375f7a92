"""What a model's layers ask of attention, and what makes it; with what most do by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from beamwright.kv.link import Link
from beamwright.kv.pool import BlockPool, ByteBudget
from beamwright.kv.segments import Segment
from beamwright.kv.store import KVReader, SegmentStore
from beamwright.kv.tails import RowTails, SessionTail
from beamwright.library import Attention


class AttentionView:
    """KV of a fixed batch of rows, read and extended layer by layer.

    looks_ahead: it is told what a layer's queries would be if the one before it changed nothing.
    states: those of recurrent layers, see `models.recurrent`; None: rows begin from zeros, and
        nobody keeps theirs.
    """

    looks_ahead: bool = False
    states: Any = None

    def attend(self, layer: int, query: Any, key_value: Any, sinks: Any = None) -> Any:
        """Store tokens' own keys and values [tokens, 2, kv_heads, head_dim], then give their
        context [tokens, heads, head_dim] for `query` [tokens, heads, head_dim].

        Scores are divided by the root of head_dim. It may wait (for a transfer) before it answers.
        sinks: a score per head [heads] that joins the softmax, and brings no value.
        """
        raise NotImplementedError

    def foresee(self, layer: int, query: Any) -> None:
        """query [tokens, heads, head_dim]; only where it `looks_ahead`."""

    def prepare(self, num_heads: int, num_tokens: int = 1) -> None:
        """Write what layers only read from here on; of a pass over so many tokens."""

    def close(self) -> None:
        """Give back what the view charged to the budget."""


class DecodeView(AttentionView):
    """One token per row and call; rows share a tail that `advance` moves on."""

    def described(self) -> Sequence[Attention] | None:
        """What the library attends to, by group of layers, where it can do so layer by layer by
        itself; None: `attend` is to be called."""
        return None

    def keep_rows(self, rows: Any) -> None:
        """Continue with these rows only (a compacted batch)."""

    def spread(self, rows: Any) -> None:
        """Compute several tokens of some rows and none of others: number i is one of row rows[i],
        at the place that the tail says; None: one of every row again."""

    def count_rows(self, num_rows: int) -> None:
        """The first `num_rows` rows are real; the others pad the batch and move no bytes."""

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Nobody reads these rows' context: their KV may be evicted or freed at any time."""

    def own(self, segments: Sequence[Segment | None]) -> None:
        """Who writes these rows, for a view that keeps something of them; None pads the batch."""

    def settle(self) -> None:
        """Nothing that is done ahead of its token reads the tail or the store any more."""


class Workspace(Protocol):
    """What views share, one after the other."""

    @property
    def num_moves(self) -> int:
        """How often memory was allocated anew."""

    def release(self) -> None:
        """Give working memory back."""


class AttentionBackend:
    """Makes views over stored paths.

    decode_view(store, paths, tail): for one token per row; where there is a workspace, with it.
    prefill_view(store, paths, lengths): for `lengths[i]` new tokens after path i.
    tail_tokens: most tokens of a row that are in its tail before attention reads them as sealed.
    copies_per_beam: every beam reads its own copy of its path (the LBS paper's layout).
    spreads: its decode views do. writes_blocks: they write a token's KV straight into blocks, and
        a tail says where. keeps: its prefill views may write KV to the pool themselves.
    holds_places: its decode views know where tokens are in the pool; others have copies of them.
    tested: the one that the start-up self-test checks in its place, where it stands around another.
    """

    name: str
    tail_tokens: int
    decode_view: Callable[..., DecodeView]
    prefill_view: Callable[..., AttentionView]
    copies_per_beam: bool = False
    spreads: bool = False
    writes_blocks: bool = False
    keeps: bool = False
    holds_places: bool = False
    tested: AttentionBackend | None = None

    def make_tail(self, store: KVReader, group: int = 0, *, stays: bool = False) -> SessionTail:
        """Rows' newest tokens in this group's layers. stays: see `RowTails`."""
        del group
        return RowTails(store, self.tail_tokens, stays=stays)

    def workspace(self, store: Any) -> Workspace | None:
        """Of decode views of this store; None: they share nothing."""
        return None

    def prefill_workspace(self, store: Any, num_heads: int, num_tokens: int) -> Workspace:
        """Of prefill views of passes over up to so many tokens, where the backend `keeps`."""
        raise NotImplementedError


StoreMaker = Callable[[BlockPool, torch.device, Link, ByteBudget], SegmentStore]
"""(host pool, compute device, link, device budget) to the store of all KV on the host."""


@dataclass(frozen=True)
class KVMethod:
    """How a generator's KV is stored, and how attention reads it.

    The default is a pool on the device, read as `--attention` says. A schedule or sparse decoding
    may return another method, for models whose layers all keep KV in the same way.

    option: the option that selects this method, as error messages name it.
    home_option: the option that keeps all KV on the host, in the store that `make_store` returns.
        The generator's device budget then belongs to that store and never moves to the verifier.
    has_tier: KV may be evicted to the host.
    attend: (settings, backend, decoder) to the backend that wraps this one. Raises InputError where
        the three do not go together.
    tails_apart: the rows' newest tokens are not charged to the KV budget, so the memory plan keeps
        room for them.
    most_rows: (shape, bytes of a token, KV bytes) to the most rows whose reads fit that budget.
    """

    option: str | None = None
    home_option: str | None = None
    has_tier: bool = True
    make_store: StoreMaker | None = None
    attend: Callable[..., AttentionBackend] | None = None
    tails_apart: bool = True
    most_rows: Callable[[Any, int, int], int] | None = None
