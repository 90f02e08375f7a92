"""Sealed segments as attention reads them: packed copies, layer by layer, in buckets of alike size.

Attention asks a source for one layer at a time, and the answer may wait: resident layers are plain
indexing, `layerwise` streams them (LBS section 4.1, the token-by-token baseline). Knows no
operator, no attention and no link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from beamwright.attention.partial import KEY_MULTIPLE, QUERY_MULTIPLE, round_up
from beamwright.kv.pool import KVLayout
from beamwright.kv.segments import Path, Segment
from beamwright.kv.store import SegmentStore, Tail, padded_path

LEAST_KEYS = 32
"""Keys of the smallest size class."""


@dataclass(frozen=True)
class Entry:
    """What is at one place along the entries of a packed copy.

    parts: the segments whose tokens are there, one after the other.
    rows: the rows of the batch that read it.
    room: free tokens behind the parts, where a row's own tokens are written as they come.
    """

    parts: Path
    rows: tuple[int, ...]
    room: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the parts."""
        return sum(part.visible for part in self.parts)


class LayerSource(Protocol):
    """Packed KV [layer, K or V, entry, kv_head, token, head_dim], one layer at a time."""

    def layer(self, number: int) -> torch.Tensor:
        """[K or V, entry, kv_head, token, head_dim], to be read and written; it may wait."""
        ...

    def restore(self, tail: Tail) -> None:
        """Rows that have decoded before, one per entry, keep their tails, which follow the parts.

        What is there beyond a row's own tokens is masked.
        """
        ...


def pack(store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> torch.Tensor:
    """The parts of every entry, one after the other, with zeros up to `num_tokens` behind them.

    An entry reads a device copy of a segment of its own, where there are several.
    """
    layout = store.pool.layout
    data = store.pool.storage.new_zeros(
        (layout.num_layers, 2, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim)
    )
    passed: Counter[Segment] = Counter()
    for number, entry in enumerate(entries):
        at = 0
        for part in entry.parts:
            held = store.gather(part.segment, part.visible, copy=passed[part.segment])
            passed[part.segment] += 1
            data[:, :, number, :, at : at + part.visible] = held.transpose(2, 3)
            at += part.visible
    return data


class ResidentLayers:
    """A `LayerSource` with all layers on the device."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._data = pack(store, entries, num_tokens)
        self._layers = self._data.unbind(0)
        self._lengths = [entry.num_tokens for entry in entries]

    def layer(self, number: int) -> torch.Tensor:
        return self._layers[number]

    def restore(self, tail: Tail) -> None:
        for number, data in enumerate(self._data if tail.num_tokens else ()):
            for both, held in zip(data, tail.read(number), strict=True):
                for row, length in enumerate(self._lengths):
                    own = held[row, :, : tail.capacity]
                    both[row, :, length : length + own.shape[1]] = own


Hold = Callable[[SegmentStore, Sequence[Entry], int], LayerSource]
"""Packs entries of so many tokens each, see `pack`; decides where the layers reside."""


# --- segments that rows share ------------------------------------------------------------------


def size_class(value: int, least: int) -> int:
    """`value` rounded up to `least` times a power of four."""
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
    distances: how far each token lies before the end of the slot's path [item, slot, token], where
    a window asks for it.
    """

    layers: LayerSource
    mask: torch.Tensor
    rows: torch.Tensor
    distances: torch.Tensor | None = None

    def within(
        self, window: int, places: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows that are so many tokens behind their paths see, with `group` heads each.

        Returns (mask [item, 1, slot * group, token], which of those see nothing at all [item,
        slot * group]), slots padded as those of `query_index`.
        """
        assert self.distances is not None
        far = self.distances + places[self.rows].unsqueeze(2) >= window
        far = padded_slots(far).repeat_interleave(group, dim=1)
        mask = self.mask.masked_fill(far.unsqueeze(1), float("-inf"))
        return mask, mask.isinf().all(-1).squeeze(1)


def padded_slots(slots: torch.Tensor) -> torch.Tensor:
    """Slots [item, slot, ...], as many as a multiple of 8: the first one is repeated."""
    missing = round_up(slots.shape[1], QUERY_MULTIPLE) - slots.shape[1]
    if not missing:
        return slots
    return torch.cat([slots, slots[:, :1].expand(-1, missing, *slots.shape[2:])], dim=1)


def part_width(visible: int, layout: KVLayout) -> int:
    """Keys that a packed part of a path is padded to.

    The flash operator takes multiples of 16 alike; plain products do not, see `kv.store`.
    """
    if layout.softcap is None:
        return round_up(visible, KEY_MULTIPLE)
    return padded_path(visible, layout.head_dim)


def tokens_behind(path: Path) -> list[int]:
    """For each part of a path, how many of its tokens follow it."""
    return [*accumulate((part.visible for part in path[:0:-1]), initial=0)][::-1][: len(path)]


class SharedSegments:
    """The sealed segments of a batch of paths, packed once and attended once per layer."""

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        hold: Hold = ResidentLayers,
    ) -> None:
        layout = store.pool.layout
        self._device = store.compute_device
        self._num_kv_heads = layout.num_kv_heads
        items: dict[tuple[int, int], list[int]] = {}
        parts = {}
        for row, path in enumerate(paths):
            for part in path:
                key = (id(part.segment), part.visible)
                items.setdefault(key, []).append(row)
                parts[key] = part
        behind = [
            {id(part.segment): count for part, count in zip(path, tokens_behind(path), strict=True)}
            for path in (() if layout.window is None else paths)
        ]
        classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for key, rows in items.items():
            size = (size_class(len(rows), 1), size_class(parts[key].visible, LEAST_KEYS))
            classes.setdefault(size, []).append(key)
        self.buckets: list[Bucket] = []
        slot_of: dict[tuple[tuple[int, int], int], int] = {}
        num_slots = num_bytes = 0
        for keys in classes.values():
            chosen = [(parts[key], items[key]) for key in keys]
            width = max(len(rows) for _, rows in chosen)
            tokens = part_width(max(part.visible for part, _ in chosen), layout)
            mask = torch.full(
                (len(keys), 1, 1, tokens), -torch.inf, dtype=layout.dtype, device=self._device
            )
            slots = torch.zeros(len(keys), width, dtype=torch.long)
            ends = torch.zeros_like(slots)  # tokens from the part's first one to the path's end
            for i, (part, rows) in enumerate(chosen):
                mask[i, :, :, : part.visible] = 0.0
                slots[i, : len(rows)] = torch.tensor(rows)
                for j, row in enumerate(rows):
                    if layout.window is not None:
                        ends[i, j] = part.visible + behind[row][id(part.segment)]
                    slot_of[keys[i], row] = num_slots + i * width + j
            entries = [Entry((part,), tuple(rows)) for part, rows in chosen]
            layers = hold(store, entries, tokens)
            distances = None
            if layout.window is not None:
                distances = ends.unsqueeze(2) - torch.arange(tokens)
                distances = distances.to(self._device)
            self.buckets.append(Bucket(layers, mask, slots.to(self._device), distances))
            num_bytes += layout.bytes_per_token * len(keys) * tokens
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

        Returns an index into [row * kv_heads] query groups in the order (item, kv_head, slot), and
        the number of slots that are real.
        """
        heads = torch.arange(self._num_kv_heads, device=self._device)
        real, rows = bucket.rows.shape[1], padded_slots(bucket.rows)
        index = rows[:, None, :] * self._num_kv_heads + heads[None, :, None]
        return index.flatten(), real
