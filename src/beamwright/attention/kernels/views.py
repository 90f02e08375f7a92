"""Backends `triton-tree` and `triton-dense`: views that run the kernels on the paged pool itself.

Nothing is packed: kernels read blocks in place, so a view holds block tables and partial
results, and everything that its rows read must stay on the device (a lease sees to that). Where
rows are dropped their blocks may go; a tree's table may go on naming them until it is rebuilt, as
what such rows compute is never used.
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
from beamwright.attention.kernels.own import OwnBlocks
from beamwright.attention.kernels.worklist import (
    Cuts,
    DecodeWork,
    HeadLayout,
    Ints,
    WorkBuffers,
    decode_tile,
    decode_work,
    most_tiles,
    power_of_two,
    prefill_work,
)
from beamwright.attention.protocols import AttentionBackend, AttentionView, DecodeView
from beamwright.errors import InputError
from beamwright.kv.segments import Path
from beamwright.kv.store import KVReader, SegmentStore
from beamwright.plan.costs import ROW_PARTS

_LEAST_ROWS, _LEAST_ITEMS = 64, 256
_ROW_ENTRIES = 64  # where much is shared


class KernelWorkspace:
    """Work lists and partial results of decode views that follow one another.

    They keep their addresses until they grow. num_moves: how often they did; then a captured step
    has to be captured again.
    stays: it outlives its first view, so it takes the room that most searches of so many rows need.
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
        """The lists on the device, and room for the partial results of so many rows."""
        num_rows = max(num_rows, _LEAST_ROWS) if self._stays else num_rows
        lists = self._buffers.write(work, _rooms(num_rows) if self._stays else {})
        num_slots, held = len(lists[4]), self._partials
        if held is None or held.first_own < num_slots or held.num_rows < num_rows:
            num_rows = max(num_rows, held.num_rows if held is not None else 0)
            held = Partials(heads, num_slots, num_rows, self._device)
            self._partials = held
            self._num_partials += 1
            self._count(held.num_bytes)
        return lists, held

    def release(self) -> None:
        """Give the partial results back; lists are small."""
        self._partials = None
        self._count(0)

    def _count(self, num_bytes: int) -> None:
        self._scratch.add(num_bytes - self._counted)
        self._counted = num_bytes


def _rooms(num_rows: int) -> dict[str, int]:
    """Of items there is room for few more than there are as a rule: each is a program."""
    slots, entries = num_rows * ROW_PARTS, num_rows * _ROW_ENTRIES
    return {
        "items": 4 * max(_LEAST_ITEMS, 2 * num_rows),
        **dict.fromkeys(("entry_blocks", "entry_tokens", "entry_firsts"), entries),
        **dict.fromkeys(("slot_rows", "slot_reach", "row_slots"), slots),
        "row_parts": 2 * num_rows,
    }


class KernelDecode(DecodeView):
    """A `DecodeView`, one new token per row: parts of the paths, the rows' own tokens, the merge.

    workspace: of a caller who keeps it for the views to come; else the view has its own.
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
        """Rewrite the work lists if rows or paths have changed, so that tokens only read them."""
        if not self._stale:
            return
        kv, heads = self._store.kv, heads_of(self._store.kv, num_heads)
        work = decode_work(
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
        """The tables are rebuilt before the next token."""
        kept = rows.tolist()
        self._paths = [self._paths[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._stale = True

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Nobody reads for them any more. Where each row has copies of its own, others move up to
        theirs; else the lists may go on naming them, and are made anew when rows are arranged."""
        for row in rows:
            self._live[row] = False
        self._stale = self._stale or (self._cuts.copy_per_row and bool(rows))

    def close(self) -> None:
        if not self._keeps:
            self._workspace.release()
        self._partials = None


class KernelPrefill(AttentionView):
    """An `AttentionView`: each chunk over its path's blocks, then causally over itself.

    Tokens behind the chunks pad the batch: they see one another, and change nothing.
    slots: places in the pool of the chunks' tokens, which `attend` keeps there; None: their caller
    does. workspace: of a caller who keeps it for the views to come; else the view has its own.
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
        """Write the work lists of a pass over so many tokens, with padding, that is captured: as
        many programs for any chunks."""
        queries = self._build(num_tokens, num_heads)
        self._num_tiles = most_tiles(num_tokens, queries)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if not self._work:
            self._build(len(query), query.shape[1])
        given = query, key_value, self._store.kv, layer
        return prefill_attention(*given, self._work, self._num_tiles, sinks)

    def _build(self, num_tokens: int, num_heads: int) -> int:
        """Write the work lists; returns query tokens of a tile."""
        queries_per_tile = tile_of_prefill(self._store.kv, num_heads).queries
        kv, padding = self._store.kv, num_tokens - sum(self._lengths)
        slots = () if self._slots is None else np.pad(self._slots, (0, padding), constant_values=-1)
        work = prefill_work(
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
    """A backend that runs the kernels.

    `triton-tree` reads every stored segment once for all rows under it. In `triton-dense` every row
    reads its own copy: nothing is shared, so all is joined.

    Raises:
        InputError: from its views, if the kernels cannot run on the store's tensors.
    """

    tail_tokens = 256
    writes_blocks = holds_places = True

    def __init__(self, name: str) -> None:
        self.name, self._cuts = name, _CUTS[name]
        self.copies_per_beam = self._cuts.copy_per_row
        self.keeps = not self.copies_per_beam

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
        """A view for one token per row."""
        self._check(store)
        return KernelDecode(store, paths, tail, self._cuts, workspace)

    def prefill_workspace(
        self, store: SegmentStore, num_heads: int, num_tokens: int
    ) -> WorkBuffers:
        """What prefill views of passes over up to so many tokens may share, one after the other."""
        queries = tile_of_prefill(store.kv, num_heads).queries
        room = power_of_two(7 * most_tiles(num_tokens, queries))
        return WorkBuffers(store.kv.storage.device, room, headroom=2)

    def prefill_view(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        slots: Sequence[Ints] | None = None,
        workspace: WorkBuffers | None = None,
    ) -> KernelPrefill:
        """A view for `lengths[i]` new tokens after path i. slots: of the one group of
        layers; for these and workspace see there."""
        self._check(store)
        own = None if slots is None else slots[0]
        return KernelPrefill(store, paths, lengths, self._cuts, own, workspace)

    def _check(self, store: SegmentStore) -> None:
        reason = why_no_kernels(store.kv.storage.device, store.kv.layout.dtype)
        if reason is not None:
            raise InputError(f"--attention {self.name}: {reason}")
