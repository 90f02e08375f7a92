"""CacheManager: which segments are on the device, for how long, and in how many copies.

Segments of one device ledger, with an optional host tier behind a link. Leases hold what a group
reads; `expect` and `prefetch` look ahead (LBS section 4.1, 4.2). Bookkeeping only: the simulator
runs this very code without tensors, and `store.SegmentStore` adds them. Every decision follows from
the order of calls and never from when a transfer happens to finish, so equal runs move equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress

from beamwright.errors import CapacityError
from beamwright.kv.link import KVLog, Transfer
from beamwright.kv.owner import SegmentOwner
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import HostTier, Lease, Path, Return, Segment, whole, within_reach
from beamwright.protocols import Direction


class CacheManager(SegmentOwner):
    """Grows, leases and moves segments, beside what every owner of some does.

    copies_per_beam: every beam of a group gets its own device copy (the LBS paper's layout).
    outgrown: True once something had to leave the device.
    num_relocated: blocks that have changed places while they were read: whoever has kept where they
        are looks again.
    recompute_segments: set by the model that can compute KV again; called parents first.
    """

    def __init__(
        self,
        device: BlockLedger,
        host: HostTier | None = None,
        *,
        copies_per_beam: bool = False,
        log: KVLog | None = None,
    ) -> None:
        super().__init__(device, host)
        self.copies_per_beam = copies_per_beam
        self.log = log
        self.outgrown, self.num_relocated = False, 0
        self.recompute_segments: Callable[[Sequence[Segment]], None] | None = None
        self._tick = 0

    # --- growth ------------------------------------------------------------------------------

    def reserve(self, wanted: Mapping[Segment, int]) -> None:
        """Make sure that every copy of each segment has blocks for so many tokens; evicts others.

        Raises:
            CapacityError: if there is no room; nothing has changed then.
        """
        wanted, missing = whole(wanted), dict[Segment, list[int]]()
        for segment, num_tokens in wanted.items():
            size, copies = segment.blocks_for(num_tokens), segment.copies
            if segment.length and not copies:
                raise AssertionError("only a resident segment can grow")
            held = len(copies[0]) if len(copies) == 1 else min(map(len, copies), default=0)
            if size > held:
                missing[segment] = [max(0, size - len(blocks)) for blocks in copies or [[]]]
        if not missing:
            return
        for segment in wanted:
            segment.pins += len(segment.copies)  # it must not be its own victim
        try:
            fresh = self._take(sum(map(sum, missing.values())))
        finally:
            for segment in wanted:
                segment.pins -= len(segment.copies)
        for segment, counts in missing.items():
            segment.copies = segment.copies or [[]]
            for blocks, num_blocks in zip(segment.copies, counts, strict=True):
                blocks.extend(fresh[:num_blocks])
                del fresh[:num_blocks]
            self._placed(segment)

    def extend(self, segment: Segment, num_tokens: int) -> None:
        """Count `num_tokens` more tokens, whose blocks are reserved."""
        for each in segment.every:
            each.length += num_tokens
            if num_tokens and each.length == num_tokens:
                self._placed(each)

    # --- leases ------------------------------------------------------------------------------

    def lease(self, needs: Mapping[Segment, int]) -> Lease:
        """Hold these segments on the device, in so many copies each; loads what is missing.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        return self.acquire(needs, needs)

    def acquire(self, needs: Mapping[Segment, int], copies: Mapping[Segment, int] = {}) -> Lease:
        """The same for rows that join others: so many copies more than are held already."""
        wanted = copies or self.beside_others(needs)
        lease = Lease(needs)
        try:
            self._make_resident(wanted)
        except BaseException:
            lease.keep({})
            raise
        return lease

    def lacking_bytes(self, needs: Mapping[Segment, int]) -> int:
        """Bytes that would have to be loaded for these copies."""
        blocks = sum(self._missing_blocks(s, copies) for s, copies in needs.items())
        return blocks * self.device.bytes_per_block

    def load_ahead(self, needs: Mapping[Segment, int]) -> None:
        """Begin to load one copy of each, whatever has to leave for it; nobody waits.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        with Lease(needs):
            self._make_room(sum(self._missing_blocks(s, 1) for s in needs))
            for segment in needs:
                if segment.length and not segment.copies and segment.stored:
                    self._load(segment, self._take(segment.blocks_for(segment.length)), "prefetch")

    def fits(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Could a lease on `needs` hold, with some segments grown to so many tokens?"""
        grown = whole(grown)
        taken = (self.taken(s, needs.get(s, 0), grown.get(s, 0)) for s in {**needs, **grown})
        return sum(taken) <= self.room

    @property
    def room(self) -> int:
        """Blocks for new leases: those that are not pinned; if none can leave, the free ones."""
        device = self.device
        return device.num_blocks - self._tally.pinned_blocks if self.evicts else device.num_free

    def taken(self, segment: Segment, copies: int, num_tokens: int) -> int:
        """Blocks of `room` for a segment in so many copies, and grown to so many tokens; 0: not."""
        if not self.evicts:
            return self._fresh_blocks(segment, copies, num_tokens)
        if not copies:
            return segment.blocks_for(num_tokens)
        size = segment.blocks_for(max(segment.length, num_tokens))
        held = min(segment.pins, len(segment.copies))
        return max(copies, held) * max(size, len(segment.blocks)) - segment.pinned_blocks

    def is_free(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Are there blocks for them that nobody has, so that nothing has to leave?"""
        grown = whole(grown)
        segments = {**needs, **grown}
        fresh = [self._fresh_blocks(s, needs.get(s, 0), grown.get(s, 0)) for s in segments]
        return sum(fresh) <= self.device.num_free

    def _fresh_blocks(self, segment: Segment, copies: int, num_tokens: int) -> int:
        wanted = max(1, len(segment.copies)) * segment.blocks_for(num_tokens)
        growth = max(0, wanted - sum(map(len, segment.copies)))
        return growth + self._missing_blocks(segment, copies) if copies else growth

    def beside_others(self, needs: Mapping[Segment, int]) -> dict[Segment, int]:
        """Copies that the device must hold for these and for those who hold the segments now."""
        if not self.copies_per_beam:
            return dict(needs)
        return {s: min(s.pins, len(s.copies)) + copies for s, copies in needs.items()}

    def needed(self, paths: Iterable[Path]) -> None:
        """Count the tokens of paths that were needed and are on the device."""
        counts = self.counts
        if self.stays:  # as most do, and then nothing has returned
            counts.needed_tokens += sum([part.visible for path in paths for part in path])
            return
        for part in (part for path in paths for part in within_reach(path, 0)):
            returned = part.segment.returned
            counts.needed_tokens += part.visible
            counts.loaded_tokens += part.visible * (returned is Return.LOADED)
            counts.dropped_tokens += part.visible * (returned is Return.RECOMPUTED)
            part.segment.returned = None

    # --- ahead of need -----------------------------------------------------------------------

    @property
    def evicts(self) -> bool:
        """True if there is a way to make room."""
        return self.host is not None

    @property
    def stays(self) -> bool:
        """True if what is on the device stays there, in one copy, until it is freed: nobody has to
        hold it."""
        (first, *others) = self.device.groups
        plain = not others and first.window is None and not first.fixed
        return plain and not self.evicts and not self.copies_per_beam

    def expect(self, upcoming: Sequence[Iterable[Segment]]) -> None:
        """Say which segments the later groups of this round need, in order."""
        self._next_use = {
            segment: distance
            for distance, needs in reversed(list(enumerate(upcoming, start=1)))
            for segment in needs
        }

    def prefetch(self, needs: Mapping[Segment, int]) -> None:
        """Start loading what the next group needs.

        It makes room only at the cost of what the rest of the round does not use: that would have
        to go anyway when the next group's turn comes, so fetching ahead adds no traffic.
        """
        if self.host is None or self.host.recompute:
            return
        missing = [s for s in needs if not s.resident and s.stored]
        short = sum(s.blocks_for(s.length) for s in missing) - self.device.num_free
        if short > 0:
            self._evict([s for s in self._victims() if s not in self._next_use], short)
        with self.host.link.together():
            for segment in missing:
                blocks = segment.blocks_for(segment.length)
                if blocks > self.device.num_free:
                    return
                self._load(segment, self.device.allocate(blocks), "prefetch")

    def write_back(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """Start copying what the host lacks: whole blocks, and the tail of sealed segments.

        Where the host is full they stay: it is found out, and said, when their room is needed.
        """
        with suppress(CapacityError):
            self._store((each for first in segments for each in first.every), sealed=sealed)

    def _store(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """The same for segments of one group each."""
        host = self.host
        if host is None or host.recompute:
            return
        with host.link.together():
            for segment in segments:
                size = segment.block_tokens
                until = segment.length if sealed else segment.length // size * size
                if segment.copies and until > segment.host_length:
                    host.store(segment, until, self.device)
                    self._placed(segment)

    def write_ahead(
        self, needs: Mapping[Segment, int], growth: Iterable[int], growing: Collection[Segment]
    ) -> None:
        """Start storing what would have to go for these segments and steps of so many tokens.

        When their turn comes, evicting it costs nothing. growing: segments that are not complete.
        """
        if self.host is None or self.host.recompute:
            return
        growing = {each for first in growing for each in first.every}
        missing = sum(self._missing_blocks(s, copies) for s, copies in needs.items())
        short = missing + sum(map(self.device.blocks_for, growth)) - self.device.num_free
        if short <= 0:
            return
        leaving = []
        others = (s for s in self._resident() if s not in needs and s not in growing)
        for segment in self.host.in_order(others, self._next_use):
            if short <= 0:
                break
            short -= sum(map(len, segment.copies))
            leaving.append(segment)
        with suppress(CapacityError):  # it is found out, and said, when the room is needed
            self._store(leaving)

    def dirty(self) -> list[Segment]:
        """Resident segments that are not wholly on the host, in the order of eviction."""
        return [s for s in self._victims() if not s.stored]

    # --- making room -------------------------------------------------------------------------

    def evict_all(self) -> None:
        """Empty the device of what is not pinned (no reuse between steps)."""
        self._evict(self._victims(), self.device.num_blocks)

    def resize(self, total_bytes: int) -> int:
        """Make the device's budget this large; what is in the way leaves it, least urgent first.

        Segments that are held stay, but what is left is moved together, behind all that compute
        has been told so far: then nobody has a block of what is given up. Returns the budget in
        bytes.

        Raises:
            CapacityError: if the host tier is full; LinkError: if the link has failed.
        """
        device = self.device
        excess = device.num_blocks - device.num_free - total_bytes // device.bytes_per_block
        if excess > 0 and self.host is not None:
            self._evict(self._victims(), excess)
        total_bytes = device.resize(total_bytes)
        self._draw_in()
        device.give_back()
        return total_bytes

    def _draw_in(self) -> None:
        """Move the blocks that are beyond the budget to free ones within."""
        device = self.device
        far = [
            (segment, blocks, places)
            for segment in self._present.values()
            for blocks in segment.copies
            if (places := device.beyond(blocks))
        ]
        for segment, _, _ in far:
            self._wait_for(segment, *Direction)
        source, destination = list[int](), list[int]()
        for _, blocks, places in far:
            leaving = [blocks[place] for place in places]
            device.free(leaving)
            source += leaving
            for place, block in zip(places, device.allocate(len(leaving)), strict=True):
                blocks[place] = block
                destination.append(block)
        if source:
            self.copy_on_device(source, destination)
            self.num_relocated += len(source)

    def _take(self, num_blocks: int) -> list[int]:
        """Device blocks, evicting what is wanted last."""
        self._make_room(num_blocks)
        return self.device.allocate(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        """Evict until so many blocks are free; if that cannot be, evict nothing."""
        missing = num_blocks - self.device.num_free
        victims = self._victims() if missing > 0 else []
        if victims and sum(len(b) for s in victims for b in s.copies[s.pins :]) >= missing:
            self._evict(victims, missing)

    def _resident(self) -> list[Segment]:
        """Segments that hold something on the device, in the order in which they were made."""
        return [s for s in map(self._present.__getitem__, sorted(self._present)) if s.length]

    def _victims(self) -> list[Segment]:
        """Segments with an unpinned copy, the one to go first in front."""
        if self.host is None:
            return []
        unpinned = (s for s in self._resident() if len(s.copies) > s.pins)
        return self.host.in_order(unpinned, self._next_use)

    def _evict(self, victims: Sequence[Segment], num_blocks: int) -> None:
        """Free `num_blocks` blocks if these victims have them; dirty ones are stored first."""
        self.outgrown = self.outgrown or bool(victims)
        chosen: list[Segment] = []
        for segment in victims:
            if num_blocks <= 0:
                break
            chosen.append(segment)
            num_blocks -= sum(map(len, segment.copies[segment.pins :]))
        leaving = [s for s in chosen if s.pins == 0]
        self._store(leaving)
        self.counts.evicted_blocks += sum(len(segment.blocks) for segment in leaving)
        for segment in chosen:
            self._wait_for(segment, *Direction)  # they read or write these blocks
            for blocks in segment.copies[segment.pins :]:
                self.device.free(blocks)
            del segment.copies[segment.pins :]
            self._placed(segment)

    # --- loading -----------------------------------------------------------------------------

    def _make_resident(self, needs: Mapping[Segment, int]) -> None:
        self._touch(needs)
        self._make_room(sum(self._missing_blocks(s, copies) for s, copies in needs.items()))
        lost = {s: None for s in needs if not s.resident and not s.stored}
        waiting: list[Transfer] = []
        with self.host.link.together() if self.host is not None else nullcontext():
            for segment, copies in needs.items():
                if segment in lost or not segment.length:
                    continue
                # Without shared loads, every further copy crosses the link on its own.
                shared = self.host is None or self.host.share_loads or not segment.stored
                while len(segment.copies) < (1 if shared else copies):
                    self._load(segment, self._take(segment.blocks_for(segment.length)), "load")
                waiting += segment.transfers
        if lost:
            self._recompute(list(lost))
        self._wait([t for t in waiting if t.direction is Direction.H2D])
        for segment, copies in needs.items():
            segment.transfers = segment.unfinished()
            while segment.length and len(segment.copies) < copies:
                source, blocks = segment.copies[0], self._take(segment.blocks_for(segment.length))
                segment.copies.append(blocks)
                self._placed(segment)
                self.copy_on_device(source, blocks)

    def _touch(self, needs: Iterable[Segment]) -> None:
        self._tick += 1
        for segment in needs:
            segment.last_use = self._tick

    def _missing_blocks(self, segment: Segment, copies: int) -> int:
        missing = max(0, copies - len(segment.copies)) if segment.length else 0
        return missing * segment.blocks_for(segment.length)

    def _load(self, segment: Segment, blocks: list[int], kind: str) -> None:
        """Start loading a segment from the host into fresh device blocks."""
        assert self.host is not None
        if not segment.copies:
            segment.returned = Return.LOADED
            self.counts.loaded_blocks += len(blocks)
        segment.copies.append(blocks)  # owned before anything can fail
        # A store of the same blocks may still be under way: the load must read its result.
        self._wait_for(segment, Direction.D2H)
        self.host.load(segment, blocks, kind, self.device)
        self._placed(segment)

    def _recompute(self, lost: list[Segment]) -> None:
        assert self.recompute_segments is not None, "it is neither on the device nor on the host"
        named = list(dict.fromkeys(segment.first or segment for segment in lost))
        self.counts.recomputed_tokens += sum(segment.length for segment in named)
        for segment in lost:
            self.counts.recomputed_blocks += segment.blocks_for(segment.length)
        self.recompute_segments(named)

    def copy_on_device(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy blocks within the device; without tensors there is nothing to do."""

    def _wait_for(self, segment: Segment, *directions: Direction) -> None:
        self._wait([t for t in segment.transfers if t.direction in directions])
        segment.transfers = segment.unfinished()

    def _wait(self, transfers: Iterable[Transfer]) -> None:
        """Compute waits for these: that is the stall."""
        pending = [transfer for transfer in transfers if not transfer.finished]
        if pending and self.host is not None:
            with self.log.span("wait", "stall") if self.log is not None else nullcontext():
                self.counts.transfer_wait_s += self.host.link.wait(pending)
