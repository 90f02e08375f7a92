"""Tree attention: each stored segment is attended once for all rows under it.

A work item is (segment, visible tokens) with the rows whose paths pass through it. Items of
similar size are batched into buckets; the partial results of a row are merged by log-sum-exp in
path order. 32 beams over a prefix of 1,024 tokens, on two cores: 4.6 times as fast as a copy per
beam. LBS keeps copies here "due to CUDA kernel layout constraints".

Sameness: an item's queries are padded to a multiple of 8 rows and a row's parts are merged in the
order of its path, so a row's bits do not depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from beamwright.attention.layers import Hold, ResidentLayers
from beamwright.attention.partial import Partial, attend_few, attend_part, merge_parts
from beamwright.attention.shared import SharedSegments
from beamwright.attention.tree_prefill import TreePrefill
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Partial]


class _Shared:
    """Runs the buckets: query groups in, partial results per slot out."""

    def __init__(self, shared: SharedSegments, num_kv_heads: int, attend: Attend) -> None:
        self._shared = shared
        self._kv_heads = num_kv_heads
        self._attend = attend
        self._index: list[tuple[torch.Tensor, int]] = []
        self.reindex()

    def reindex(self) -> None:
        self._index = [self._shared.query_index(bucket) for bucket in self._shared.buckets]

    def attend(self, layer: int, query: torch.Tensor) -> list[Partial]:
        """query [rows, heads, head_dim].

        Returns per bucket (context [items, slots * group, kv_heads, head_dim], log-sum-exp
        [items, slots * group, kv_heads]).
        """
        tokens, heads, head_dim = query.shape
        group = heads // self._kv_heads
        flat = query.reshape(tokens * self._kv_heads, group * head_dim)
        found: list[Partial] = []
        for bucket, (index, real) in zip(self._shared.buckets, self._index, strict=True):
            keys, values = bucket.layers.layer(layer)
            picked = flat.index_select(0, index)
            queries = picked.view(keys.shape[0], self._kv_heads, -1, head_dim)
            context, lse = self._attend(queries, keys, values, bucket.mask)
            if context.shape[1] != real * group:
                context, lse = context[:, : real * group], lse[:, : real * group]
            found.append((context, lse))
        return found


def _merge_index(part_slots: list[list[int]], num_slots: int) -> torch.Tensor:
    """[rows, parts]: the slots of a row in path order, then its own tokens, then absent ones.

    A row's own tokens are slot `num_slots + row`; absent parts are the slot after all of those.
    """
    num_rows = len(part_slots)
    absent = num_slots + num_rows
    most = max(len(slots) for slots in part_slots) + 1
    index = torch.full((num_rows, most), absent)
    for row, slots in enumerate(part_slots):
        index[row, : len(slots) + 1] = torch.tensor([*slots, num_slots + row])
    return index


class _Merge:
    """Gathers and merges the partial results of a decode step's rows.

    A slot's or tail's result is a block of one context [head_dim] per head. In slots heads are
    ordered (group, kv_head), in tails (kv_head, group), as in queries and in what comes out: the
    index of heads undoes it, so that nothing is transposed.

    slots: [rows, parts], see `_merge_index`.
    """

    def __init__(self, slots: torch.Tensor, num_slots: int, heads: int, kv_heads: int) -> None:
        num_rows, self._num_parts = slots.shape
        own = torch.arange(heads, device=slots.device)
        shared = own.view(-1, kv_heads).t().flatten()
        within = torch.where(slots.unsqueeze(2) < num_slots, shared, own)
        self._index = (slots.unsqueeze(2) * heads + within).flatten()
        self._shape = (num_rows, self._num_parts, heads)
        self._present = (num_slots + num_rows) * heads
        self._total = self._present + heads
        self._context = self._lse = torch.empty(0)

    def merge(self, context: list[torch.Tensor], lse: list[torch.Tensor]) -> torch.Tensor:
        """Contexts [rows, heads, head_dim] of all parts' [slots * heads, head_dim], in order."""
        if not self._lse.numel():
            # The block behind the tails is the absent part: no weight, and no NaN of some row.
            self._context = context[0].new_zeros(self._total, context[0].shape[1])
            self._lse = lse[0].new_full((self._total,), float("-inf"))
        torch.cat(context, out=self._context[: self._present])
        torch.cat(lse, out=self._lse[: self._present])
        picked = self._context.index_select(0, self._index).view(*self._shape, -1)
        return merge_parts(picked, self._lse.index_select(0, self._index).view(self._shape))


class TreeDecode:
    """A `DecodeView`, one new token per row: shared segments, then the row's own tail."""

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], tail: Tail, hold: Hold = ResidentLayers
    ) -> None:
        self._tail = tail
        self._kv_heads = store.pool.layout.num_kv_heads
        self._shared = SharedSegments(store, paths, hold)
        self._runner = _Shared(self._shared, self._kv_heads, attend_part)
        index = _merge_index(self._shared.part_slots, self._shared.num_slots)
        self._slots = index.to(store.compute_device)
        self._merge: _Merge | None = None

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        self._tail.write(layer, key_value)
        rows, heads, head_dim = query.shape
        if self._merge is None:
            self._merge = _Merge(self._slots, self._shared.num_slots, heads, self._kv_heads)
        query = query.contiguous()
        keys, values = self._tail.read(layer)
        grouped = query.view(rows, self._kv_heads, -1, head_dim)
        partials = self._runner.attend(layer, query)
        partials.append(attend_few(grouped, keys, values, self._tail.mask))
        return self._merge.merge(
            [context.reshape(-1, head_dim) for context, _ in partials],
            [lse.reshape(-1) for _, lse in partials],
        )

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Packed segments stay; only the index tables change."""
        num_old, num_slots = self._slots.shape[0], self._shared.num_slots
        place = torch.zeros(num_old, dtype=torch.long, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        for bucket in self._shared.buckets:
            bucket.rows = place[bucket.rows]
        self._runner.reindex()
        slots = self._slots[rows]
        own = (slots >= num_slots) & (slots < num_slots + num_old)
        slots = torch.where(
            own, num_slots + place[(slots - num_slots).clamp(0, num_old - 1)], slots
        )
        slots[slots == num_slots + num_old] = num_slots + len(rows)
        self._slots, self._merge = slots, None

    def count_rows(self, num_rows: int) -> None:
        """Nothing here depends on it."""

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Only packed copies are read, so nothing depends on it."""

    def close(self) -> None:
        self._shared.close()


class TreeAttention:
    """Backend `tree`."""

    name = "tree"
    copies_per_beam = False
    tail_tokens = 256
    decode_view = TreeDecode
    prefill_view = TreePrefill
