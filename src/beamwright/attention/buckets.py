"""Packs stored segments into padded tensors for torch attention, in buckets of similar size.

Attention reads the packed KV one layer at a time from a `LayerSource`. If KV is on the device, a
source only indexes a tensor. Other sources stream layers over the link, so reading may wait (LBS
section 4.1, the token-by-token baseline). The newest tokens of rows are in their tails and are not
packed here.
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

from beamwright.attention.parts import KEY_MULTIPLE, QUERY_MULTIPLE, round_up
from beamwright.kv.pool import KVLayout
from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail, padded_path

Table = npt.NDArray[np.int64]
# Number of keys in the smallest size class of packed segments.
LEAST_KEYS = 32


@dataclass(frozen=True)
class Entry:
    """Describes what one entry of a packed tensor contains: tokens of some segments."""

    parts: Path  # the segments with their visible tokens, packed one after the other
    rows: tuple[int, ...]  # the rows of the batch that read the entry
    room: int = 0  # free tokens after the parts, for the row's own tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all parts."""
        return sum(part.visible for part in self.parts)


class LayerSource:
    """Packed KV [layer, K or V, entry, kv_head, token, head_dim], read one layer at a time."""

    def layer(self, number: int) -> Tensor:
        """Return layer `number` [K or V, entry, kv_head, token, head_dim] to read and write.

        The call may wait for a transfer.
        """
        raise NotImplementedError

    def restore(self, tail: Tail) -> None:
        """Copy the tail of each row to the positions after the row's path, in all layers.

        Entry i must belong to row i alone and have room for its tail (`Entry.room`). A tail is
        copied with its free positions, which attention masks.

        This class does nothing, for sources that store the tails themselves, and for attention that
        reads the tails separately.
        """


def pack(store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> Tensor:
    """Copy each entry's segments one after the other, padded with zeros to `num_tokens` tokens.

    If a segment has several device copies, each entry that reads it takes the next copy.

    Returns:
        A tensor [layer, K or V, entry, kv_head, token, head_dim].
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
    """A `LayerSource` that keeps all layers on the device."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._data = pack(store, entries, num_tokens)
        self._layers = self._data.unbind(0)
        self._lengths = [entry.num_tokens for entry in entries]

    @property
    def whole(self) -> Tensor:
        """All layers as one tensor [layer, K or V, entry, kv_head, token, head_dim]."""
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
    """A `LayerSource` for segments that the current pass both writes and reads.

    Each layer is gathered from the blocks when attention reads it, after the pass has written the
    layer's KV.
    """

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._kv, size = store.kv, store.kv.block_tokens
        # Masked positions read the segment's first token.
        places = np.zeros((len(entries), num_tokens), dtype=np.int64)
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
        return self._kv.read((blocks, number, slice(None), offsets)).permute(2, 0, 3, 1, 4)


# A function that packs entries, given (store, entries, tokens per entry), and decides whether the
# packed layers are on the device or on the host.
Hold = Callable[[SegmentStore, Sequence[Entry], int], LayerSource]


# --- segments that rows share ------------------------------------------------------------------


def size_class(value: int, least: int) -> int:
    """Round `value` up to `least` times a power of four."""
    size = least
    while size < value:
        size *= 4
    return size


@dataclass(frozen=True)
class Bucket:
    """Items of one size class, padded to the same number of tokens.

    An item is a segment with its visible tokens and the rows that read it (`SharedPart`).
    """

    layers: LayerSource  # packed KV, per layer [K or V, item, kv_head, token, head_dim]
    mask: Tensor  # additive [item, 1, 1, token]: minus infinity for padding

    def window_mask(
        self, window: int, ends: Tensor, places: Tensor, group: int
    ) -> tuple[Tensor, Tensor]:
        """Build the bucket's mask for layers with a sliding window.

        Args:
            window: number of tokens that a token attends to, itself included.
            ends: the bucket's entry of `RowAssignment.ends` [item, slot].
            places: the current token's index in the tail of the slot's row [item, slot].
            group: number of query heads per KV head.

        Returns:
            The additive mask [item, 1, slot * group, token], and a bool tensor [item, slot * group]
            that is True for queries with all tokens masked. Both are padded like `query_index`.
        """
        tokens = torch.arange(self.mask.shape[-1], device=ends.device)
        far = (ends + places).unsqueeze(2) - tokens >= window
        far = _padded(far.repeat_interleave(group, dim=1), 1)
        mask = self.mask.masked_fill(far.unsqueeze(1), float("-inf"))
        return mask, mask.isinf().all(-1).squeeze(1)


class RowAssignment:
    """The assignment of rows to items. A slot is the place of one row in one item.

    An item has one slot for each row that reads it. All items of a bucket have the same number of
    slots; an empty slot names row 0, and its result is never read.

    Args:
        items: [rows, parts] item numbers along each row's path, padded with `sum(counts)`. Items
            are numbered bucket by bucket.
        counts: number of items per bucket.
        ends: [rows, parts] tokens from the first token of each part to the end of the path.

    Attributes:
        items: the argument `items`.
        rows: per bucket, the row in each slot [item, slot].
        ends: per bucket, the value of `ends` for the row and item of each slot [item, slot].
        num_slots: number of slots of all items.
        parts: [rows, parts] slot numbers along each row's path, padded with `num_slots`.
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
        on_device = torch.from_numpy(of_slots).to(device).split(sizes_of, dim=1)
        shaped = [f.unflatten(1, (n, -1)) for f, n in zip(on_device, counts, strict=True)]
        self.rows, self.ends = [rows for rows, _ in shaped], [ends for _, ends in shaped]

    def select_rows(self, rows: Tensor) -> RowAssignment:
        """Return the assignment for a batch of these rows; a row may occur several times."""
        items, counts, ends, device = self._given
        index = rows.cpu().numpy()
        return RowAssignment(items[index], counts, ends[index], device)


def _padded(queries: Tensor, dim: int) -> Tensor:
    """Pad `queries` along `dim` to a multiple of 8 by repeating the first query."""
    missing = -queries.shape[dim] % QUERY_MULTIPLE
    if not missing:
        return queries
    first = queries.narrow(dim, 0, 1)
    return torch.cat([queries, *[first] * missing], dim=dim)


def part_width(visible: int, layout: KVLayout) -> int:
    """Return the number of keys to which a packed part of a path is padded.

    The flash operator gives bitwise equal results for all multiples of 16. Plain matrix products,
    which the softcap requires, need other lengths; see `kv.tails`.
    """
    if layout.softcap is None:
        return round_up(visible, KEY_MULTIPLE)
    return padded_path(visible, layout.head_dim)


def tokens_after(path: Path) -> list[int]:
    """Return, for each part of a path, the number of path tokens after the part."""
    return [*accumulate((part.visible for part in path[:0:-1]), initial=0)][::-1][: len(path)]


@dataclass
class SharedPart:
    """A segment with its visible tokens, and the rows that read exactly these tokens."""

    part: PathPart
    # (row, index of the segment in the row's path) for each row.
    rows: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0  # number of new tokens of all these rows

    @property
    def written(self) -> bool:
        """False if the current pass must first write some of the visible tokens."""
        return self.part.visible <= self.part.segment.length

    @property
    def entry(self) -> Entry:
        """The entry of a packed tensor for this part."""
        return Entry((self.part,), tuple(row for row, _ in self.rows))


def find_shared_parts(paths: Sequence[Path], lengths: Sequence[int]) -> list[SharedPart]:
    """Find the segments that a batch of paths reads, and the rows that share each of them.

    Rows that read different numbers of a segment's tokens do not share it.
    lengths: number of new tokens per row.
    """
    parts: dict[tuple[int, int], SharedPart] = {}
    for row, path in enumerate(paths):
        for place, part in enumerate(path):
            item = parts.setdefault((id(part.segment), part.visible), SharedPart(part))
            item.rows.append((row, place))
            item.num_tokens += lengths[row]
    return list(parts.values())


class SharedSegments:
    """The segments of a batch of paths, packed once, so that rows can share them in attention.

    buckets: the items in buckets of similar size.
    visible: per bucket, the number of visible tokens of each item.
    slots: the assignment of the batch's rows to slots of the items.
    """

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], hold: Hold = ResidentLayers
    ) -> None:
        layout = store.kv.layout
        self._device = store.compute_device
        self._num_kv_heads = layout.num_kv_heads
        seen = find_shared_parts(paths, [1] * len(paths))
        classes: dict[tuple[int, int], list[SharedPart]] = {}
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
        after = [tokens_after(path) for path in paths]
        for number, item in enumerate(chain(*classes.values())):
            for row, place in item.rows:
                of_rows[row, place] = number
                ends[row, place] = item.part.visible + after[row][place]
        counts = [len(items) for items in classes.values()]
        self.visible = [[item.part.visible for item in items] for items in classes.values()]
        self.slots = RowAssignment(of_rows, counts, ends, self._device)
        self._scratch, self._counted = store.scratch, num_bytes
        self._scratch.count_unchecked(num_bytes)

    def close(self) -> None:
        """Release the bytes of the packed copies from the KV budget."""
        self._scratch.count_unchecked(-self._counted)
        self._counted = 0

    def query_index(self, rows: Tensor, group: int) -> tuple[Tensor, int]:
        """Return which query to copy to each position of a bucket's padded queries.

        Args:
            rows: the row in each slot [item, slot].
            group: number of query heads per KV head.

        Returns:
            An index into queries [row * kv_heads * group], in the order (item, kv_head, slot,
            group), and the number of real queries per item and KV head.
        """
        heads = torch.arange(self._num_kv_heads * group, device=self._device)
        index = rows[:, None, :, None] * len(heads) + heads.view(1, -1, 1, group)
        index = index.flatten(2)
        return _padded(index, 2).flatten(), index.shape[2]
