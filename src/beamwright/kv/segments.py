"""Segments: the KV of one node as block tables, with residency and pins (no tensors).

A row's KV is a path of segments, from the prompt's to its own, so siblings share their ancestors'
KV. A lease pins segments on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, chain, count
from typing import Any, NamedTuple

from beamwright.kv.link import Transfer
from beamwright.kv.pool import BlockLedger, BlockSpec


class RestoreKind(Enum):
    """How evicted KV came back to the device."""

    LOADED = "loaded"
    RECOMPUTED = "recomputed"


@dataclass
class PinTally:
    """Number of pinned device blocks, summed over all segments of one cache manager."""

    pinned_blocks: int = 0


_ONE_GROUP = BlockSpec(8)


@dataclass(eq=False)
class Segment:
    """KV of one node, like a sequence's block table in vLLM.

    A segment starts a new block, and may end anywhere inside its last block.

    If a model has several groups of layers (full attention, sliding window, recurrent), a node has
    one segment for each group. A path contains the node's first segment. Its `others` are the
    segments of the other groups, and each of them refers back to it by `first`. A node's segments
    are created, extended and freed together, but each is pinned, moved and evicted on its own.
    """

    name: str = ""
    group: BlockSpec = _ONE_GROUP
    start: int = 0  # position of its first token in the path
    length: int = 0  # tokens written so far
    # Device blocks of each copy: no copy if the segment is not on the device, one if all rows share
    # it, several only if every row reads its own (`CacheManager.copies_per_beam`).
    copies: list[list[int]] = field(default_factory=list)
    # Blocks on the host, and the number of tokens that they hold once `transfers` have finished.
    host_blocks: list[int] = field(default_factory=list)
    host_length: int = 0
    transfers: list[Transfer] = field(default_factory=list)  # must finish before blocks are reused
    pins: int = 0  # number of copies that may not be evicted
    pinned_blocks: int = 0  # number of blocks of the pinned copies; `tally` includes them
    tally: PinTally = field(default_factory=PinTally)
    last_use: int = 0  # number of the last lease that included the segment
    serial: int = 0  # number in the order of creation, in which segments are listed
    freed: bool = False
    out_of_window: bool = False  # True if the KV was freed because no later row's window reaches it
    source: Source | None = None  # inputs from which the KV can be computed again
    restored_by: RestoreKind | None = None  # how evicted KV came back since its last use
    attention_data: Any = None  # data that attention attaches for the row that writes this segment
    others: tuple[Segment, ...] = field(default=(), repr=False)
    first: Segment | None = field(default=None, repr=False)

    @property
    def group_segments(self) -> tuple[Segment, ...]:
        """The node's segments, one for each group of layers."""
        return (self, *self.others)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens of the segment need."""
        return self.group.blocks_for(num_tokens)

    def missing_blocks(self, copies: int) -> int:
        """Return how many blocks must be loaded or copied to have `copies` copies on the device."""
        missing = max(0, copies - len(self.copies)) if self.length else 0
        return missing * self.blocks_for(self.length)

    def fresh_blocks(self, copies: int, num_tokens: int) -> int:
        """Return how many blocks to allocate for `copies` copies, grown to `num_tokens` tokens."""
        wanted = max(1, len(self.copies)) * self.blocks_for(num_tokens)
        growth = max(0, wanted - sum(map(len, self.copies)))
        return growth + self.missing_blocks(copies)

    def newly_pinned_blocks(self, copies: int, num_tokens: int) -> int:
        """Return how many blocks a lease on `copies` copies pins that are not pinned yet.

        num_tokens: length to which the segment grows. If `copies` is 0, the segment is not read:
            the result is the number of blocks of `num_tokens` tokens.
        """
        if not copies:
            return self.blocks_for(num_tokens)
        size = self.blocks_for(max(self.length, num_tokens))
        held = min(self.pins, len(self.copies))
        return max(copies, held) * max(size, len(self.blocks)) - self.pinned_blocks

    @property
    def blocks(self) -> list[int]:
        """Device blocks of the first copy; empty if the segment is not resident."""
        return self.copies[0] if self.copies else []

    @property
    def unpinned_copies(self) -> list[list[int]]:
        """Device copies that may be evicted."""
        return self.copies[self.pins :]

    @property
    def resident(self) -> bool:
        """True if the device holds the segment, or will once its transfers have finished."""
        return bool(self.copies) or self.length == 0

    @property
    def stored(self) -> bool:
        """True if the host holds all of the segment, or will once its transfers have finished."""
        return self.host_length == self.length

    @property
    def place(self) -> str | None:
        """Where the segment has blocks: `device`, `host` or `both`; None if nowhere."""
        if self.copies:
            return "both" if self.host_blocks else "device"
        return "host" if self.host_blocks else None

    def unfinished(self) -> list[Transfer]:
        """Return the segment's transfers that are still running or queued."""
        return [transfer for transfer in self.transfers if not transfer.finished]

    def pin(self, copies: int = 0) -> None:
        """Pin `copies` more copies (negative: unpin), and update the tally of pinned blocks."""
        self.pins += copies
        held = self.copies
        blocks = min(self.pins, len(held)) * len(held[0]) if held else 0
        if blocks != self.pinned_blocks:
            self.tally.pinned_blocks += blocks - self.pinned_blocks
            self.pinned_blocks = blocks


class LiveSegments:
    """Registry of all segments that are not freed, with an index of those on the device."""

    def __init__(self) -> None:
        self.tally = PinTally()
        self._all: dict[Segment, None] = {}
        self._present: dict[int, Segment] = {}  # by serial
        self._serials = count()

    def create_unregistered(self, groups: Sequence[BlockSpec], name: str, start: int) -> Segment:
        """Create a node's empty segments, one per group, unregistered; return the first."""
        first, *others = [Segment(name, group, start, tally=self.tally) for group in groups]
        first.others = tuple(others)
        for each in others:
            each.first = first
        return first

    def add(self, segment: Segment) -> None:
        """Register a segment that was created."""
        segment.serial = next(self._serials)
        self._all[segment] = None

    def remove(self, segment: Segment) -> None:
        """Unregister a segment that was freed."""
        self._all.pop(segment, None)

    def update(self, segment: Segment) -> None:
        """Update the index and the tally after a segment's device blocks have changed."""
        segment.pin()
        if segment.copies:
            self._present[segment.serial] = segment
        else:
            self._present.pop(segment.serial, None)

    def segments_on_device(self) -> Iterable[Segment]:
        """Return the segments that have blocks on the device."""
        return self._present.values()

    def resident_segments(self) -> list[Segment]:
        """Return the segments that hold tokens on the device, oldest first."""
        return [s for s in map(self._present.__getitem__, sorted(self._present)) if s.length]

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all segments, one copy of each, on the device or the host."""
        return sum(s.blocks_for(s.length) for s in self._all if not s.out_of_window)

    @property
    def num_nodes(self) -> int:
        """Number of nodes with segments."""
        return sum(segment.first is None for segment in self._all)

    def check(self, device: BlockLedger, host: BlockLedger | None) -> None:
        """Check that every block is free or owned by one copy of one live segment."""
        live = list(self._all)
        device.check([b for s in live for blocks in s.copies for b in blocks])
        if host is not None:
            host.check([block for segment in live for block in segment.host_blocks])
        for segment in live:
            wanted = segment.blocks_for(segment.length)
            short = any(len(blocks) < wanted for blocks in segment.copies)
            assert not short, f"{segment.length} tokens lack blocks"
            assert segment.length or segment.pins <= max(1, len(segment.copies)), "pins no copy"
            assert bool(segment.copies) == (segment.serial in self._present), "astray"
        pinned = sum(min(s.pins, len(s.copies)) * len(s.blocks) for s in live)
        assert pinned == self.tally.pinned_blocks, f"{pinned} blocks are pinned"


class Lease:
    """Pins on segments, which keep them from being evicted. Pins can be added and released.

    As a context manager, it releases all pins at the end of the block.
    """

    def __init__(self, needs: Mapping[Segment, int]) -> None:
        self._held: dict[Segment, int] = {}
        self.add(needs)

    def add(self, needs: Mapping[Segment, int]) -> None:
        """Pin more copies of each segment, in the given numbers."""
        for segment, copies in needs.items():
            self._held[segment] = self._held.get(segment, 0) + copies
            segment.pin(copies)

    def keep_only(self, needs: Mapping[Segment, int]) -> None:
        """Unpin all copies beyond those in `needs`."""
        if not self._held:
            return
        held, self._held = self._held, {s: min(n, self._held.get(s, 0)) for s, n in needs.items()}
        for segment, copies in held.items():
            segment.pin(self._held.get(segment, 0) - copies)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised: object) -> None:
        self.keep_only({})


class PathPart(NamedTuple):
    """One entry of a path: a segment, of which the first `visible` tokens belong to the path.

    own: True if the row that reads the path also writes to this segment.
    """

    segment: Segment
    visible: int
    own: bool = False


Path = tuple[PathPart, ...]


@dataclass(frozen=True)
class Source:
    """Inputs from which a segment's KV can be recomputed. start: position of its first token."""

    path: Path
    token_ids: tuple[int, ...]
    start: int


def truncate_path(path: Path, num_tokens: int) -> Path:
    """Return the first `num_tokens` tokens of a path, for a child that branches off inside it."""
    parts: list[PathPart] = []
    left = num_tokens
    for part in path:
        if left <= 0:
            break
        parts.append(PathPart(part.segment, min(part.visible, left)))
        left -= part.visible
    return tuple(parts)


def copies_needed(paths: Iterable[Sequence[PathPart]], *, per_beam: bool) -> Counter[Segment]:
    """Return the segments that these paths read, parents first, with the copies needed of each.

    per_beam: one copy for every path; otherwise one copy for all.
    """
    needs = chain.from_iterable(map(segments_read, paths))
    return Counter(needs) if per_beam else Counter(dict.fromkeys(needs, 1))


def parts_read(path: Sequence[PathPart], group: int) -> Path:
    """Return the part of a path that one group of layers reads for the row after it.

    The result has the segments of that group. Parts outside the attention window of the row's first
    token are left out. The choice depends on the path alone, not on the row's progress, so that
    attention sums in the same order at every point of the step. In a group of recurrent states, a
    row reads only the last part: its own state, or its parent's if it has no token yet.
    """
    if not group and path and path[0].segment.group.window is None:
        return tuple(path)
    parts: list[PathPart] = []
    behind = 0
    for part in reversed(path):
        segment = part.segment.group_segments[group]
        if segment.group.window is not None and behind + 1 >= segment.group.window:
            break
        parts.append(PathPart(segment, part.visible, part.own))
        # The window is measured from the step's first token, so the own part does not count.
        behind += 0 if part.own and not segment.group.state_blocks else part.visible
    return tuple(reversed(parts))


def initial_state_segment(path: Sequence[PathPart]) -> Segment | None:
    """Return the segment whose recurrent state is the initial state of a row after this path.

    None: the row begins with zeros. A state belongs to a whole segment, so the path must not end
    inside one.
    """
    if not path:
        return None
    segment, visible, _ = path[-1]
    assert visible == segment.length, f"a state inside segment {segment.name!r} is asked for"
    return segment.group_segments[-1]


def segments_read(path: Sequence[PathPart]) -> list[Segment]:
    """Return the segments that a row after this path reads, of all groups, parents first."""
    parts = [part for part in path if part.visible > 0]
    if not parts or (parts[0].segment.group.window is None and not parts[0].segment.others):
        return [part.segment for part in parts]
    groups = range(len(parts[0].segment.group_segments))
    return [part.segment for group in groups for part in parts_read(parts, group)]


def for_all_groups(wanted: Mapping[Segment, int]) -> dict[Segment, int]:
    """Return the mapping with each node's first segment replaced by its segments of all groups."""
    if not any([first.others for first in wanted]):
        return dict(wanted)
    return {segment: count for first, count in wanted.items() for segment in first.group_segments}


def append_own_segment(path: Path, last: Segment | None, num_tokens: int) -> Path:
    """Return a path with `num_tokens` tokens of a row's own segment appended, without empty parts.

    last: the row's own segment; None: only the path.
    """
    if (last is None or not num_tokens) and all([part.visible for part in path]):
        return path
    parts = path if last is None else (*path, PathPart(last, num_tokens, own=True))
    return tuple([part for part in parts if part.visible > 0])


def missing_blocks(needs: Mapping[Segment, int]) -> int:
    """Return how many blocks must be loaded or copied to have these copies on the device."""
    return sum([segment.missing_blocks(copies) for segment, copies in needs.items()])


def prefix_with_blocks(
    segments: Sequence[Segment], num_blocks: int, copies: Callable[[Segment], list[list[int]]]
) -> list[Segment]:
    """Return the first of `segments`, as few as have `num_blocks` blocks in these `copies`."""
    before = accumulate((sum(map(len, copies(s))) for s in segments), initial=0)
    return [s for s, covered in zip(segments, before, strict=False) if covered < num_blocks]
