"""Segments: the KV of one node, node-aligned, where it resides and who holds it. No tensors.

A path is a tuple of (segment, visible tokens); a lease pins what a group reads. `HostTier` is the
host's side of a cache: its blocks, the link there, and who leaves the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from beamwright.kv.link import Link, Transfer
from beamwright.kv.pool import BlockLedger
from beamwright.kv.streams import Blocks, Piece
from beamwright.protocols import Direction
from beamwright.schedule.forest import eviction_order


class Return(Enum):
    """How KV that had left the device came back."""

    LOADED = "loaded"
    RECOMPUTED = "recomputed"


@dataclass
class Tally:
    """Device blocks that may not be evicted, of all segments of one cache manager."""

    pinned_blocks: int = 0


@dataclass(eq=False)
class Segment:
    """KV of one node: starts a fresh block, and ends anywhere inside its last one.

    Where layers are in groups, a node has one for each: a path names that of the first group,
    `others` are those behind it, which know it as their `first`. They are made, grown and freed
    together, and leased, moved and evicted each on its own.

    block_tokens: tokens of a block. window: how many tokens its layers see; None for all.
    fixed: its blocks whatever its length, where they hold the state behind its last token: the last
        group of models with recurrent layers.
    gone: forgotten, since no row's window can reach it any more; it keeps its length.
    serial: a number that grows, by which equals are ordered.
    length: tokens written so far.
    copies: device blocks of each copy. One, where beams share; several, where every beam of a
        group reads its own (`dense`); none, while the segment is not resident.
    host_blocks, host_length: blocks on the host, and how many tokens they hold or will hold once
        `transfers` have finished.
    pins: copies that may not be evicted. pinned_blocks: what `tally` counts of it for them.
    last_use: tick of the last lease that named it.
    start: position of its first token in the path.
    transfers: what is under way; they are waited for, or cancelled, before blocks change hands.
    source: how to compute the KV again.
    returned: how it came back, if it has left the device since it was needed last.
    memory: what attention keeps of the row that writes it, as long as its tokens.
    """

    name: str = ""
    length: int = 0
    copies: list[list[int]] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    host_length: int = 0
    pins: int = 0
    last_use: int = 0
    start: int = 0
    freed: bool = False
    transfers: list[Transfer] = field(default_factory=list)
    source: Source | None = None
    returned: Return | None = None
    memory: Any = None
    block_tokens: int = 8
    window: int | None = None
    fixed: int = 0
    gone: bool = False
    others: tuple[Segment, ...] = field(default=(), repr=False)
    first: Segment | None = field(default=None, repr=False)
    serial: int = 0
    pinned_blocks: int = 0
    tally: Tally = field(default_factory=Tally)

    @property
    def every(self) -> tuple[Segment, ...]:
        """Those of all groups, by group."""
        return (self, *self.others)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many of its tokens need."""
        return self.fixed * (num_tokens > 0) or -(-num_tokens // self.block_tokens)

    @property
    def blocks(self) -> list[int]:
        """Device blocks of the first copy; empty if it is not resident."""
        return self.copies[0] if self.copies else []

    @property
    def resident(self) -> bool:
        """True if the device holds it, or will once its transfers have finished."""
        return bool(self.copies) or self.length == 0

    @property
    def stored(self) -> bool:
        """True if the host holds all of it, or will once its transfers have finished."""
        return self.host_length == self.length

    @property
    def place(self) -> str | None:
        """Which tiers have blocks of it: `device`, `host` or `both`; None: neither."""
        if self.copies:
            return "both" if self.host_blocks else "device"
        return "host" if self.host_blocks else None

    def unfinished(self) -> list[Transfer]:
        """Its transfers that are still under way."""
        return [transfer for transfer in self.transfers if not transfer.finished]

    def pin(self, copies: int = 0) -> None:
        """So many more copies may not be evicted; to be called, too, when `copies` has changed."""
        self.pins += copies
        held = self.copies
        blocks = min(self.pins, len(held)) * len(held[0]) if held else 0
        if blocks != self.pinned_blocks:
            self.tally.pinned_blocks += blocks - self.pinned_blocks
            self.pinned_blocks = blocks


class Lease:
    """Pins on segments; some may be given up, or added, before the lease ends.

    Used in a `with` statement, it ends there.
    """

    def __init__(self, needs: Mapping[Segment, int]) -> None:
        self._held: dict[Segment, int] = {}
        self.add(needs)

    def add(self, needs: Mapping[Segment, int]) -> None:
        """Pin so many more copies of each."""
        for segment, copies in needs.items():
            self._held[segment] = self._held.get(segment, 0) + copies
            segment.pin(copies)

    def keep(self, needs: Mapping[Segment, int]) -> None:
        """Unpin everything beyond these."""
        if not self._held:
            return
        held, self._held = self._held, {s: min(n, self._held.get(s, 0)) for s, n in needs.items()}
        for segment, copies in held.items():
            segment.pin(self._held.get(segment, 0) - copies)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised: object) -> None:
        self.keep({})


class PathPart(NamedTuple):
    """The first `visible` tokens of a segment, as one path sees it.

    own: whoever reads the path goes on writing there.
    """

    segment: Segment
    visible: int
    own: bool = False


Path = tuple[PathPart, ...]


@dataclass(frozen=True)
class Source:
    """What a segment was computed from: its tokens behind a path, from position `start`."""

    path: Path
    token_ids: tuple[int, ...]
    start: int


def truncate_path(path: Path, num_tokens: int) -> Path:
    """The first `num_tokens` tokens of a path (a child that diverges inside its parent's KV)."""
    parts: list[PathPart] = []
    left = num_tokens
    for part in path:
        if left <= 0:
            break
        parts.append(PathPart(part.segment, min(part.visible, left)))
        left -= part.visible
    return tuple(parts)


def copies_needed(paths: Iterable[Sequence[PathPart]], *, per_beam: bool) -> Counter[Segment]:
    """How many device copies of each segment these paths need, parents before children."""
    needs = chain.from_iterable(map(segments_read, paths))
    return Counter(needs) if per_beam else Counter(dict.fromkeys(needs, 1))


def within_reach(path: Sequence[PathPart], group: int) -> Path:
    """What a row behind a path reads of it in a group's layers, in that group's segments.

    Parts that its first token's window does not reach are left out: which ones follows from the
    path alone, and not from how far the row has come, so its sums do not depend on when it is read.
    Of states it is the last part's alone, its own where it has begun.
    """
    if not group and path and path[0].segment.window is None:
        return tuple(path)
    parts: list[PathPart] = []
    behind = 0
    for part in reversed(path):
        segment = part.segment.every[group]
        if segment.window is not None and behind + 1 >= segment.window:
            break
        parts.append(PathPart(segment, part.visible, part.own))
        behind += 0 if part.own and not segment.fixed else part.visible
    return tuple(reversed(parts))


def state_before(path: Sequence[PathPart]) -> Segment | None:
    """Whose state a row behind a path begins with; None: it begins from zeros.

    A state is of a whole segment: a path that ends inside one has none.
    """
    if not path:
        return None
    segment, visible, _ = path[-1]
    assert visible == segment.length, f"a state inside segment {segment.name!r} is asked for"
    return segment.every[-1]


def segments_read(path: Sequence[PathPart]) -> list[Segment]:
    """Segments of all groups that a row behind a path reads, parents before children."""
    parts = [part for part in path if part.visible > 0]
    if not parts or (parts[0].segment.window is None and not parts[0].segment.others):
        return [part.segment for part in parts]
    groups = range(len(parts[0].segment.every))
    return [part.segment for group in groups for part in within_reach(parts, group)]


def whole(wanted: Mapping[Segment, int]) -> dict[Segment, int]:
    """The same for the segments of all groups."""
    if not any([first.others for first in wanted]):
        return dict(wanted)
    return {segment: count for first, count in wanted.items() for segment in first.every}


def visible_path(path: Path, last: Segment | None, num_tokens: int) -> Path:
    """A path and what the segment behind it holds already; empty parts are left out."""
    if (last is None or not num_tokens) and all([part.visible for part in path]):
        return path
    parts = path if last is None else (*path, PathPart(last, num_tokens, own=True))
    return tuple([part for part in parts if part.visible > 0])


# --- the host's side ---------------------------------------------------------------------------


@dataclass
class HostTier:
    """Where evicted KV goes, and how it comes back.

    recompute: evicted segments are not kept on the host; they are computed again.
    share_loads: several copies of a segment cross the link once; otherwise each on its own
        (no inter-beam locality, LBS Fig. 10b).
    """

    ledger: BlockLedger
    link: Link
    recompute: bool = False
    share_loads: bool = True

    def store(self, segment: Segment, until: int, device: BlockLedger) -> None:
        """Start storing blocks up to token `until`, from the first incomplete one on.

        Raises:
            CapacityError: if the host tier is full.
        """
        first, end = segment.host_length // segment.block_tokens, segment.blocks_for(until)
        segment.host_blocks += self.ledger.allocate(end - len(segment.host_blocks))
        to, source = segment.host_blocks[first:end], segment.blocks[first:end]
        pieces = self._pieces(self.ledger, to, device, source)
        segment.transfers = segment.unfinished()
        segment.transfers.append(self.link.submit(Direction.D2H, "store", pieces))
        segment.host_length = until

    def load(self, segment: Segment, blocks: Sequence[int], kind: str, device: BlockLedger) -> None:
        """Start loading a segment into these device blocks; no store of it is under way."""
        pieces = self._pieces(device, blocks, self.ledger, segment.host_blocks)
        segment.transfers.append(self.link.submit(Direction.H2D, kind, pieces))

    def _pieces(
        self, there: BlockLedger, to: Sequence[int], here: BlockLedger, source: Sequence[int]
    ) -> list[Piece]:
        """One contiguous piece per block; without tensors there is nothing behind them.

        Of a card's blocks one piece that names them all.
        """
        size, memory, held = self.ledger.bytes_per_block, there.memory, here.memory
        if memory is not None and held is not None:
            sides = Blocks(memory, tuple(to)), Blocks(held, tuple(source))
            return [Piece(*sides, size * len(to))]
        pairs = zip(to, source, strict=True)
        return [Piece(there.block_bytes(a), here.block_bytes(b), size) for a, b in pairs]

    def in_order(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        """These segments, the one to leave the device first in front.

        next_use: groups until the next use; absent if the rest of the round has none.
        """
        leaving = list(segments)
        last_use = {segment: segment.last_use for segment in leaving}
        stored = frozenset(segment for segment in leaving if segment.stored)
        return eviction_order(leaving, next_use, last_use, stored)
