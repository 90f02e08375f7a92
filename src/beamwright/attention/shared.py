"""Sealed segments as attention reads them: packed copies, layer by layer, in buckets of alike size.

Attention asks a source for one layer at a time, and the answer may wait: resident layers are plain
indexing, others may be streamed (LBS section 4.1, the token-by-token baseline). Knows no
operator, no attention and no link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beamwright.attention.partial import KEY_MULTIPLE, QUERY_MULTIPLE, round_up
from beamwright.kv.pool import KVLayout
from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail, padded_path

Table = npt.NDArray[np.int64]
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


class LayerSource:
    """Packed KV [layer, K or V, entry, kv_head, token, head_dim], one layer at a time."""

    def layer(self, number: int) -> Tensor:
        """[K or V, entry, kv_head, token, head_dim], to be read and written; it may wait."""
        raise NotImplementedError

    def restore(self, tail: Tail) -> None:
        """Rows that have decoded before, one per entry, keep their tails, which follow the parts.

        What is there beyond a row's own tokens is masked. Nothing is to be done where a source has
        them by itself, or where tails are attended to on their own.
        """


def pack(store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> Tensor:
    """The parts of every entry, one after the other, with zeros up to `num_tokens` behind them.

    An entry reads a device copy of a segment of its own, where there are several.
    """
    layout = store.kv.layout
    data = torch.zeros(
        (layout.num_layers, 2, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim),
        dtype=layout.dtype,
        device=store.kv.storage.device,
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


class ResidentLayers(LayerSource):
    """A `LayerSource` with all layers on the device."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._data = pack(store, entries, num_tokens)
        self._layers = self._data.unbind(0)
        self._lengths = [entry.num_tokens for entry in entries]

    @property
    def whole(self) -> Tensor:
        """[layer, K or V, entry, kv_head, token, head_dim]."""
        return self._data

    def layer(self, number: int) -> Tensor:
        return self._layers[number]

    def restore(self, tail: Tail) -> None:
        for number, data in enumerate(self._data if tail.num_tokens else ()):
            for both, held in zip(data, tail.read(number), strict=True):
                for row, length in enumerate(self._lengths):
                    own = held[row, :, : tail.capacity]
                    both[row, :, length : length + own.shape[1]] = own


class WrittenLayers(LayerSource):
    """A `LayerSource` of segments that the pass which reads them writes: each layer is gathered
    when it is asked for, and is there by then."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._kv, size = store.kv, store.kv.block_tokens
        places = np.zeros((len(entries), num_tokens), dtype=np.int64)  # the first one, where masked
        for mine, entry in zip(places, entries, strict=True):
            (part,) = entry.parts
            mine[: part.visible] = np.arange(part.visible)
            mine[:] = np.array(part.segment.blocks)[mine // size] * size + mine % size
        blocks, offsets = np.divmod(places, size)
        self._at = tuple(
            torch.from_numpy(each).to(store.kv.storage.device) for each in (blocks, offsets)
        )

    def layer(self, number: int) -> Tensor:
        blocks, offsets = self._at
        return self._kv.pick((blocks, number, slice(None), offsets)).permute(2, 0, 3, 1, 4)


Hold = Callable[[SegmentStore, Sequence[Entry], int], LayerSource]
"""Packs entries of so many tokens each, see `pack`; decides where the layers reside."""


# --- segments that rows share ------------------------------------------------------------------


def size_class(value: int, least: int) -> int:
    """`value` rounded up to `least` times a power of four."""
    size = least
    while size < value:
        size *= 4
    return size


@dataclass(frozen=True)
class Bucket:
    """Items of one size class, padded to the same number of tokens.

    layers: packed KV, per layer [K or V, item, kv_head, token, head_dim].
    mask: additive [item, 1, 1, token].
    """

    layers: LayerSource
    mask: Tensor

    def within(
        self, window: int, ends: Tensor, places: Tensor, group: int
    ) -> tuple[Tensor, Tensor]:
        """What rows that are so many tokens behind their paths see, with `group` heads each.

        ends: of the bucket, see `Slots`. places: of the row in each slot [item, slot].
        Returns (mask [item, 1, slot * group, token], which of those see nothing at all [item,
        slot * group]), padded as those of `query_index`.
        """
        tokens = torch.arange(self.mask.shape[-1], device=ends.device)
        far = (ends + places).unsqueeze(2) - tokens >= window
        far = _padded(far.repeat_interleave(group, dim=1), 1)
        mask = self.mask.masked_fill(far.unsqueeze(1), float("-inf"))
        return mask, mask.isinf().all(-1).squeeze(1)


class Slots:
    """Which row is in which slot of the items, and which slots are on a row's path.

    An item has a slot for every row that reads it, and as many as any other of its bucket. Empty
    ones repeat the first row, and are never read.
    items: [rows, parts] on each row's path in its order, then `sum(counts)`. counts: items of each
    bucket, which are numbered in the order of buckets. ends: [rows, parts] tokens from each part's
    first one to the path's end.
    rows, ends: of each bucket [item, slot]. parts: [rows, parts] slots, then `num_slots`.
    """

    def __init__(
        self, items: Table, counts: Sequence[int], ends: Table, device: torch.device
    ) -> None:
        self._given, self.items = (items, counts, ends, device), items
        row, place = np.nonzero(items < sum(counts))
        asked, order = items[row, place], np.argsort(items[row, place], kind="stable")
        sizes = np.bincount(asked, minlength=sum(counts))
        within = np.empty_like(asked)
        within[order] = np.arange(len(asked)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        of_buckets = np.split(sizes, np.cumsum(counts, dtype=np.int64)[:-1]) if counts else []
        widths = [max(1, int(most.max())) for most in of_buckets]
        width = np.repeat(np.array(widths, dtype=np.int64), counts)
        slots = (np.cumsum(width) - width)[asked] + within
        self.num_slots = int(width.sum())
        self.parts = np.full(items.shape, self.num_slots)
        self.parts[row, place] = slots
        of_slots = np.zeros((2, self.num_slots), dtype=np.int64)
        of_slots[:, slots] = row, ends[row, place]
        sizes_of = [count * width for count, width in zip(counts, widths, strict=True)]
        found = torch.from_numpy(of_slots).to(device).split(sizes_of, dim=1)
        shaped = [f.unflatten(1, (n, -1)) for f, n in zip(found, counts, strict=True)]
        self.rows, self.ends = [rows for rows, _ in shaped], [ends for _, ends in shaped]

    def picked(self, rows: Tensor) -> Slots:
        """Of these rows, each any number of times."""
        items, counts, ends, device = self._given
        index = rows.cpu().numpy()
        return Slots(items[index], counts, ends[index], device)


def _padded(queries: Tensor, dim: int) -> Tensor:
    """As many along `dim` as a multiple of 8: the first one is repeated."""
    missing = -queries.shape[dim] % QUERY_MULTIPLE
    if not missing:
        return queries
    first = queries.narrow(dim, 0, 1)
    return torch.cat([queries, *[first] * missing], dim=dim)


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


@dataclass
class SeenPart:
    """A segment as some rows see it.

    rows: each with the segment's place in its path. num_tokens: new ones, of all these rows.
    """

    part: PathPart
    rows: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def written(self) -> bool:
        """False where the pass that reads it has to write it first."""
        return self.part.visible <= self.part.segment.length

    @property
    def entry(self) -> Entry:
        """In a packed copy."""
        return Entry((self.part,), tuple(row for row, _ in self.rows))


def seen_parts(paths: Sequence[Path], lengths: Sequence[int]) -> list[SeenPart]:
    """The segments of these paths, each as often as it is seen differently.

    lengths: how many new tokens each row has.
    """
    found: dict[tuple[int, int], SeenPart] = {}
    for row, path in enumerate(paths):
        for place, part in enumerate(path):
            item = found.setdefault((id(part.segment), part.visible), SeenPart(part))
            item.rows.append((row, place))
            item.num_tokens += lengths[row]
    return list(found.values())


class SharedSegments:
    """The sealed segments of a batch of paths, packed once and attended once per layer.

    visible: tokens of each item, by bucket.
    """

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], hold: Hold = ResidentLayers
    ) -> None:
        layout = store.kv.layout
        self._device = store.compute_device
        self._num_kv_heads = layout.num_kv_heads
        seen = seen_parts(paths, [1] * len(paths))
        classes: dict[tuple[int, int], list[SeenPart]] = {}
        for item in seen:
            size = size_class(item.num_tokens, 1), size_class(item.part.visible, LEAST_KEYS)
            classes.setdefault(size, []).append(item)
        self.buckets: list[Bucket] = []
        num_bytes = 0
        for items in classes.values():
            tokens = part_width(max(item.part.visible for item in items), layout)
            mask = torch.full(
                (len(items), 1, 1, tokens), -torch.inf, dtype=layout.dtype, device=self._device
            )
            for i, item in enumerate(items):
                mask[i, :, :, : item.part.visible] = 0.0
            entries = [item.entry for item in items]
            self.buckets.append(Bucket(hold(store, entries, tokens), mask))
            num_bytes += layout.read_bytes_per_token * len(items) * tokens
        size = len(paths), max(map(len, paths))
        of_rows, ends = np.full(size, len(seen)), np.zeros(size, int)
        behind = [tokens_behind(path) for path in paths]
        for number, item in enumerate(chain(*classes.values())):
            for row, place in item.rows:
                of_rows[row, place] = number
                ends[row, place] = item.part.visible + behind[row][place]
        counts = [len(items) for items in classes.values()]
        self.visible = [[item.part.visible for item in items] for items in classes.values()]
        self.slots = Slots(of_rows, counts, ends, self._device)
        self._scratch, self._counted = store.scratch, num_bytes
        self._scratch.add(num_bytes)

    def close(self) -> None:
        """Give back the packed copies' bytes."""
        self._scratch.add(-self._counted)
        self._counted = 0

    def query_index(self, rows: Tensor, group: int) -> tuple[Tensor, int]:
        """Where each padded query of a bucket comes from. rows: in its slots [item, slot].

        Returns an index into [row * kv_heads * group] queries in the order (item, kv_head, slot,
        group), and how many of an item and kv_head are real.
        """
        heads = torch.arange(self._num_kv_heads * group, device=self._device)
        index = rows[:, None, :, None] * len(heads) + heads.view(1, -1, 1, group)
        index = index.flatten(2)
        return _padded(index, 2).flatten(), index.shape[2]
