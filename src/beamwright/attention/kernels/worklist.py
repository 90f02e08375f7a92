"""Tiles, and work lists: which parts of segments are attended for which rows. Knows no kernel.

A path is cut into parts by a pure function of the lengths on it. Each part gives one partial result
per row, and a row's parts are merged in path order. So the cuts may depend on the row's own path
and on constants, and on nothing else: then its bits are the same whoever is in the batch
(docs/concepts/sameness.md).

A part is attended once for all rows that share it. Its rows are cut into items of as
many rows as a tile holds; sessions order rows depth-first, so these are ranges. Every (part, row)
is a slot, where a partial result is kept until the row's parts are merged.

Tile sizes are constants of the model's shape, never of the batch: a tile decides in which order a
row's sums are taken.

Lists are flat int32 tensors with room to spare: unused items have no slots and cost a program that
ends at once. They are rewritten in place, so that a captured CUDA graph can go on reading them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from beamwright.kv.segments import Path, Segment

Ints = npt.NDArray[np.int32]

_LEAST_ROOM = 8
_STAGE_BYTES = 32 * 1024  # keys and values of one tile
_SHARED_BYTES, _HOPPER_BYTES = 99 * 1024, 227 * 1024  # of a program: the least since Ampere, H100's
_HALF_BYTES = 49 * 1024  # of 100 KiB, which is what two programs of an RTX card share
_LEAST = 16  # a matrix instruction's rows, and the least depth of a product
_FOUR_WARPS = 64 * 128 * 32  # pairs x dim x tokens
LEAST_CHUNK = 8
"""Tokens of a captured pass for each of its chunks: its programs are counted beforehand."""
MOST_ENTRY_TOKENS = 16
"""Tokens of an entry: a tile holds whole entries, and a block may hold more."""

# --- tiles ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadLayout:
    """Heads of one layer: `group` query heads read each KV head."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Tile:
    """Sizes of one program.

    pairs: (query token, head of the group) pairs, the rows of the matrix products.
    queries: whole query tokens that fit in `pairs`.
    tokens: keys per step of the loop.
    dim: head_dim, padded to a power of two.
    stages: of the loop; keys and values of one less are on the chip together.
    """

    pairs: int
    queries: int
    tokens: int
    dim: int
    warps: int
    stages: int


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and at least `least`."""
    return max(least, 1 << max(0, value - 1).bit_length())


@cache
def decode_tile(heads: HeadLayout, element_bytes: int, *, small: bool = False) -> Tile:
    """Few queries per key: small groups get few rows, as the rest of a tile would be idle.

    On an H100, of 32 tokens a tile three programs fit a multiprocessor, of 64 two: 256 rows took
    35 us a layer, not 44 (docs/log/2026-11.md#attention-on-a-card). small: see `is_small`; there
    two fit, if need be with a stage less.
    """
    pairs = 16 if heads.group <= 2 else 32 if heads.group <= 4 else 64
    most_bytes = _HALF_BYTES if small else _SHARED_BYTES
    return _tile(heads, element_bytes, 16 if element_bytes == 4 else pairs, 32, most_bytes)


@cache
def prefill_tile(heads: HeadLayout, element_bytes: int, *, hopper: bool = False) -> Tile:
    """Many queries per key. float32 has no matrix unit, and larger tiles spill registers.

    hopper: products of a group of warps take tiles from shared memory. Heads of 128 were faster by
    an eighth with 128 rows and eight warps behind a path, those of 64 slower. On other cards they
    come by way of registers: of heads of 64 two tiles of 64 tokens, in eight bits, do not fit.
    """
    dim = power_of_two(heads.head_dim)
    pairs = 128 if hopper and dim == 128 else 64
    tokens = 64 if hopper or dim > 64 else 32
    most_bytes = _HOPPER_BYTES if hopper else _SHARED_BYTES
    return _tile(heads, element_bytes, 16 if element_bytes == 4 else pairs, tokens, most_bytes)


def _tile(
    heads: HeadLayout,
    element_bytes: int,
    pairs: int,
    most_tokens: int,
    most_bytes: int = _SHARED_BYTES,
) -> Tile:
    pairs = max(pairs, power_of_two(heads.group))
    dim = power_of_two(heads.head_dim, _LEAST)
    tokens = min(most_tokens, max(_LEAST, _STAGE_BYTES // (2 * dim * element_bytes)))
    warps = 8 if pairs * dim * tokens > _FOUR_WARPS else 4
    # Beside keys and values of two tiles: queries, and weights. Stages change no bits.
    three = (4 * tokens * dim + pairs * (dim + tokens)) * element_bytes
    return Tile(pairs, pairs // heads.group, tokens, dim, warps, 3 if three <= most_bytes else 2)


# --- parts of paths ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """The constants.

    part_tokens: most tokens of a part, a multiple of a block: longer segments are split (split-K),
        shorter ones joined, though siblings that share some of them read those more than once: on
        an H100 the number of programs is what counts, not bytes that are in its cache
        (docs/log/2026-11.md#attention-on-a-card). 128: few rows wait for the longest part.
    copy_per_row: every row reads its own device copy of its path: the k-th row through a segment
        its k-th copy, or the last there is.
    """

    part_tokens: int = 128
    copy_per_row: bool = False


class TokenRun(NamedTuple):
    """Tokens [first, first + tokens) of the `part`-th segment of a path; `first` starts a block."""

    part: int
    first: int
    tokens: int


def cut_path(visible: Sequence[int], block_tokens: int, cuts: Cuts) -> list[list[TokenRun]]:
    """The parts of a path whose segments show so many tokens; empty segments are left out."""
    most, most_blocks = cuts.part_tokens, cuts.part_tokens // block_tokens
    parts: list[list[TokenRun]] = []
    open_blocks = most_blocks  # nothing to join to
    for number, tokens in enumerate(visible):
        for first in range(0, tokens, most):
            run = TokenRun(number, first, min(most, tokens - first))
            blocks = -(-run.tokens // block_tokens)
            open_blocks += blocks
            if open_blocks > most_blocks:
                parts.append([])
                open_blocks = blocks
            parts[-1].append(run)
    return parts


@dataclass(frozen=True)
class DecodeWork:
    """Work of a decode step.

    items: [items * 4] first entry, entries, first slot and slots of each item.
    entry_blocks, entry_tokens, entry_firsts: [entries] a block of the pool, or a piece of one of
        `entry_size` tokens, how many of its tokens count, and the tokens of the part before them.
    slot_rows, slot_reach: [slots] the row of each slot, and the tokens from the part's first up to
        the row's tail.
    row_parts: [rows * 2] where a row's slots start in row_slots, and its parts with the tail.
    row_slots: [slots] the slots of each row, in path order.
    """

    items: Ints
    entry_blocks: Ints
    entry_tokens: Ints
    entry_firsts: Ints
    slot_rows: Ints
    slot_reach: Ints
    row_parts: Ints
    row_slots: Ints


@dataclass(frozen=True)
class PrefillWork:
    """Work of a prefill.

    tiles: [tiles * 7] first entry and entries of the path; first token of the chunk; first token
        and tokens of the tile; tokens of the chunk up to the tile's last; tokens of the path.
    entry_blocks, entry_tokens, entry_firsts: as in decode, of the whole path.
    slots: [tokens] where in the pool a token's keys and values are kept, counted in tokens; less
        than nought for nowhere. Empty: the caller keeps them.
    """

    tiles: Ints
    entry_blocks: Ints
    entry_tokens: Ints
    entry_firsts: Ints
    slots: Ints


def entry_size(block_tokens: int) -> int:
    """Tokens of an entry in blocks of so many."""
    return min(block_tokens, MOST_ENTRY_TOKENS)


class _Entries:
    """Blocks, and of each run of them how many, the last one's tokens, and how many came before."""

    def __init__(self, block_tokens: int) -> None:
        self.size = entry_size(block_tokens)
        self.pieces = block_tokens // self.size  # of a block
        self.blocks: list[int] = []
        self._runs: list[int] = []

    def add(self, segment: Segment, copy: int, first: int, tokens: int, before: int) -> None:
        size, pieces = self.size, self.pieces
        count = -(-tokens // size)
        held = segment.copies[copy] if segment.copies else []
        begin = first // size
        end = begin + count
        if end > len(held) * pieces:
            raise AssertionError(f"segment {segment.name!r} is read, but not on the device")
        mine = held[begin:end]
        if pieces > 1:
            mine = [held[at // pieces] * pieces + at % pieces for at in range(begin, end)]
        self.blocks += mine
        self._runs += count, tokens - (count - 1) * size, before

    def lists(self) -> tuple[Ints, Ints, Ints]:
        """Of every entry its block, its tokens, and those of its part before them."""
        counts, last, before = np.array(self._runs, dtype=np.int32).reshape(-1, 3).T
        ends = counts.cumsum(dtype=np.int32)
        tokens = np.full(len(self.blocks), self.size, dtype=np.int32)
        tokens[ends - 1] = last
        firsts = self.size * np.arange(len(self.blocks), dtype=np.int32)
        return (
            _ints(self.blocks),
            tokens,
            firsts + np.repeat(before - self.size * (ends - counts), counts),
        )


@dataclass(eq=False)
class _Part:
    """Runs of a path (segment, device copy, first, tokens), and the rows that share them.

    reach: of each row, the tokens of its path from here on.
    """

    runs: Sequence[tuple[Segment, int, int, int]]
    num_tokens: int
    rows: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    first_slot: int = 0


def decode_work(
    paths: Sequence[Path | None], block_tokens: int, cuts: Cuts, queries_per_tile: int
) -> DecodeWork:
    """Work for one token per row; None: a row that nobody reads."""
    by_row = _share([path or () for path in paths], entry_size(block_tokens), cuts)
    entries = _Entries(block_tokens)
    items: list[int] = []
    slot_rows: list[int] = []
    slot_reach: list[int] = []
    for part in dict.fromkeys([part for parts in by_row for part, _ in parts]):
        first_entry = len(entries.blocks)
        before = 0
        for segment, copy, first, tokens in part.runs:
            entries.add(segment, copy, first, tokens, before)
            before += tokens
        num_entries = len(entries.blocks) - first_entry
        part.first_slot = len(slot_rows)
        for start in range(0, len(part.rows), queries_per_tile):
            count = min(queries_per_tile, len(part.rows) - start)
            items += [first_entry, num_entries, part.first_slot + start, count]
        slot_rows += part.rows
        slot_reach += part.reach
    row_parts: list[int] = []
    row_slots: list[int] = []
    for parts in by_row:
        row_parts += [len(row_slots), len(parts) + 1]
        row_slots += [part.first_slot + place for part, place in parts]
    lists = (items, *entries.lists(), slot_rows, slot_reach, row_parts, row_slots)
    return DecodeWork(*map(_ints, lists))


def _share(paths: Sequence[Path], block_tokens: int, cuts: Cuts) -> list[list[tuple[_Part, int]]]:
    """The parts of each row in path order, and the row's place among the part's rows."""
    seen: Counter[Segment] = Counter()
    known: dict[Hashable, _Part] = {}
    of_path: dict[Hashable, list[_Part]] = {}  # siblings have the very same one
    of_lengths: dict[Hashable, list[list[TokenRun]]] = {}  # steps of a fixed length have few
    by_row: list[list[tuple[_Part, int]]] = []
    for row, path in enumerate(paths):
        whole = row if cuts.copy_per_row else id(path)
        if (parts := of_path.get(whole)) is None:
            copies = _copies(path, seen) if cuts.copy_per_row else [0] * len(path)
            parts = of_path[whole] = []
            lengths = tuple([each.visible for each in path])
            if lengths not in of_lengths:
                of_lengths[lengths] = cut_path(lengths, block_tokens, cuts)
            for runs in of_lengths[lengths]:
                # Cuts are of the path: a run of a segment's shared beginning is equal in all of it.
                found = tuple([(path[at].segment, copies[at], begin, n) for at, begin, n in runs])
                key = (row, found) if cuts.copy_per_row else found
                if (part := known.get(key)) is None:
                    part = known[key] = _Part(found, sum([run.tokens for run in runs]))
                parts.append(part)
        reach = sum([part.num_tokens for part in parts])
        mine = []
        for part in parts:
            mine.append((part, len(part.rows)))
            part.rows.append(row)
            part.reach.append(reach)
            reach -= part.num_tokens
        by_row.append(mine)
    return by_row


def prefill_work(
    paths: Sequence[Path],
    lengths: Sequence[int],
    block_tokens: int,
    queries_per_tile: int,
    *,
    copy_per_row: bool,
    slots: Sequence[int] | Ints = (),
) -> PrefillWork:
    """Work for `lengths[i]` new tokens behind path i, packed one path after the other."""
    seen: Counter[Segment] = Counter()
    entries = _Entries(block_tokens)
    tiles: list[int] = []
    first_own = 0
    for path, length in zip(paths, lengths, strict=True):
        first_entry = len(entries.blocks)
        copies = _copies(path, seen) if copy_per_row else [0] * len(path)
        before = 0
        for part, copy in zip(path, copies, strict=True):
            if part.visible:
                entries.add(part.segment, copy, 0, part.visible, before)
                before += part.visible
        num_entries = len(entries.blocks) - first_entry
        for start in range(0, length, queries_per_tile):
            count = min(queries_per_tile, length - start)
            at = [first_own, first_own + start, count, start + count, before]
            tiles += [first_entry, num_entries, *at]
        first_own += length
    return PrefillWork(*map(_ints, (tiles, *entries.lists(), slots)))


def most_tiles(num_tokens: int, queries_per_tile: int) -> int:
    """Tiles that a captured pass over so many tokens starts, whatever its chunks are."""
    return num_tokens // queries_per_tile + num_tokens // LEAST_CHUNK


def _copies(path: Path, seen: Counter[Segment]) -> list[int]:
    """Which copy of each segment this row reads; counts the rows that have passed."""
    found = []
    for part in path:
        found.append(max(0, min(seen[part.segment], len(part.segment.copies) - 1)))
        seen[part.segment] += 1
    return found


def _ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int32)


class WorkBuffers:
    """Device tensors that work lists are written into.

    They grow by doubling. `num_moves` counts how often they were allocated anew: a graph that was
    captured before has to be captured again.
    least_room: entries that every list has room for. headroom: a list that grows gets room for so
    many times what it holds.
    """

    def __init__(
        self, device: torch.device, least_room: int = _LEAST_ROOM, headroom: int = 1
    ) -> None:
        self._device, self._least_room, self._headroom = device, least_room, headroom
        self._flat = torch.zeros(0, dtype=torch.int32)
        self._sizes: tuple[int, ...] = ()
        self.num_moves = 0

    def write(
        self, work: DecodeWork | PrefillWork, rooms: Mapping[str, int] = {}
    ) -> list[torch.Tensor]:
        """The lists of `work` on the device, in the order of its fields, behind them zeros.

        rooms: what lists of these names get at least, where any has to grow.
        """
        lists: list[Ints] = [getattr(work, each.name) for each in fields(work)]
        needed = [len(each) for each in lists]
        room = self._sizes or (0,) * len(needed)
        if any(size > held for size, held in zip(needed, room, strict=True)):
            grown = [power_of_two(self._headroom * n, self._least_room) for n in needed]
            least = [rooms.get(each.name, 0) for each in fields(work)]
            self._sizes = tuple(map(max, grown, room, least))
            self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=self._device)
            self.num_moves += 1
        host = np.zeros(sum(self._sizes), dtype=np.int32)
        first = 0
        for each, size in zip(lists, self._sizes, strict=True):
            host[first : first + len(each)] = each
            first += size
        self._flat.copy_(torch.from_numpy(host))
        return list(self._flat.split(list(self._sizes)))

    def release(self) -> None:
        """Nothing: lists are small, and stay."""
