"""Work lists of the attention kernels: which rows attend to which parts of their paths. Tile sizes.

A path is cut into parts. Each part gives one partial result per row, and a row's parts are merged
in path order. The cuts depend only on the segment lengths of the row's own path and on constants.
So a row's result is bitwise equal in every batch (docs/concepts/sameness.md).

A part is attended once for all rows that share it. The rows of a part are cut into items, each with
as many rows as a tile holds. Sessions order rows depth-first, so these rows are contiguous. Each
(part, row) has a slot for its partial result until the row's parts are merged.

Tile sizes depend on the model's shape, never on the batch, because a tile decides the order of
summation.

Lists are flat int32 tensors with spare capacity. The program of an unused item, which has no slots,
ends at once. Lists are rewritten in place, so that a captured CUDA graph can keep reading them.
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
_STAGE_BYTES = 32 * 1024  # maximum bytes of keys and values in one tile
# Shared memory of one program: the smallest of any GPU since Ampere, and that of an H100.
_SHARED_BYTES, _HOPPER_BYTES = 99 * 1024, 227 * 1024
_HALF_BYTES = 49 * 1024  # shared memory of one program if two share the 100 KiB of an RTX card
_LEAST = 16  # rows of a matrix instruction, and the minimum depth of a product
_FOUR_WARPS = 64 * 128 * 32  # a tile with more pairs x dim x tokens gets eight warps
# Minimum average number of tokens per chunk in a captured pass. It limits the number of programs.
LEAST_CHUNK = 8
# Maximum number of tokens of an entry (a block or a piece of one). A tile holds whole entries.
MOST_ENTRY_TOKENS = 16

# --- tiles ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadLayout:
    """Heads of one layer: `group` query heads read each KV head."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Tile:
    """Sizes and launch settings of one program of an attention kernel."""

    pairs: int  # (query token, query head of the group) pairs: the rows of the matrix products
    queries: int  # whole query tokens that fit in `pairs`
    tokens: int  # keys per iteration of the loop
    dim: int  # head_dim, padded to a power of two
    warps: int
    stages: int  # pipeline stages; stages - 1 tiles of keys and values are in shared memory


def power_of_two(value: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `value` and at least `least`."""
    return max(least, 1 << max(0, value - 1).bit_length())


@cache
def decode_tile(heads: HeadLayout, element_bytes: int, *, small: bool = False) -> Tile:
    """Choose the tile of a decode kernel.

    Few queries read each key, so small groups get few pairs; otherwise most of the tile would be
    idle. On an H100, three programs with 32 tokens per tile fit a multiprocessor, but only two with
    64. With 32, 256 rows take 35 us per layer instead of 44
    (docs/log/2026-11.md#attention-on-a-card).

    small: `has_small_shared_memory` of the GPU. Two programs must fit its shared memory, if
        necessary with one pipeline stage less.
    """
    pairs = 16 if heads.group <= 2 else 32 if heads.group <= 4 else 64
    most_bytes = _HALF_BYTES if small else _SHARED_BYTES
    return _tile(heads, element_bytes, 16 if element_bytes == 4 else pairs, 32, most_bytes)


@cache
def prefill_tile(heads: HeadLayout, element_bytes: int, *, hopper: bool = False) -> Tile:
    """Choose the tile of a prefill kernel, in which many queries read each key.

    float32 has no matrix unit, and its larger tiles would spill registers.

    hopper: `is_hopper` of the GPU. There, products read tiles from shared memory: with head_dim
        128, 128 pairs and eight warps were an eighth faster after a path; with head_dim 64, slower.
        On other cards tiles pass through registers: with head_dim 64 and 8-bit KV, two tiles of 64
        tokens do not fit.
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
    # Shared memory holds keys and values of two tiles, queries and weights. The number of stages
    # does not change results.
    three = (4 * tokens * dim + pairs * (dim + tokens)) * element_bytes
    return Tile(pairs, pairs // heads.group, tokens, dim, warps, 3 if three <= most_bytes else 2)


# --- parts of paths ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """Constants that decide how paths are cut into parts.

    part_tokens: maximum number of tokens of a part, a multiple of the block size. Longer segments
        are split (split-K). Shorter ones are joined, although joining makes siblings read shared
        segments repeatedly: on an H100 time depends on the number of programs, not on bytes in its
        cache (docs/log/2026-11.md#attention-on-a-card). With 128, few rows wait for the longest
        part.
    copy_per_row: every row reads its own device copy of its path. The k-th row through a segment
        reads the k-th copy, or the last one if there are fewer.
    """

    part_tokens: int = 128
    copy_per_row: bool = False


class TokenRun(NamedTuple):
    """Tokens [first, first + tokens) of segment number `part` of a path; `first` starts a block."""

    part: int
    first: int
    tokens: int


def cut_path(visible: Sequence[int], block_tokens: int, cuts: Cuts) -> list[list[TokenRun]]:
    """Cut a path into parts, each a list of runs; empty segments have none.

    visible: number of tokens that the row reads of each segment.
    """
    most, most_blocks = cuts.part_tokens, cuts.part_tokens // block_tokens
    parts: list[list[TokenRun]] = []
    open_blocks = most_blocks  # the first run always starts a part
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
    """Work lists of a decode step.

    items: [items * 4] first entry, number of entries, first slot and number of slots of each item.
    entry_blocks: [entries] a block of the pool, or a piece of a block with `entry_size` tokens.
    entry_tokens: [entries] number of valid tokens in each entry.
    entry_firsts: [entries] number of tokens of the same part that precede each entry.
    slot_rows: [slots] the row of each slot.
    slot_reach: [slots] path tokens from the first token of the part up to the row's tail.
    row_parts: [rows * 2] start of a row's slots in row_slots, and its number of parts and tail.
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
    """Work lists of a prefill.

    tiles: [tiles * 7] see `programs.attend_chunks`.
    entry_blocks, entry_tokens, entry_firsts: as in `DecodeWork`, for the whole path.
    slots: [tokens] place of a token's keys and values in the pool, counted in tokens; negative for
        tokens that are not stored. Empty: the caller stores the KV.
    """

    tiles: Ints
    entry_blocks: Ints
    entry_tokens: Ints
    entry_firsts: Ints
    slots: Ints


def entry_size(block_tokens: int) -> int:
    """Return the tokens of an entry for blocks of `block_tokens` tokens."""
    return min(block_tokens, MOST_ENTRY_TOKENS)


class _Entries:
    """The entries of work lists, collected run by run."""

    def __init__(self, block_tokens: int) -> None:
        self.size = entry_size(block_tokens)
        self.pieces = block_tokens // self.size  # entries per block
        self.blocks: list[int] = []
        # Three numbers per run: its number of entries, the tokens in the last of these entries, and
        # the tokens of the same part that precede the run.
        self._runs: list[int] = []

    def add(self, segment: Segment, copy: int, first: int, tokens: int, before: int) -> None:
        """Add the entries of a run: `tokens` tokens of a segment, from token `first` on.

        copy: which of the segment's device copies is read.
        before: tokens of the same part that precede the run.
        """
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
        """Return `entry_blocks`, `entry_tokens` and `entry_firsts` of `DecodeWork`."""
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
    """A part of one or several paths, and the rows that share it.

    runs: the part's tokens, as (segment, device copy, first token, number of tokens).
    reach: for each row, the number of its path's tokens from the part's first token on.
    """

    runs: Sequence[tuple[Segment, int, int, int]]
    num_tokens: int
    rows: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    first_slot: int = 0


def make_decode_work(
    paths: Sequence[Path | None], block_tokens: int, cuts: Cuts, queries_per_tile: int
) -> DecodeWork:
    """Build the work lists for one token per row; None in place of a path: the row is unused."""
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
    """Return each row's parts in path order, with the row's index among the rows of the part."""
    seen: Counter[Segment] = Counter()
    known: dict[Hashable, _Part] = {}
    of_path: dict[Hashable, list[_Part]] = {}  # by id of the path: siblings share it
    of_lengths: dict[Hashable, list[list[TokenRun]]] = {}  # few keys if step lengths are fixed
    by_row: list[list[tuple[_Part, int]]] = []
    for row, path in enumerate(paths):
        whole = row if cuts.copy_per_row else id(path)
        if (parts := of_path.get(whole)) is None:
            copies = _copy_numbers(path, seen) if cuts.copy_per_row else [0] * len(path)
            parts = of_path[whole] = []
            lengths = tuple([each.visible for each in path])
            if lengths not in of_lengths:
                of_lengths[lengths] = cut_path(lengths, block_tokens, cuts)
            for runs in of_lengths[lengths]:
                # Paths with the same beginning are cut alike there, so equal runs are shared.
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


def make_prefill_work(
    paths: Sequence[Path],
    lengths: Sequence[int],
    block_tokens: int,
    queries_per_tile: int,
    *,
    copy_per_row: bool,
    slots: Sequence[int] | Ints = (),
) -> PrefillWork:
    """Build the work lists for `lengths[i]` new tokens after path i, packed path after path."""
    seen: Counter[Segment] = Counter()
    entries = _Entries(block_tokens)
    tiles: list[int] = []
    first_own = 0
    for path, length in zip(paths, lengths, strict=True):
        first_entry = len(entries.blocks)
        copies = _copy_numbers(path, seen) if copy_per_row else [0] * len(path)
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


def max_tiles(num_tokens: int, queries_per_tile: int) -> int:
    """Return an upper bound on the tiles of a captured pass over `num_tokens`, for any chunks."""
    return num_tokens // queries_per_tile + num_tokens // LEAST_CHUNK


def _copy_numbers(path: Path, seen: Counter[Segment]) -> list[int]:
    """Return which device copy of each segment a row reads, and count the row in `seen`."""
    numbers = []
    for part in path:
        numbers.append(max(0, min(seen[part.segment], len(part.segment.copies) - 1)))
        seen[part.segment] += 1
    return numbers


def _ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int32)


class WorkBuffers:
    """Device tensors for work lists, with capacities that are powers of two.

    `num_moves` counts reallocations: a graph captured before then must be captured again.
    least_room: minimum capacity of every list. headroom: when lists grow, each list gets at
    least this multiple of its length.
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
        """Write `work` to the device, and return its lists in field order, padded with zeros.

        rooms: minimum capacity by name of a list, applied when any list has to grow.
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
        """Do nothing: the lists are small, so their memory is kept."""
