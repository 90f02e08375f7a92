"""Residency: which segments are on the device, for how long, and in how many copies.

Leases hold what a group reads; `expect` and `prefetch` look ahead (LBS section 4.1, 4.2). How bytes
move is `movement`'s business; `store.SegmentStore` adds the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

from beamwright.errors import CapacityError
from beamwright.kv.lease import Lease
from beamwright.kv.ledger import BlockLedger
from beamwright.kv.link import Transfer
from beamwright.kv.movement import HostTier, Movement, ResidenceLog
from beamwright.kv.segments import Path, Return, Segment
from beamwright.protocols import Direction


class Residency(Movement):
    """Creates, grows, leases and frees segments.

    recompute_segments: set by the model that can compute KV again; called parents first.
    """

    def __init__(
        self,
        device: BlockLedger,
        host: HostTier | None = None,
        *,
        copies_per_beam: bool = False,
        log: ResidenceLog | None = None,
    ) -> None:
        super().__init__(device, host, copies_per_beam=copies_per_beam, log=log)
        self.recompute_segments: Callable[[Sequence[Segment]], None] | None = None
        self._tick = 0

    # --- life of a segment -------------------------------------------------------------------

    def create(self, name: str = "", start: int = 0) -> Segment:
        """An empty segment that owns no block yet. start: position of its first token."""
        segment = Segment(name, start=start)
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
        if self.host is not None:
            self.host.ledger.free(segment.host_blocks)
        segment.copies, segment.host_blocks = [], []
        segment.length = segment.host_length = 0
        segment.returned = segment.memory = None
        if had:
            self._log_residence(segment)

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
        segment.last_touch = self._tick
        if first:
            self._log_residence(segment)

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

    def acquire(self, needs: Mapping[Segment, int]) -> Lease:
        """The same for rows that join others: so many copies more than are held already.

        Raises:
            CapacityError: if they do not fit; nothing is held then. LinkError: if the link has
                failed.
        """
        wanted = self.beside_others(needs)
        lease = Lease(needs)
        try:
            self._make_resident(wanted)
        except BaseException:
            lease.keep({})
            raise
        return lease

    def prefetch(self, needs: Mapping[Segment, int]) -> None:
        """Start loading what the next group needs.

        It makes room only at the cost of what the rest of the round does not use: that would have
        to go anyway when the next group's turn comes, so fetching ahead adds no traffic.
        """
        if self.host is None or self.host.recompute:
            return
        missing = [s for s in needs if not s.resident and s.stored]
        count = sum(self.device.blocks_for(segment.length) for segment in missing)
        if count > self.device.num_free:
            spare = [s for s in self._victims() if s not in self._next_use]
            self._evict(spare, count - self.device.num_free)
        with self.host.link.together():
            for segment in missing:
                blocks = self.device.blocks_for(segment.length)
                if blocks > self.device.num_free:
                    return
                self._load(segment, self.device.allocate(blocks), "prefetch")

    def write_ahead(
        self, needs: Mapping[Segment, int], growth: Iterable[int], growing: Collection[Segment]
    ) -> None:
        """Start storing what would have to go for these segments and steps of so many tokens.

        When their turn comes, evicting it costs nothing. growing: segments that are not complete.
        """
        if self.host is None or self.host.recompute:
            return
        missing = sum(self._missing_blocks(s, copies) for s, copies in needs.items())
        short = missing + sum(map(self.device.blocks_for, growth)) - self.device.num_free
        leaving: list[Segment] = []
        held = (s for s in self._segments if s.copies and s.length)
        for segment in self._in_order(s for s in held if s not in needs and s not in growing):
            if short <= 0:
                break
            short -= sum(map(len, segment.copies))
            leaving.append(segment)
        with suppress(CapacityError):  # it is found out, and said, when the room is needed
            self.write_back(leaving)

    def expect(self, upcoming: Sequence[Iterable[Segment]]) -> None:
        """Say which segments the later groups of this round need, in order."""
        self._next_use = {
            segment: distance
            for distance, needs in reversed(list(enumerate(upcoming, start=1)))
            for segment in needs
        }

    def fits(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Could a lease on `needs` hold, with some segments grown to so many tokens?"""
        if not self.evicts:
            return self.is_free(needs, grown)
        blocks = sum(
            min(s.pins, len(s.copies)) * len(s.blocks) for s in self._segments if s not in needs
        )
        for segment, copies in needs.items():
            size = self.device.blocks_for(max(segment.length, grown.get(segment, 0)))
            held = min(segment.pins, len(segment.copies))
            blocks += max(copies, held) * max(size, len(segment.blocks))
        blocks += sum(self.device.blocks_for(n) for s, n in grown.items() if s not in needs)
        return blocks <= self.device.num_blocks

    def is_free(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Are there blocks for them that nobody has, so that nothing has to leave?"""
        blocks = sum(self._missing_blocks(s, copies) for s, copies in needs.items())
        for segment, num_tokens in grown.items():
            copies = max(1, len(segment.copies))
            held = sum(map(len, segment.copies))
            blocks += max(0, copies * self.device.blocks_for(num_tokens) - held)
        return blocks <= self.device.num_free

    def beside_others(self, needs: Mapping[Segment, int]) -> dict[Segment, int]:
        """Copies that the device must hold for these and for those who hold the segments now."""
        if not self.copies_per_beam:
            return dict(needs)
        return {s: min(s.pins, len(s.copies)) + copies for s, copies in needs.items()}

    def needed(self, paths: Iterable[Path]) -> None:
        """Count the tokens of paths that were needed and are on the device."""
        counts = self.counts
        for path in paths:
            for part in path:
                segment, returned = part.segment, part.segment.returned
                counts.needed_tokens += part.visible
                counts.loaded_tokens += part.visible * (returned is Return.LOADED)
                counts.dropped_tokens += part.visible * (returned is Return.RECOMPUTED)
                segment.returned = None

    # --- the host tier -----------------------------------------------------------------------

    def evict_all(self) -> None:
        """Empty the device of everything that is not pinned (no reuse between steps)."""
        self._evict(self._victims(), self.device.num_blocks)

    def resize(self, total_bytes: int) -> int:
        """Make the device's budget this large; what is in the way leaves it, least urgent first.

        Segments that are held stay. Returns the budget in bytes.

        Raises:
            CapacityError: if the host tier is full; LinkError: if the link has failed.
        """
        device = self.device
        excess = device.num_blocks - device.num_free - total_bytes // device.bytes_per_block
        if excess > 0 and self.host is not None:
            self._evict(self._victims(), excess)
        return device.resize(total_bytes)

    @property
    def evicts(self) -> bool:
        """True if there is a way to make room."""
        return self.host is not None

    def dirty(self) -> list[Segment]:
        """Resident segments that are not wholly on the host, in the order of eviction."""
        return [s for s in self._victims() if not s.stored]

    # --- loading -----------------------------------------------------------------------------

    def _make_resident(self, needs: Mapping[Segment, int]) -> None:
        self._tick += 1
        for segment in needs:
            segment.last_use = segment.last_touch = self._tick
        if self.host is not None and self.host.victims == "lru":
            for segment in self._segments:
                if segment.pins:
                    segment.last_touch = self._tick
        self._make_room(sum(self._missing_blocks(s, copies) for s, copies in needs.items()))
        lost = {s: None for s in needs if not s.resident and not s.stored}
        waiting: list[Transfer] = []
        with self.host.link.together() if self.host is not None else nullcontext():
            for segment, copies in needs.items():
                if segment in lost or not segment.length:
                    continue
                if not segment.copies:
                    blocks = self._take(self.device.blocks_for(segment.length))
                    self._load(segment, blocks, "load")
                self._load_copies(segment, copies)
                waiting += segment.transfers
        if lost:
            self._recompute(list(lost))
        self._wait([t for t in waiting if t.direction is Direction.H2D])
        for segment, copies in needs.items():
            segment.transfers = [t for t in segment.transfers if not t.finished]
            self._duplicate(segment, copies)

    def _missing_blocks(self, segment: Segment, copies: int) -> int:
        missing = max(0, copies - len(segment.copies)) if segment.length else 0
        return missing * self.device.blocks_for(segment.length)

    def _recompute(self, lost: list[Segment]) -> None:
        if self.recompute_segments is None:
            raise AssertionError("a segment is neither on the device nor on the host")
        self.counts.recomputed_tokens += sum(segment.length for segment in lost)
        for segment in lost:
            self.counts.recomputed_blocks += self.device.blocks_for(segment.length)
            self.clear(segment)
            segment.returned = Return.RECOMPUTED
        self.recompute_segments(lost)

    # --- looking -----------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Whole blocks of all segments, wherever they are; a copy of each."""
        blocks = sum(self.device.blocks_for(segment.length) for segment in self._segments)
        return blocks * self.device.bytes_per_block

    @property
    def num_segments(self) -> int:
        """Segments that are not freed."""
        return len(self._segments)

    def check(self) -> None:
        """Conservation: every block is free or owned by one copy of one live segment."""
        live = list(self._segments)
        self.device.check([b for s in live for blocks in s.copies for b in blocks])
        if self.host is not None:
            self.host.ledger.check([block for segment in live for block in segment.host_blocks])
        for segment in live:
            wanted = self.device.blocks_for(segment.length)
            if any(len(blocks) < wanted for blocks in segment.copies):
                raise AssertionError(f"{segment.length} tokens lack blocks")
            if segment.pins > max(1, len(segment.copies)) and not segment.length:
                raise AssertionError("a pin without a copy")
