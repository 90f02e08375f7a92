"""Backends `triton-tree` and `triton-dense`: attention views that run the Triton kernels.

Kernels read blocks in place, so a view only holds work lists with block numbers, and memory for
partial results. All KV that a view's rows read must stay on the device: the caller pins it by a
lease. The blocks of dropped rows may be freed. The work lists of `triton-tree` may still name freed
blocks until they are rebuilt, because the results of dropped rows are never used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from beamwright.attention.kernels import why_no_kernels
from beamwright.attention.kernels.launch import (
    Partials,
    decode_attention,
    heads_of,
    prefill_attention,
    tile_of_prefill,
)
from beamwright.attention.kernels.own_blocks import OwnBlocks
from beamwright.attention.kernels.worklist import (
    Cuts,
    DecodeWork,
    HeadLayout,
    Ints,
    WorkBuffers,
    decode_tile,
    make_decode_work,
    make_prefill_work,
    max_tiles,
    power_of_two,
)
from beamwright.attention.protocols import AttentionBackend, AttentionView, DecodeView
from beamwright.errors import InputError
from beamwright.kv.segments import Path
from beamwright.kv.store import KVReader, SegmentStore
from beamwright.plan.blocks import ROW_PARTS

_LEAST_ROWS, _LEAST_ITEMS = 64, 256
_ROW_ENTRIES = 64  # work-list entries reserved per row, enough if rows share much of their paths


class KernelWorkspace:
    """Work lists and partial results that consecutive decode views share.

    Their addresses stay the same until the memory has to grow. `num_moves` counts reallocations.
    CUDA graphs captured before a reallocation are invalid.

    stays: True: later views use the workspace too, so it reserves the memory that most searches
        with the same number of rows need.
    """

    def __init__(self, store: SegmentStore, *, stays: bool) -> None:
        self._scratch, self._device = store.scratch, store.kv.storage.device
        self._stays = stays
        self._buffers = WorkBuffers(self._device, headroom=2 if stays else 1)
        self._partials: Partials | None = None
        self._num_partials = self._counted = 0

    @property
    def num_moves(self) -> int:
        return self._buffers.num_moves + self._num_partials

    def write(
        self, work: DecodeWork, heads: HeadLayout, num_rows: int
    ) -> tuple[list[Tensor], Partials]:
        """Write `work` to the device; return its lists, and partial results for `num_rows` rows."""
        num_rows = max(num_rows, _LEAST_ROWS) if self._stays else num_rows
        lists = self._buffers.write(work, _reserved_lengths(num_rows) if self._stays else {})
        num_slots, held = len(lists[4]), self._partials
        if held is None or held.first_own < num_slots or held.num_rows < num_rows:
            num_rows = max(num_rows, held.num_rows if held is not None else 0)
            held = Partials(heads, num_slots, num_rows, self._device)
            self._partials = held
            self._num_partials += 1
            self._count(held.num_bytes)
        return lists, held

    def release(self) -> None:
        """Free the partial results. The work lists are small and stay."""
        self._partials = None
        self._count(0)

    def _count(self, num_bytes: int) -> None:
        self._scratch.count_unchecked(num_bytes - self._counted)
        self._counted = num_bytes


def _reserved_lengths(num_rows: int) -> dict[str, int]:
    """Return the reserved length of each work list for `num_rows` rows.

    Only few spare items are reserved, because every item costs a program, even an empty one.
    """
    slots, entries = num_rows * ROW_PARTS, num_rows * _ROW_ENTRIES
    return {
        "items": 4 * max(_LEAST_ITEMS, 2 * num_rows),
        **dict.fromkeys(("entry_blocks", "entry_tokens", "entry_firsts"), entries),
        **dict.fromkeys(("slot_rows", "slot_reach", "row_slots"), slots),
        "row_parts": 2 * num_rows,
    }


class KernelDecode(DecodeView):
    """A `DecodeView` that runs the kernels over parts of paths and rows' newest tokens.

    workspace: a workspace that the caller keeps for later views; None: the view creates its own.
    """

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        tail: OwnBlocks,
        cuts: Cuts,
        workspace: KernelWorkspace | None = None,
    ) -> None:
        self._store, self._tail, self._cuts = store, tail, cuts
        self._paths = list(paths)
        self._live = [True] * len(paths)
        self._keeps = workspace is not None
        self._workspace = workspace or KernelWorkspace(store, stays=False)
        self._work: list[Tensor] = []
        self._partials: Partials | None = None
        self._stale = True

    def prepare(self, num_heads: int, num_tokens: int = 1) -> None:
        """Rewrite the work lists, which the next tokens read, if rows have changed."""
        if not self._stale:
            return
        kv, heads = self._store.kv, heads_of(self._store.kv, num_heads)
        work = make_decode_work(
            [path if live else None for path, live in zip(self._paths, self._live, strict=True)],
            kv.block_tokens,
            self._cuts,
            decode_tile(heads, kv.layout.dtype.itemsize).queries,
        )
        self._work, self._partials = self._workspace.write(work, heads, len(self._paths))
        self._stale = False

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.prepare(query.shape[1])
        assert self._partials is not None
        given = query, key_value, self._store.kv, layer
        return decode_attention(*given, self._tail, self._work, self._partials, sinks)

    def keep_rows(self, rows: Tensor) -> None:
        """Continue with only `rows`. The work lists are rebuilt before the next token."""
        kept = rows.tolist()
        self._paths = [self._paths[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._stale = True

    def deactivate_rows(self, rows: Sequence[int]) -> None:
        """Stop reading the KV of `rows`.

        With a copy per row, other rows then read other copies, so the work lists are rebuilt before
        the next token. Otherwise the lists may name the dropped rows until they are rebuilt anyway.
        """
        for row in rows:
            self._live[row] = False
        self._stale = self._stale or (self._cuts.copy_per_row and bool(rows))

    def close(self) -> None:
        if not self._keeps:
            self._workspace.release()
        self._partials = None


class KernelPrefill(AttentionView):
    """A prefill view that runs the kernel: each chunk attends to its path, then to itself causally.

    A chunk is the new tokens of one path. Tokens after the last chunk pad the batch. Padding is one
    more chunk, without a path, and does not affect other tokens.

    slots: slots of the pool where `attend` stores the KV of the new tokens; None: the caller stores
        the KV.
    workspace: buffers that the caller keeps for later views; None: the view creates its own.
    """

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        cuts: Cuts,
        slots: Ints | None = None,
        workspace: WorkBuffers | None = None,
    ) -> None:
        self._store, self._paths, self._lengths = store, list(paths), list(lengths)
        self._cuts, self._slots, self._workspace = cuts, slots, workspace
        self._work: list[Tensor | None] = []
        self._num_tiles = 0

    def prepare(self, num_heads: int, num_tokens: int = 1) -> None:
        """Write the work lists of a pass that a CUDA graph runs; `num_tokens` includes padding.

        A replay cannot change the number of programs, so it depends on `num_tokens` alone.
        """
        queries = self._build(num_tokens, num_heads)
        self._num_tiles = max_tiles(num_tokens, queries)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if not self._work:
            self._build(len(query), query.shape[1])
        given = query, key_value, self._store.kv, layer
        return prefill_attention(*given, self._work, self._num_tiles, sinks)

    def _build(self, num_tokens: int, num_heads: int) -> int:
        """Write the work lists, and return the number of query tokens per tile."""
        queries_per_tile = tile_of_prefill(self._store.kv, num_heads).queries
        kv, padding = self._store.kv, num_tokens - sum(self._lengths)
        slots = () if self._slots is None else np.pad(self._slots, (0, padding), constant_values=-1)
        work = make_prefill_work(
            [*self._paths, ()],
            [*self._lengths, padding],
            kv.block_tokens,
            queries_per_tile,
            copy_per_row=self._cuts.copy_per_row,
            slots=slots,
        )
        self._num_tiles = len(work.tiles) // 7
        self._work = [*(self._workspace or WorkBuffers(kv.storage.device)).write(work)]
        if self._slots is None:
            self._work[-1] = None
        return queries_per_tile


_CUTS = {"triton-tree": Cuts(), "triton-dense": Cuts(256, copy_per_row=True)}


class KernelAttention(AttentionBackend):
    """The backend `triton-tree` or `triton-dense`.

    `triton-tree` reads every stored segment once for all rows below it. In `triton-dense` every row
    reads its own copy of its path. Its parts are longer, because rows share none of them.

    Raises:
        InputError: from its views, if the kernels cannot run on the store's tensors.
    """

    tail_tokens = 256
    writes_blocks = holds_block_numbers = True

    def __init__(self, name: str) -> None:
        self.name, self._cuts = name, _CUTS[name]
        self.copies_per_beam = self._cuts.copy_per_row
        self.prefill_writes_kv = not self.copies_per_beam

    def workspace(self, store: SegmentStore) -> KernelWorkspace:
        return KernelWorkspace(store, stays=True)

    def make_tail(self, store: KVReader, group: int = 0, *, stays: bool = False) -> OwnBlocks:
        return OwnBlocks(store, self.tail_tokens, group)

    def decode_view(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        tail: OwnBlocks,
        workspace: KernelWorkspace | None = None,
    ) -> KernelDecode:
        """Make a view for one token per row."""
        self._check(store)
        return KernelDecode(store, paths, tail, self._cuts, workspace)

    def prefill_workspace(
        self, store: SegmentStore, num_heads: int, num_tokens: int
    ) -> WorkBuffers:
        """Make work buffers for consecutive prefill views of up to `num_tokens` tokens."""
        queries = tile_of_prefill(store.kv, num_heads).queries
        room = power_of_two(7 * max_tiles(num_tokens, queries))
        return WorkBuffers(store.kv.storage.device, room, headroom=2)

    def prefill_view(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        slots: Sequence[Ints] | None = None,
        workspace: WorkBuffers | None = None,
    ) -> KernelPrefill:
        """Make a view for `lengths[i]` new tokens after path i.

        slots: a sequence with the slots of the only group of layers, see `KernelPrefill`.
        """
        self._check(store)
        own = None if slots is None else slots[0]
        return KernelPrefill(store, paths, lengths, self._cuts, own, workspace)

    def _check(self, store: SegmentStore) -> None:
        reason = why_no_kernels(store.kv.storage.device, store.kv.layout.dtype)
        if reason is not None:
            raise InputError(f"--attention {self.name}: {reason}")
