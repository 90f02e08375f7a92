"""Tree attention: each stored segment is attended once for all rows under it.

A work item is (segment, visible tokens) with the rows whose paths pass through it. Items of
similar size are batched into buckets; the partial results of a row are merged by log-sum-exp in
path order (FACTS 6: 4.6x over a copy per beam). LBS keeps copies here "due to CUDA kernel layout
constraints".

Sameness: an item's queries are padded to a multiple of 8 rows and a row's parts are merged in the
order of its path, so a row's bits do not depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from beamwright.attention.layers import Entry, Hold, LayerSource, ResidentLayers, Tail
from beamwright.attention.packing import Packing
from beamwright.attention.partial import (
    KEY_MULTIPLE,
    QUERY_MULTIPLE,
    Partial,
    attend_few,
    attend_part,
    merge_parts,
    round_up,
)
from beamwright.kv import Path, SegmentStore


def _power_of_four(value: int, least: int) -> int:
    size = least
    while size < value:
        size *= 4
    return size


@dataclass
class Bucket:
    """Items of one size class, padded to the same number of rows and tokens.

    layers: packed KV, per layer [K or V, item, kv_head, token, head_dim].
    mask: additive [item, 1, 1, token].
    rows: the row in each slot [item, slot]; empty slots repeat some row and are never read.
    """

    layers: LayerSource
    mask: torch.Tensor
    rows: torch.Tensor


class SharedSegments:
    """The sealed segments of a batch of paths, packed once and attended once per layer.

    `tokens_per_row` queries stand behind each row (1 in decode, the padded chunk in prefill).
    """

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        tokens_per_row: int,
        hold: Hold = ResidentLayers,
    ) -> None:
        layout = store.pool.layout
        self._device = store.pool.storage.device
        self._num_kv_heads = layout.num_kv_heads
        self._tokens_per_row = tokens_per_row
        items: dict[tuple[int, int], list[int]] = {}
        parts = {}
        for row, path in enumerate(paths):
            for part in path:
                key = (id(part.segment), part.visible)
                items.setdefault(key, []).append(row)
                parts[key] = part
        classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for key, rows in items.items():
            size = (_power_of_four(len(rows), 1), _power_of_four(parts[key].visible, 32))
            classes.setdefault(size, []).append(key)
        self.buckets: list[Bucket] = []
        slot_of: dict[tuple[tuple[int, int], int], int] = {}
        num_slots = num_bytes = 0
        for keys in classes.values():
            chosen = [(parts[key], items[key]) for key in keys]
            width = max(len(rows) for _, rows in chosen)
            tokens = round_up(max(part.visible for part, _ in chosen), KEY_MULTIPLE)
            data = store.pool.storage.new_zeros(
                (layout.num_layers, 2, len(keys), layout.num_kv_heads, tokens, layout.head_dim)
            )
            mask = data.new_full((len(keys), 1, 1, tokens), float("-inf"))
            slots = torch.zeros(len(keys), width, dtype=torch.long)
            for i, (part, rows) in enumerate(chosen):
                held = store.gather(part.segment, part.visible)
                data[:, :, i, :, : part.visible] = held.transpose(2, 3)
                mask[i, :, :, : part.visible] = 0.0
                slots[i, : len(rows)] = torch.tensor(rows)
                for j, row in enumerate(rows):
                    slot_of[keys[i], row] = num_slots + i * width + j
            entries = [Entry((part,), tuple(rows)) for part, rows in chosen]
            self.buckets.append(Bucket(hold(data, entries), mask, slots.to(self._device)))
            num_bytes += data.nbytes
            num_slots += len(keys) * width
        self.num_slots = num_slots
        self.part_slots = [
            [slot_of[(id(part.segment), part.visible), row] for part in path]
            for row, path in enumerate(paths)
        ]
        self._scratch, self._counted = store.scratch, num_bytes
        self._scratch.add(num_bytes)

    def close(self) -> None:
        """Give back the packed copies' bytes."""
        self._scratch.add(-self._counted)
        self._counted = 0

    def query_index(self, bucket: Bucket) -> tuple[torch.Tensor, int]:
        """Where each padded query row of a bucket comes from.

        Returns an index into [row * tokens_per_row * kv_heads] query groups in the order
        (item, kv_head, slot, token), and the number of (slot, token) pairs that are real.
        """
        heads = torch.arange(self._num_kv_heads, device=self._device)
        steps = torch.arange(self._tokens_per_row, device=self._device)
        flat = bucket.rows[:, :, None] * self._tokens_per_row + steps
        flat = flat.flatten(1)
        real = flat.shape[1]
        padded = round_up(real, QUERY_MULTIPLE)
        if padded > real:
            flat = torch.cat([flat, flat[:, :1].expand(-1, padded - real)], dim=1)
        index = flat[:, None, :] * self._num_kv_heads + heads[None, :, None]
        return index.flatten(), real


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Partial]


class _Shared:
    """Runs the buckets: query groups in, partial results per (slot, token) out."""

    def __init__(self, shared: SharedSegments, num_kv_heads: int, attend: Attend) -> None:
        self._shared = shared
        self._kv_heads = num_kv_heads
        self._attend = attend
        self._index: list[tuple[torch.Tensor, int]] = []
        self.reindex()

    def reindex(self) -> None:
        self._index = [self._shared.query_index(bucket) for bucket in self._shared.buckets]

    def attend(self, layer: int, query: torch.Tensor) -> list[Partial]:
        """query [tokens, heads, head_dim], tokens = rows * tokens_per_row in row order.

        Returns per bucket (context [slot tokens, group, kv_heads, head_dim], log-sum-exp
        [slot tokens, group, kv_heads]).
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
            context = context.unflatten(1, (-1, group))
            lse = lse.unflatten(1, (-1, group))
            if context.shape[1] != real:
                context, lse = context[:, :real], lse[:, :real]
            found.append((context.flatten(0, 1), lse.flatten(0, 1)))
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


class TreeDecode:
    """One new token per row: shared segments, then the row's own tail."""

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], tail: Tail, hold: Hold = ResidentLayers
    ) -> None:
        self._tail = tail
        self._kv_heads = store.pool.layout.num_kv_heads
        self._shared = SharedSegments(store, paths, 1, hold)
        self._runner = _Shared(self._shared, self._kv_heads, attend_part)
        index = _merge_index(self._shared.part_slots, self._shared.num_slots)
        self._merge = index.to(store.pool.storage.device)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        self._tail.write(layer, key_value)
        rows, heads, head_dim = query.shape
        partials = self._runner.attend(layer, query)
        keys, values = self._tail.read(layer)
        grouped = query.view(rows, self._kv_heads, -1, head_dim)
        context, lse = attend_few(grouped, keys, values, None)
        group = heads // self._kv_heads
        partials.append((context.view(rows, group, self._kv_heads, head_dim), lse))
        merged = merge_parts(*_pick(partials, self._merge))
        return merged.transpose(1, 2).reshape(rows, heads, head_dim)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """See `protocols.DecodeView`. Packed segments stay; only the index tables change."""
        num_old, num_slots = self._merge.shape[0], self._shared.num_slots
        place = torch.zeros(num_old, dtype=torch.long, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        for bucket in self._shared.buckets:
            bucket.rows = place[bucket.rows]
        self._runner.reindex()
        merge = self._merge[rows]
        own = (merge >= num_slots) & (merge < num_slots + num_old)
        merge = torch.where(
            own, num_slots + place[(merge - num_slots).clamp(0, num_old - 1)], merge
        )
        merge[merge == num_slots + num_old] = num_slots + len(rows)
        self._merge = merge

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._shared.close()


class TreePrefill:
    """Several new tokens per path: shared segments, then the new tokens causally."""

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        hold: Hold = ResidentLayers,
    ) -> None:
        device = store.pool.storage.device
        self._kv_heads = store.pool.layout.num_kv_heads
        self._packing = Packing(lengths, self._kv_heads, device)
        padded = self._packing.num_padded
        self._shared = SharedSegments(store, paths, padded, hold)
        self._runner = _Shared(self._shared, self._kv_heads, attend_part)
        by_row = _merge_index(self._shared.part_slots, self._shared.num_slots)
        steps = torch.arange(padded)
        # The absent part is one slot, not `padded` of them: clamp it to the first behind all.
        index = by_row[:, None, :] * padded + steps[None, :, None]
        absent = (self._shared.num_slots + len(lengths)) * padded
        self._merge = index.clamp(max=absent).flatten(0, 1).to(device)
        causal = torch.full((padded, padded), float("-inf")).triu(1)
        self._causal = causal.to(device=device, dtype=store.pool.storage.dtype)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        packing = self._packing
        group = query.shape[1] // self._kv_heads
        padded_query = packing.pad(query)
        partials = self._runner.attend(layer, padded_query.flatten(0, 1))
        own = packing.pad(key_value)
        keys, values = own[:, :, 0].transpose(1, 2), own[:, :, 1].transpose(1, 2)
        mask = self._causal.repeat_interleave(group, dim=0)[None, None]
        context, lse = attend_part(packing.queries(query), keys, values, mask)
        context, lse = context.unflatten(1, (-1, group)), lse.unflatten(1, (-1, group))
        partials.append((context.flatten(0, 1), lse.flatten(0, 1)))
        merged = merge_parts(*_pick(partials, self._merge))
        by_row = merged.unflatten(0, (packing.num_rows, packing.num_padded)).flatten(1, 2)
        return packing.unpack(by_row, query)

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._shared.close()


def _pick(partials: list[Partial], index: torch.Tensor) -> Partial:
    """Partial results [rows, parts, ...] in merge order; the last slot is the absent part."""
    context = torch.cat([*(p[0] for p in partials), partials[-1][0][:1]])
    lse = torch.cat([*(p[1] for p in partials), partials[-1][1][:1]])
    lse[-1] = float("-inf")
    flat = index.flatten()
    rows, parts = index.shape
    return (
        context.index_select(0, flat).view(rows, parts, *context.shape[1:]),
        lse.index_select(0, flat).view(rows, parts, *lse.shape[1:]),
    )


class TreeAttention:
    """Backend `tree`."""

    name = "tree"
    copies_per_beam = False
    tail_tokens = 256

    def decode_view(
        self, store: SegmentStore, paths: Sequence[Path], tail: Tail, hold: Hold = ResidentLayers
    ) -> TreeDecode:
        """A view for one token per row; `hold` decides where its packed copies stand."""
        return TreeDecode(store, paths, tail, hold)

    def prefill_view(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        hold: Hold = ResidentLayers,
    ) -> TreePrefill:
        """A view for `lengths[i]` new tokens after path i."""
        return TreePrefill(store, paths, lengths, hold)
