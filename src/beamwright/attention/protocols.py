"""Interfaces of attention: views, which a model's layers call, and backends, which make views.

The base classes implement what most views and backends have in common.
"""

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
    """The KV of one batch of rows. A model's layers read and extend it by calling `attend`."""

    # True if the model calls `foresee` before each layer.
    looks_ahead: bool = False
    # The `RowStates` of recurrent layers (`models.recurrent_layers`). None: rows start from zero
    # states, and their states are not kept.
    states: Any = None

    def attend(self, layer: int, query: Any, key_value: Any, sinks: Any = None) -> Any:
        """Store keys and values of the current tokens, and return the tokens' attention context.

        Scores are divided by the square root of head_dim. The call may wait for a transfer.

        Args:
            query: [tokens, heads, head_dim].
            key_value: keys and values of the same tokens [tokens, 2, kv_heads, head_dim].
            sinks: one score per head [heads] that joins the softmax without a value.

        Returns:
            The context [tokens, heads, head_dim].
        """
        raise NotImplementedError

    def foresee(self, layer: int, query: Any) -> None:
        """Receive an estimate of a layer's `query` [tokens, heads, head_dim] before the layer runs.

        Sparse attention selects and loads KV by the estimate, which is what the query would be if
        the previous layer changed nothing. Models call this method only if `looks_ahead` is true.
        """

    def prepare(self, num_heads: int, num_tokens: int = 1) -> None:
        """Write the tables that the layers of a pass over `num_tokens` tokens read.

        Before a pass in a CUDA graph, this call is required.
        """

    def close(self) -> None:
        """Free the view's memory, and release its bytes from the KV budget."""


class DecodeView(AttentionView):
    """A view for decoding: each pass computes one token of every row.

    The rows share a tail object, which holds the newest tokens of each row that are not yet in
    blocks. The tail's `advance` moves all rows on to the next token.
    """

    def describe_layers(self) -> Sequence[Attention] | None:
        """Describe the attention per group of layers, so that the C library can run all layers.

        Return None if the model has to call `attend` for each layer.
        """
        return None

    def keep_rows(self, rows: Any) -> None:
        """Continue with only the rows with indices `rows` (a compacted batch)."""

    def set_query_rows(self, rows: Any) -> None:
        """Let the next pass compute any number of tokens per row.

        Token i of the pass belongs to row rows[i]; the tail's `places` tell its index in the row's
        tail. rows is None: from now on, each pass computes one token of every row.
        """

    def set_num_rows(self, num_rows: int) -> None:
        """Set the number of real rows. The rows after these pad the batch; no KV moves for them."""

    def deactivate_rows(self, rows: Sequence[int]) -> None:
        """Stop reading the KV of `rows`, which may now be evicted; their context is not used."""

    def bind_segments(self, segments: Sequence[Segment | None]) -> None:
        """Set the segment that each row writes; None for a padding row.

        A view may attach data to a segment, such as the row's latest queries.
        """

    def wait_for_threads(self) -> None:
        """Wait until no background thread of the view reads the tail or the store."""


class Workspace(Protocol):
    """Working memory that consecutive views use, one after the other."""

    @property
    def num_moves(self) -> int:
        """Number of reallocations. CUDA graphs captured before the last one are invalid."""

    def release(self) -> None:
        """Free the working memory."""


class AttentionBackend:
    """Base of attention backends (`--attention`), which make the views over stored paths."""

    name: str
    # Maximum number of tokens in a row's tail. The tokens of a full tail are moved to blocks, where
    # attention reads them as part of the row's path.
    tail_tokens: int
    # Makes a view for one token per row from (store, paths, tail), and from the workspace as fourth
    # argument if the backend has one.
    decode_view: Callable[..., DecodeView]
    # Makes a view for `lengths[i]` new tokens after path i from (store, paths, lengths).
    prefill_view: Callable[..., AttentionView]
    # True if every beam reads its own copy of its path (the LBS paper's layout).
    copies_per_beam: bool = False
    # True if the decode views implement `set_query_rows`.
    sets_query_rows: bool = False
    # True if decode views write a token's KV directly into blocks; the tail then only holds the
    # addresses of these blocks.
    writes_blocks: bool = False
    # True if prefill views can write KV to the pool themselves.
    prefill_writes_kv: bool = False
    # True if decode views hold addresses of blocks in the pool, so that a view must be rebuilt when
    # blocks move. Other decode views hold copies of the KV.
    holds_block_numbers: bool = False
    # The backend that this one wraps, which the start-up self-test checks instead; None if this
    # backend is not a wrapper.
    tested: AttentionBackend | None = None

    def make_tail(self, store: KVReader, group: int = 0, *, stays: bool = False) -> SessionTail:
        """Make the tail for the layers of `group`; `stays` is explained in `RowTails`."""
        del group
        return RowTails(store, self.tail_tokens, stays=stays)

    def workspace(self, store: Any) -> Workspace | None:
        """Make the workspace of decode views over `store`; None if views share no memory."""
        return None

    def prefill_workspace(self, store: Any, num_heads: int, num_tokens: int) -> Workspace:
        """Make the workspace of prefill views of up to `num_tokens` tokens, if they write KV."""
        raise NotImplementedError


# Makes a store that keeps all KV on the host, from (host pool, compute device, link, device
# budget).
StoreMaker = Callable[[BlockPool, torch.device, Link, ByteBudget], SegmentStore]


@dataclass(frozen=True)
class KVMethod:
    """How a generator's KV is stored, and how attention reads it.

    The default is a pool on the device, read as `--attention` says. A schedule or sparse decoding
    may return another method, for models whose layers all keep KV in the same way.

    option: the command-line option that selects this method, for error messages.
    home_option: the option that keeps all KV on the host, in the store that `make_store` returns.
        The generator's device budget then belongs to that store and never moves to the verifier.
    has_tier: True if KV may be evicted to the host.
    attend: function of (settings, backend, decoder) that returns a backend that wraps `backend`. It
        raises InputError if the three are incompatible.
    tails_apart: True if tails (the rows' newest tokens) are not charged to the KV budget, so that
        the memory plan must reserve memory for tails.
    most_rows: function of (shape, bytes per token, KV budget in bytes) that returns the maximum
        number of rows for which the KV that they select fits the budget.
    """

    option: str | None = None
    home_option: str | None = None
    has_tier: bool = True
    make_store: StoreMaker | None = None
    attend: Callable[..., AttentionBackend] | None = None
    tails_apart: bool = True
    most_rows: Callable[[Any, int, int], int] | None = None
