"""Backends `triton-tree` and `triton-dense`: views that run the kernels on the paged pool itself.

Nothing is packed: kernels read blocks where they stand, so a view holds block tables and partial
results, and everything that its rows read must stay on the device (a lease sees to that). Where
rows are dropped their blocks may go; a tree's table may go on naming them until it is rebuilt, as
what such rows compute is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamwright.attention.kernels.choice import why_no_kernels
from beamwright.attention.kernels.cuts import Cuts
from beamwright.attention.kernels.launch import Partials, decode_attention, prefill_attention
from beamwright.attention.kernels.tiles import HeadLayout, decode_tile, prefill_tile
from beamwright.attention.kernels.worklist import WorkBuffers, decode_work, prefill_work
from beamwright.attention.layers import Tail
from beamwright.errors import InputError
from beamwright.kv import Path, SegmentStore


@dataclass(frozen=True)
class KernelOptions:
    """What sets `triton-tree` and `triton-dense` apart.

    cuts: where paths are cut into parts.
    copy_per_row: every row reads its own device copy of its path.
    """

    cuts: Cuts
    copy_per_row: bool


class KernelDecode:
    """One new token per row: parts of the paths, then the rows' own tails, then the merge."""

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], tail: Tail, options: KernelOptions
    ) -> None:
        self._store, self._tail, self._options = store, tail, options
        self._paths = list(paths)
        self._live = [True] * len(paths)
        device = store.pool.storage.device
        self._buffers = WorkBuffers(device)
        self._num_tail = torch.zeros(1, dtype=torch.int32, device=device)
        self._work: list[torch.Tensor] = []
        self._partials: Partials | None = None
        self._counted = 0
        self._stale = True

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        self._tail.write(layer, key_value)
        kv_heads, head_dim = key_value.shape[2:]
        heads = HeadLayout(kv_heads, query.shape[1] // kv_heads, head_dim)
        tile = decode_tile(heads, query.element_size())
        if self._stale:
            self._rebuild(heads, tile.queries)
        if layer == 0:
            self._num_tail.fill_(self._tail.length + 1)
        assert self._partials is not None
        return decode_attention(
            query,
            self._store.pool.storage[:, layer],
            self._tail.read(layer),
            self._num_tail,
            self._work,
            self._partials,
            heads,
            tile,
        )

    def keep_rows(self, rows: torch.Tensor) -> None:
        """See `protocols.DecodeView`. The tables are rebuilt before the next token."""
        kept = rows.tolist()
        self._paths = [self._paths[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._stale = True

    def count_rows(self, num_rows: int) -> None:
        """See `protocols.DecodeView`. Nothing here depends on it."""

    def drop_rows(self, rows: Sequence[int]) -> None:
        """See `protocols.DecodeView`."""
        for row in rows:
            self._live[row] = False
        # With copies, the copy that goes may be one that another row reads: rows move up.
        self._stale = self._stale or self._options.copy_per_row

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._store.scratch.add(-self._counted)
        self._counted = 0
        self._partials = None

    def _rebuild(self, heads: HeadLayout, queries_per_tile: int) -> None:
        work = decode_work(
            [path if live else None for path, live in zip(self._paths, self._live, strict=True)],
            self._store.pool.block_tokens,
            self._options.cuts,
            queries_per_tile,
            copy_per_row=self._options.copy_per_row,
        )
        self._work = self._buffers.write(work)
        num_slots, num_rows = len(self._work[3]), len(self._paths)
        held = self._partials
        if held is None or held.first_tail < num_slots:
            device = self._store.pool.storage.device
            self._partials = Partials.empty(heads, num_slots, num_rows, device)
            self._store.scratch.add(self._partials.num_bytes - self._counted)
            self._counted = self._partials.num_bytes
        self._stale = False


class KernelPrefill:
    """Several new tokens per path: each chunk over its path's blocks, then causally over itself."""

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        options: KernelOptions,
    ) -> None:
        self._store, self._paths, self._lengths = store, list(paths), list(lengths)
        self._options = options
        self._work: list[torch.Tensor] = []

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        kv_heads, head_dim = key_value.shape[2:]
        heads = HeadLayout(kv_heads, query.shape[1] // kv_heads, head_dim)
        tile = prefill_tile(heads, query.element_size())
        storage = self._store.pool.storage
        if not self._work:
            work = prefill_work(
                self._paths,
                self._lengths,
                self._store.pool.block_tokens,
                tile.queries,
                copy_per_row=self._options.copy_per_row,
            )
            self._work = WorkBuffers(storage.device).write(work)
        num_tokens = sum(self._lengths)
        return prefill_attention(
            query, key_value, storage[:, layer], self._work, num_tokens, heads, tile
        )

    def close(self) -> None:
        """See `protocols.AttentionView`. Nothing is charged here."""


class KernelAttention:
    """A backend that runs the kernels.

    Raises:
        InputError: from its views, if the kernels cannot run on the store's tensors.
    """

    tail_tokens = 256

    def __init__(self, name: str, options: KernelOptions) -> None:
        self.name = name
        self.copies_per_beam = options.copy_per_row
        self._options = options

    def decode_view(self, store: SegmentStore, paths: Sequence[Path], tail: Tail) -> KernelDecode:
        """A view for one token per row."""
        self._check(store)
        return KernelDecode(store, paths, tail, self._options)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> KernelPrefill:
        """A view for `lengths[i]` new tokens after path i."""
        self._check(store)
        return KernelPrefill(store, paths, lengths, self._options)

    def _check(self, store: SegmentStore) -> None:
        reason = why_no_kernels(store.pool.storage.device, store.pool.layout.dtype)
        if reason is not None:
            raise InputError(f"--attention {self.name}: {reason}")


def triton_tree() -> KernelAttention:
    """Backend `triton-tree`: every stored segment is read once for all rows under it."""
    return KernelAttention("triton-tree", KernelOptions(Cuts(), copy_per_row=False))


def triton_dense() -> KernelAttention:
    """Backend `triton-dense`: every row reads its own copy. Nothing is shared, so all is joined."""
    return KernelAttention("triton-dense", KernelOptions(Cuts(fresh_tokens=0), copy_per_row=True))
