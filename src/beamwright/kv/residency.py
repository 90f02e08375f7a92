"""Residency: which segments are on the device, which are at home, and what moves between them.

Bookkeeping only: blocks, pins, evictions and transfers. The simulator runs this very class without
tensors; `store.SegmentStore` adds them. Every decision follows from the order of calls and never
from when a transfer happens to finish, so equal runs move equal bytes (LBS section 4.1, 4.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from beamwright.kv.ledger import BlockLedger
from beamwright.kv.link import Direction, Link, Piece, Transfer
from beamwright.kv.segments import Segment
from beamwright.schedule.eviction import eviction_order


class ResidenceLog(Protocol):
    """Who is told where a segment's KV is, and when compute waited (a timeline)."""

    def residence(self, segment: str, change: str) -> None: ...

    def span(self, name: str, track: str, **args: Any) -> AbstractContextManager[None]: ...


@dataclass
class HomeTier:
    """The host side: its blocks, the link to it, and how evicted KV comes back.

    recompute: evicted segments are not kept at home; they are computed again.
    share_loads: several copies of a segment cross the link once; otherwise each on its own
        (no inter-beam locality, LBS Fig. 10b).
    """

    ledger: BlockLedger
    link: Link
    recompute: bool = False
    share_loads: bool = True


@dataclass
class ResidencyCounts:
    """What residency did. Bytes are the link's own business."""

    stall_s: float = 0.0
    recomputed_tokens: int = 0
    cancelled: int = 0


class Residency:
    """Segments in one device ledger, with an optional home tier behind a link.

    copies_per_beam: every beam of a group gets its own device copy (the LBS paper's layout).
    recompute_segments: set by the model that can compute KV again; called parents first.
    outgrown: True once something had to leave the device.
    """

    def __init__(
        self,
        device: BlockLedger,
        home: HomeTier | None = None,
        *,
        copies_per_beam: bool = False,
        log: ResidenceLog | None = None,
    ) -> None:
        self.device, self.home = device, home
        self.copies_per_beam = copies_per_beam
        self.counts = ResidencyCounts()
        self.recompute_segments: Callable[[Sequence[Segment]], None] | None = None
        self.log = log
        self._segments: dict[Segment, None] = {}
        self._next_use: dict[Segment, int] = {}
        self._tick = 0
        self.outgrown = False

    # --- life of a segment -------------------------------------------------------------------

    def create(self, name: str = "") -> Segment:
        """An empty segment that owns no block yet."""
        segment = Segment(name)
        self._segments[segment] = None
        return segment

    def free(self, segment: Segment) -> None:
        """Free a segment's blocks in both tiers at once; twice is an AssertionError."""
        if segment.freed:
            raise AssertionError("a segment was freed twice")
        self.clear(segment)
        segment.freed = True
        self._segments.pop(segment, None)
        self._next_use.pop(segment, None)

    def clear(self, segment: Segment) -> None:
        """Forget a segment's tokens and free its blocks; transfers of it are cancelled."""
        self._cancel(segment)
        had = segment.length
        for blocks in segment.copies:
            self.device.free(blocks)
        if self.home is not None:
            self.home.ledger.free(segment.home)
        segment.copies, segment.home = [], []
        segment.length = segment.home_length = 0
        if had:
            self._tell(segment)

    def reserve(self, wanted: Mapping[Segment, int]) -> None:
        """Make sure that every copy of each segment has blocks for so many tokens; evicts others.

        Raises:
            CapacityError: if there is no room; nothing has changed then.
        """
        missing = {
            segment: [
                max(0, self.device.blocks_for(num_tokens) - len(blocks))
                for blocks in segment.copies or [[]]
            ]
            for segment, num_tokens in wanted.items()
        }
        for segment in wanted:
            if segment.length and not segment.copies:
                raise AssertionError("only a resident segment can grow")
            segment.pins += len(segment.copies)  # it must not be its own victim
        try:
            fresh = self._take(sum(map(sum, missing.values())))
        finally:
            for segment in wanted:
                segment.pins -= len(segment.copies)
        for segment, counts in missing.items():
            if not segment.copies and counts[0]:
                segment.copies = [[]]
            for blocks, count in zip(segment.copies, counts, strict=False):
                blocks.extend(fresh[:count])
                del fresh[:count]

    def extend(self, segment: Segment, num_tokens: int) -> None:
        """Count `num_tokens` more tokens, for which blocks are reserved first."""
        self.reserve({segment: segment.length + num_tokens})
        first = segment.length == 0 and num_tokens > 0
        segment.length += num_tokens
        if first:
            self._tell(segment)

    def trim(self, segment: Segment) -> None:
        """Give back reserved blocks that hold no token."""
        kept = self.device.blocks_for(segment.length)
        for blocks in segment.copies:
            self.device.free(blocks[kept:])
            del blocks[kept:]
        if not kept:
            segment.copies = []

    # --- leases ------------------------------------------------------------------------------

    @contextmanager
    def lease(self, needs: Mapping[Segment, int]) -> Iterator[Lease]:
        """Hold these segments on the device, in so many copies each; loads what is missing.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        lease = Lease(needs)
        try:
            self._make_resident(needs)
            yield lease
        finally:
            lease.keep({})

    def prefetch(self, needs: Mapping[Segment, int]) -> None:
        """Start loading what the next group needs into room that nobody needs before it."""
        if self.home is None or self.home.recompute:
            return
        missing = [s for s in needs if not s.resident and s.home_length == s.length]
        count = sum(self.device.blocks_for(segment.length) for segment in missing)
        if count > self.device.num_free:
            spare = [s for s in self._victims() if self._next_use.get(s, 2) > 1]
            self._evict(spare, count - self.device.num_free)
        for segment in missing:
            blocks = self.device.blocks_for(segment.length)
            if blocks > self.device.num_free:
                return
            self._load(segment, self.device.allocate(blocks), "prefetch")

    def expect(self, upcoming: Sequence[Iterable[Segment]]) -> None:
        """Say which segments the later groups of this round need, in order."""
        self._next_use = {
            segment: distance
            for distance, needs in reversed(list(enumerate(upcoming, start=1)))
            for segment in needs
        }

    def fits(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Could a lease on `needs` hold, with some segments grown to so many tokens?"""
        blocks = sum(
            min(s.pins, len(s.copies)) * len(s.blocks) for s in self._segments if s not in needs
        )
        for segment, copies in needs.items():
            size = self.device.blocks_for(max(segment.length, grown.get(segment, 0)))
            blocks += max(copies, min(segment.pins, len(segment.copies))) * size
        blocks += sum(self.device.blocks_for(n) for s, n in grown.items() if s not in needs)
        return blocks <= self.device.num_blocks

    # --- the home tier -----------------------------------------------------------------------

    def write_back(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """Start copying home what is not there: whole blocks, and the tail of sealed segments.

        Raises:
            CapacityError: if the host tier is full.
        """
        if self.home is None or self.home.recompute:
            return
        for segment in segments:
            size = self.device.block_tokens
            until = segment.length if sealed else segment.length // size * size
            if segment.copies and until > segment.home_length:
                self._store(segment, until)

    def evict_all(self) -> None:
        """Empty the device of everything that is not pinned (no reuse between steps)."""
        self._evict(self._victims(), self.device.num_blocks)

    @property
    def evicts(self) -> bool:
        """True if there is a way to make room."""
        return self.home is not None

    def dirty(self) -> list[Segment]:
        """Resident segments that are not wholly at home, in the order of eviction."""
        return [s for s in self._victims() if s.home_length < s.length]

    # --- loading -----------------------------------------------------------------------------

    def _make_resident(self, needs: Mapping[Segment, int]) -> None:
        self._tick += 1
        for segment in needs:
            segment.last_use = self._tick
        self._make_room(sum(self._missing_blocks(s, copies) for s, copies in needs.items()))
        lost = [s for s in needs if not s.resident and s.home_length < s.length]
        waiting: list[Transfer] = []
        for segment, copies in needs.items():
            if segment in lost or not segment.length:
                continue
            if not segment.copies:
                blocks = self._take(self.device.blocks_for(segment.length))
                self._load(segment, blocks, "load")
            self._load_copies(segment, copies)
            waiting += segment.transfers
        if lost:
            self._recompute(lost)
        self._wait([t for t in waiting if t.direction is Direction.H2D])
        for segment, copies in needs.items():
            segment.transfers = [t for t in segment.transfers if not t.finished]
            self._duplicate(segment, copies)

    def _missing_blocks(self, segment: Segment, copies: int) -> int:
        missing = max(0, copies - len(segment.copies)) if segment.length else 0
        return missing * self.device.blocks_for(segment.length)

    def _load(self, segment: Segment, blocks: list[int], kind: str) -> Transfer:
        """Start bringing a segment from home into fresh device blocks."""
        assert self.home is not None
        # A store of the same blocks may still be on its way home: the load must read its result.
        self._wait_for(segment, Direction.D2H)
        pieces = self.pieces(Direction.H2D, blocks, segment.home[: len(blocks)])
        transfer = self.home.link.submit(Direction.H2D, kind, pieces)
        segment.copies.append(blocks)
        segment.transfers.append(transfer)
        self._tell(segment)
        return transfer

    def _load_copies(self, segment: Segment, copies: int) -> None:
        """Without shared loads, every further copy crosses the link on its own."""
        if self.home is None or self.home.share_loads or segment.home_length < segment.length:
            return
        for _ in range(copies - len(segment.copies)):
            self._load(segment, self._take(self.device.blocks_for(segment.length)), "load")

    def _duplicate(self, segment: Segment, copies: int) -> None:
        """Further copies by copying on the device."""
        while segment.length and len(segment.copies) < copies:
            blocks = self._take(self.device.blocks_for(segment.length))
            self.copy_on_device(segment.copies[0], blocks)
            segment.copies.append(blocks)

    def _recompute(self, lost: list[Segment]) -> None:
        if self.recompute_segments is None:
            raise AssertionError("a segment is neither on the device nor at home")
        self.counts.recomputed_tokens += sum(segment.length for segment in lost)
        for segment in lost:
            self.clear(segment)
        self.recompute_segments(lost)

    # --- making room -------------------------------------------------------------------------

    def _take(self, num_blocks: int) -> list[int]:
        """Device blocks, evicting what is wanted last."""
        self._make_room(num_blocks)
        return self.device.allocate(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        """Evict until so many blocks are free; if that cannot be, evict nothing."""
        missing = num_blocks - self.device.num_free
        if missing <= 0 or self.home is None:
            return
        victims = self._victims()
        if sum(len(b) for s in victims for b in s.copies[s.pins :]) >= missing:
            self._evict(victims, missing)

    def _victims(self) -> list[Segment]:
        """Segments with an unpinned copy, the one to go first in front."""
        found = [s for s in self._segments if len(s.copies) > s.pins and s.length]
        last_use = {segment: segment.last_use for segment in found}
        return eviction_order(found, self._next_use, last_use)

    def _evict(self, victims: Sequence[Segment], num_blocks: int) -> None:
        """Free at least `num_blocks` blocks if these victims have them; dirty ones go home first."""
        self.outgrown = self.outgrown or bool(victims)
        chosen: list[Segment] = []
        for segment in victims:
            if num_blocks <= 0:
                break
            chosen.append(segment)
            spare = segment.copies[segment.pins :]
            num_blocks -= sum(len(blocks) for blocks in spare)
        leaving = [s for s in chosen if s.pins == 0]
        self.write_back(leaving)
        for segment in chosen:
            # Loads and stores under way read or write these blocks.
            self._wait_for(segment, Direction.D2H)
            self._wait_for(segment, Direction.H2D)
            for blocks in segment.copies[segment.pins :]:
                self.device.free(blocks)
            del segment.copies[segment.pins :]
            self._tell(segment)

    def _store(self, segment: Segment, until: int) -> None:
        """Start copying blocks home up to token `until`, from the first incomplete one on."""
        assert self.home is not None
        size = self.device.block_tokens
        first, end = segment.home_length // size, self.device.blocks_for(until)
        if end > len(segment.home):
            segment.home += self.home.ledger.allocate(end - len(segment.home))
        pieces = self.pieces(Direction.D2H, segment.copies[0][first:end], segment.home[first:end])
        segment.transfers = [t for t in segment.transfers if not t.finished]
        segment.transfers.append(self.home.link.submit(Direction.D2H, "store", pieces))
        segment.home_length = until
        self._tell(segment)

    # --- transfers ---------------------------------------------------------------------------

    def pieces(
        self, direction: Direction, device: Sequence[int], home: Sequence[int]
    ) -> list[Piece]:
        """One piece per block; without tensors there is nothing behind them."""
        del direction, home
        return [Piece(None, None, self.device.bytes_per_block) for _ in device]

    def copy_on_device(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy blocks within the device; without tensors there is nothing to do."""

    def _wait_for(self, segment: Segment, direction: Direction) -> None:
        self._wait([t for t in segment.transfers if t.direction is direction])
        segment.transfers = [t for t in segment.transfers if not t.finished]

    def _wait(self, transfers: Iterable[Transfer]) -> None:
        """Compute waits for these: that is the stall."""
        pending = [transfer for transfer in transfers if not transfer.finished]
        if not pending or self.home is None:
            return
        with self.log.span("wait", "stall") if self.log is not None else nullcontext():
            self.counts.stall_s += self.home.link.wait(pending)

    def _cancel(self, segment: Segment) -> None:
        if segment.transfers and self.home is not None:
            self.counts.cancelled += sum(not t.finished for t in segment.transfers)
            self.home.link.cancel(segment.transfers)
            segment.transfers = []

    def _tell(self, segment: Segment) -> None:
        if self.log is not None and segment.name:
            device, home = bool(segment.copies), bool(segment.home)
            change = "both" if device and home else "device" if device else "host"
            self.log.residence(segment.name, change if device or home else "none")

    # --- looking -----------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Segments that are not freed."""
        return len(self._segments)

    def check(self) -> None:
        """Conservation: every block is free or owned by one copy of one live segment."""
        live = list(self._segments)
        self.device.check([b for s in live for blocks in s.copies for b in blocks])
        if self.home is not None:
            self.home.ledger.check([block for segment in live for block in segment.home])
        for segment in live:
            wanted = self.device.blocks_for(segment.length)
            if any(len(blocks) < wanted for blocks in segment.copies):
                raise AssertionError(f"{segment.length} tokens lack blocks")
            if segment.pins > max(1, len(segment.copies)) and not segment.length:
                raise AssertionError("a pin without a copy")


class Lease:
    """Pins on segments; some may be given up, or added, before the lease ends."""

    def __init__(self, needs: Mapping[Segment, int]) -> None:
        self._held: Counter[Segment] = Counter()
        self.add(needs)

    def add(self, needs: Mapping[Segment, int]) -> None:
        """Pin so many more copies of each."""
        for segment, copies in needs.items():
            self._held[segment] += copies
            segment.pins += copies

    def keep(self, needs: Mapping[Segment, int]) -> None:
        """Unpin everything beyond these."""
        for segment, held in self._held.items():
            kept = min(held, needs.get(segment, 0))
            segment.pins -= held - kept
            self._held[segment] = kept
