"""PathIndex: the keys of a batch of paths, scored once for all rows below a segment.

Columns are a row's positions, up to the longest path's end, and behind it the places of its tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from beamwright.attention.layers import Entry
from beamwright.attention.partial import round_up
from beamwright.attention.shared import Bucket, SharedSegments
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.sparse.rule import PAGE

COLUMN_MULTIPLE = 32
"""Whole vector registers of any CPU: functions of single elements have one way then."""


class _Keys:
    """A `LayerSource` of keys alone: [entry, kv_head, token, head_dim]."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        layout = store.pool.layout
        size = (layout.num_layers, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim)
        self._data = store.pool.storage.new_zeros(size)
        for number, entry in enumerate(entries):
            part = entry.parts[0]
            keys = store.keys_of(part.segment, part.visible)
            self._data[:, number, :, : part.visible] = keys.transpose(1, 2)

    def layer(self, number: int) -> torch.Tensor:
        return self._data[number]

    def restore(self, tail: Tail) -> None:
        """Tails are scored on their own."""


class PathIndex:
    """Scores all tokens of paths, and says where their KV is.

    num_columns: of the stored tokens.
    """

    def __init__(self, store: SegmentStore, paths: Sequence[Path]) -> None:
        self._store, self._layout = store, store.pool.layout
        longest = max(sum(part.visible for part in path) for path in paths)
        self.num_columns = round_up(longest, COLUMN_MULTIPLE)
        self._shared = SharedSegments(store, paths, _Keys)
        self._queries = [self._shared.query_index(bucket) for bucket in self._shared.buckets]
        self._sources, self._places = self._scatter(paths)
        self._slots = self._where(paths)
        self._bounds: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def scores(self, layer: int, query: torch.Tensor, *, pages: bool) -> torch.Tensor:
        """[rows, kv_heads, group, columns] for query [rows, heads, head_dim]; -inf is no token.

        pages: at most, by the bounds of pages, in the place of each key's own.
        """
        rows, heads, head_dim = query.shape
        kv_heads = self._layout.num_kv_heads
        group = heads // kv_heads
        device, home = query.device, self._store.pool.storage.device  # where keys are scored
        flat = query.reshape(rows * kv_heads, group * head_dim).to(home)
        found = []
        buckets = zip(self._shared.buckets, self._queries, strict=True)
        for number, (bucket, (index, real)) in enumerate(buckets):
            items = bucket.rows.shape[0]
            queries = flat.index_select(0, index.to(home)).view(items, kv_heads, -1, head_dim)
            if pages:
                scored = bounded(queries, *self._bounds_of(number, layer))
            else:
                scored = queries @ self._keys(bucket, layer).transpose(-1, -2)
            scored = scored[:, :, : real * group].unflatten(2, (real, group))
            # [item, slot, token, kv_head * group]: what is moved at a time lies together.
            found.append(scored.permute(0, 2, 4, 1, 3).reshape(-1, heads))
        out = flat.new_full((rows * self.num_columns, heads), -torch.inf)
        picked = torch.cat(found).index_select(0, self._sources)
        out.index_copy_(0, self._places, picked * head_dim**-0.5)
        scores = out.view(rows, self.num_columns, kv_heads, group).permute(0, 2, 3, 1)
        return scores.to(device)

    def slots(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Places in the pool of columns [rows, kv_heads, count], see `SegmentStore.read`.

        Those of a tail's columns are some other token's of their row.
        """
        at = columns.masked_fill(columns >= self.num_columns, 0)
        return self._slots[rows].unsqueeze(1).expand(-1, at.shape[1], -1).gather(2, at)

    def close(self) -> None:
        """Give back the packed copies' bytes."""
        self._shared.close()

    # --- inside ------------------------------------------------------------------------------

    def _keys(self, bucket: Bucket, layer: int) -> torch.Tensor:
        return bucket.layers.layer(layer)

    def _bounds_of(self, number: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (number, layer) not in self._bounds:
            bucket = self._shared.buckets[number]
            keys = self._keys(bucket, layer)
            seen = (bucket.mask[:, 0, 0] == 0).to(keys.device)
            self._bounds[number, layer] = page_bounds(keys, seen)
        return self._bounds[number, layer]

    def _scatter(self, paths: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor]:
        """From rows of all buckets' scores to rows of [row, column]."""
        starts: list[int] = []
        total = 0
        for bucket in self._shared.buckets:
            items, slots = bucket.rows.shape
            tokens = bucket.mask.shape[-1]
            starts += [total + slot * tokens for slot in range(items * slots)]
            total += items * slots * tokens
        sources, places = [], []
        for row, (path, slots_of) in enumerate(zip(paths, self._shared.part_slots, strict=True)):
            at = row * self.num_columns
            for part, slot in zip(path, slots_of, strict=True):
                sources.append(torch.arange(starts[slot], starts[slot] + part.visible))
                places.append(torch.arange(at, at + part.visible))
                at += part.visible
        home = self._store.pool.storage.device
        return torch.cat(sources).to(home), torch.cat(places).to(home)

    def _where(self, paths: Sequence[Path]) -> torch.Tensor:
        """Place in the pool [rows, columns] of every stored token."""
        slots = torch.zeros(len(paths), self.num_columns, dtype=torch.long)
        for row, path in enumerate(paths):
            at = 0
            for part in path:
                there = self._store.slots_of(part.segment, 0, part.visible)
                slots[row, at : at + part.visible] = there
                at += part.visible
        return slots.to(self._store.compute_device)


def page_bounds(keys: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest of each dimension [items, kv_heads, pages, head_dim] in pages of 16.

    keys [items, kv_heads, tokens, head_dim]; seen: mask [items, tokens], which half-filled pages
    need; pages without a token have zeros.
    """
    pages = keys.unflatten(2, (-1, PAGE))
    inside = seen.unflatten(1, (-1, PAGE))[:, None, :, :, None]
    none = ~inside.any(3)
    least = pages.masked_fill(~inside, torch.inf).amin(3).masked_fill(none, 0.0)
    most = pages.masked_fill(~inside, -torch.inf).amax(3).masked_fill(none, 0.0)
    return least, most


def bounded(query: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """The most that any key of a page may have as its product with a query (Quest).

    query [items, kv_heads, rows, head_dim]; returns [items, kv_heads, rows, tokens].
    """
    rising, falling = query.clamp_min(0), query.clamp_max(0)
    pages = rising @ most.transpose(-1, -2) + falling @ least.transpose(-1, -2)
    return pages.repeat_interleave(PAGE, -1)
