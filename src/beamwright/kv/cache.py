"""CacheManager: creates segments, and decides which are on the device and in how many copies.

Leases hold what a group reads, `expect` and `prefetch` look ahead (LBS section 4.1, 4.2), what is
wanted last is evicted. Bookkeeping only: the simulator runs this very code, and `store` adds
tensors. Decisions follow from the order of calls, never from when a transfer happens to finish, so
equal runs move equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain

from beamwright.counters import Counters
from beamwright.errors import CapacityError
from beamwright.kv.host import HostTier
from beamwright.kv.link import KVLog, Transfer
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import (
    Lease,
    LiveSegments,
    Path,
    RestoreKind,
    Segment,
    first_blocks,
    missing_blocks,
    whole,
    within_reach,
)
from beamwright.protocols import Direction


class CacheManager:
    """Allocates, leases, evicts, writes back and loads the segments of one model.

    copies_per_beam: every beam of a group gets its own device copy (the LBS paper's layout).
    outgrown: True once something had to leave the device.
    num_relocated: blocks that have moved while rows read them: a reader that keeps places looks
        them up again.
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
        self.device, self.host, self.log = device, host, log
        self.copies_per_beam = copies_per_beam
        self.counts = Counters()
        self.outgrown, self.num_relocated = False, 0
        self.recompute_segments: Callable[[Sequence[Segment]], None] | None = None
        self._live = LiveSegments()
        self._next_use: dict[Segment, int] = {}
        self._tick = 0

    def create(self, name: str = "", start: int = 0) -> Segment:
        """An empty segment that owns no block yet, with those of the other groups.

        start: position of its first token.
        """
        segment = self.blank(name, start)
        for each in segment.group_segments:
            self._live.add(each)
        return segment

    def blank(self, name: str = "", start: int = 0) -> Segment:
        """What `create` makes, to be asked about and nothing else."""
        return self._live.blank(self.device.groups, name, start)

    def free(self, segment: Segment) -> None:
        """Free a segment's blocks in both tiers at once; twice is an AssertionError."""
        if segment.freed:
            raise AssertionError("a segment was freed twice")
        self.clear(segment)
        segment.freed = True
        for each in segment.group_segments:
            self._live.remove(each)
            self._next_use.pop(each, None)

    def clear(self, segment: Segment) -> None:
        """Forget a segment's tokens and free its blocks; transfers of it are cancelled."""
        for each in segment.group_segments:
            self._drop(each)
            each.length, each.memory, each.gone = 0, None, False

    def forget(self, segment: Segment, window: int) -> None:
        """Free what layers with this window have of a segment that no window will reach again.

        It keeps its length. Where evicted KV is computed again nothing is freed: once evicted, it
        costs nothing.
        """
        if self.host is not None and self.host.recompute:
            return
        for each in segment.group_segments:
            if each.group.window == window and not each.gone and not each.pins:
                self._drop(each)
                each.gone = True

    def take_over(self, segment: Segment, twin: Segment) -> None:
        """Give a segment what the twin has of it and no tier holds; the twin is to be freed."""
        for each, fresh in zip(segment.group_segments, twin.group_segments, strict=True):
            if not each.resident and not each.stored:
                each.copies, fresh.copies = fresh.copies, []
                each.restored_by, each.gone = RestoreKind.RECOMPUTED, False
                self._live.update(each)
                self._live.update(fresh)

    def _drop(self, segment: Segment) -> None:
        """Free the blocks of one group's segment; transfers of it are cancelled."""
        self.counts.cancelled_transfers += 0 if self.host is None else self.host.drop(segment)
        for blocks in segment.copies:
            self.device.free(blocks)
        segment.copies, segment.restored_by = [], None
        self._live.update(segment)

    def trim(self, segment: Segment) -> None:
        """Give back reserved blocks that hold no token."""
        for each in segment.group_segments:
            kept = each.blocks_for(each.length)
            for blocks in each.copies:
                self.device.free(blocks[kept:])
                del blocks[kept:]
            if not kept:
                each.copies = []
            self._live.update(each)

    @property
    def held_bytes(self) -> int:
        """Whole blocks of all segments, wherever they are; a copy of each."""
        return self._live.num_blocks * self.device.bytes_per_block

    @property
    def num_segments(self) -> int:
        """Nodes whose segments are not freed."""
        return self._live.num_nodes

    def check(self) -> None:
        """Conservation: every block is free or owned by one copy of one live segment."""
        self._live.check(self.device, None if self.host is None else self.host.ledger)

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
        with Lease({s: len(s.copies) for s in wanted}):  # none is its own victim
            fresh = self._take(sum(map(sum, missing.values())))
        for segment, counts in missing.items():
            segment.copies = segment.copies or [[]]
            for blocks, num_blocks in zip(segment.copies, counts, strict=True):
                blocks.extend(fresh[:num_blocks])
                del fresh[:num_blocks]
            self._live.update(segment)

    def extend(self, segment: Segment, num_tokens: int) -> None:
        """Count `num_tokens` more tokens, whose blocks are reserved."""
        for each in segment.group_segments:
            each.length += num_tokens

    def lease(
        self, needs: Mapping[Segment, int], copies: Mapping[Segment, int] | None = None
    ) -> Lease:
        """Hold segments on the device, and load what is missing.

        needs: how many copies of each are held. copies: how many the device must have; as many.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        lease = Lease(needs)
        try:
            self._make_resident(needs if copies is None else copies)
        except BaseException:
            lease.keep({})
            raise
        return lease

    def acquire(self, needs: Mapping[Segment, int]) -> Lease:
        """Lease for rows that join others: so many copies more than are held already."""
        return self.lease(needs, self.beside_others(needs))

    def lacking_bytes(self, needs: Mapping[Segment, int]) -> int:
        """Bytes that would have to be loaded for these copies."""
        return missing_blocks(needs) * self.device.bytes_per_block

    def load_ahead(self, needs: Mapping[Segment, int]) -> None:
        """Begin to load one copy of each, whatever has to leave for it; nobody waits.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        once = dict.fromkeys(needs, 1)
        with Lease(needs):
            self._make_room(missing_blocks(once))
            self._load_missing(once, "prefetch")

    def fits(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Could a lease on `needs` hold, with some segments grown to so many tokens?"""
        grown = whole(grown)
        taken = (self.taken(s, needs.get(s, 0), grown.get(s, 0)) for s in {**needs, **grown})
        return sum(taken) <= self.room

    @property
    def room(self) -> int:
        """Blocks for new leases: those that are not pinned; if none can leave, the free ones."""
        unpinned = self.device.num_blocks - self._live.tally.pinned_blocks
        return unpinned if self.evicts else self.device.num_free

    def taken(self, segment: Segment, copies: int, num_tokens: int) -> int:
        """Blocks of `room` for a segment in so many copies, and grown to so many tokens; 0: not."""
        count = segment.unpinned_blocks if self.evicts else segment.fresh_blocks
        return count(copies, num_tokens)

    def is_free(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Are there blocks for them that nobody has, so that nothing has to leave?"""
        grown = whole(grown)
        fresh = [s.fresh_blocks(needs.get(s, 0), grown.get(s, 0)) for s in {**needs, **grown}]
        return sum(fresh) <= self.device.num_free

    def beside_others(self, needs: Mapping[Segment, int]) -> dict[Segment, int]:
        """Copies that the device must hold for these and for those who hold the segments now."""
        if not self.copies_per_beam:
            return dict(needs)
        return {s: min(s.pins, len(s.copies)) + copies for s, copies in needs.items()}

    def needed(self, paths: Iterable[Path]) -> None:
        """Count the tokens of paths that were needed and are on the device."""
        for segment, visible, _ in chain.from_iterable(within_reach(path, 0) for path in paths):
            self.counts.needed_tokens += visible
            if segment.restored_by is RestoreKind.LOADED:
                self.counts.loaded_tokens += visible
            elif segment.restored_by is RestoreKind.RECOMPUTED:
                self.counts.dropped_tokens += visible
            segment.restored_by = None

    @property
    def evicts(self) -> bool:
        """True if there is a way to make room."""
        return self.host is not None

    @property
    def stays(self) -> bool:
        """True if KV stays on the device, in one copy, until it is freed: no lease is needed."""
        first, *others = self.device.groups
        plain = not others and first.window is None and not first.fixed
        return plain and not self.evicts and not self.copies_per_beam

    def expect(self, upcoming: Sequence[Iterable[Segment]]) -> None:
        """Say which segments the later groups of this round need, in order."""
        self._next_use = {}
        for distance, needs in enumerate(upcoming, start=1):
            for segment in needs:
                self._next_use.setdefault(segment, distance)

    def prefetch(self, needs: Mapping[Segment, int]) -> None:
        """Start loading what the next group needs.

        It evicts only what the rest of the round does not use: that would have to go anyway when
        the next group begins, so fetching ahead adds no traffic.
        """
        if self.host is None or self.host.recompute:
            return
        missing = [s for s in needs if not s.resident and s.stored]
        short = sum(s.blocks_for(s.length) for s in missing) - self.device.num_free
        if short > 0:
            self._evict([s for s in self._victims() if s not in self._next_use], short)
        with self.host.link.together():
            for segment in missing:
                if segment.blocks_for(segment.length) > self.device.num_free:
                    return
                self._load(segment, "prefetch")

    def write_back(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """Start copying what the host lacks: whole blocks, and the tail of sealed segments.

        Where the host is full they stay; eviction raises once their room is needed.
        """
        with suppress(CapacityError):
            self._store(
                (each for first in segments for each in first.group_segments), sealed=sealed
            )

    def _store(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """The same for segments of one group each."""
        if self.host is not None:
            self.host.write_back(segments, self.device, sealed=sealed)

    def write_ahead(
        self, needs: Mapping[Segment, int], growth: Iterable[int], growing: Collection[Segment]
    ) -> None:
        """Start storing what would have to go for these segments and steps of so many tokens.

        When their turn comes, evicting it costs nothing. growing: segments that are not complete.
        """
        if self.host is None or self.host.recompute:
            return
        kept = {*needs, *(each for first in growing for each in first.group_segments)}
        short = missing_blocks(needs) + sum(map(self.device.blocks_for, growth))
        short -= self.device.num_free
        if short <= 0:
            return
        others = (s for s in self._live.resident() if s not in kept)
        order = self.host.in_order(others, self._next_use)
        with suppress(CapacityError):  # eviction raises it once the room is needed
            self._store(first_blocks(order, short, lambda s: s.copies))

    def dirty(self) -> list[Segment]:
        """Resident segments that are not wholly on the host, in the order of eviction."""
        return [s for s in self._victims() if not s.stored]

    def evict_all(self) -> None:
        """Empty the device of what is not pinned (no reuse between steps)."""
        self._evict(self._victims(), self.device.num_blocks)

    def resize(self, total_bytes: int) -> int:
        """Make the device's budget this large; returns it in bytes.

        What is in the way is evicted, least urgent first. Pinned segments stay, and what is left
        moves together, behind all compute that is queued: no block is outside the budget then.

        Raises:
            CapacityError: if the host tier is full; LinkError: if the link has failed.
        """
        device = self.device
        used = device.num_blocks - device.num_free
        if (excess := used - total_bytes // device.bytes_per_block) > 0:
            self._evict(self._victims(), excess)
        total_bytes = device.resize(total_bytes)
        outside = [s for s in self._live.present() if any(map(device.beyond, s.copies))]
        for segment in outside:
            self._wait_for(segment, *Direction)
        source, destination = device.draw_in([blocks for s in outside for blocks in s.copies])
        if source:
            self.copy_on_device(source, destination)
            self.num_relocated += len(source)
        device.give_back()
        return total_bytes

    def _take(self, num_blocks: int) -> list[int]:
        """Device blocks, evicting what is wanted last."""
        self._make_room(num_blocks)
        return self.device.allocate(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        """Evict until so many blocks are free; if that cannot be, evict nothing."""
        missing = num_blocks - self.device.num_free
        victims = self._victims() if missing > 0 else []
        if victims and sum(len(b) for s in victims for b in s.unpinned_copies) >= missing:
            self._evict(victims, missing)

    def _victims(self) -> list[Segment]:
        """Segments with an unpinned copy, the one to go first in front."""
        unpinned = (s for s in self._live.resident() if len(s.copies) > s.pins)
        return [] if self.host is None else self.host.in_order(unpinned, self._next_use)

    def _evict(self, victims: Sequence[Segment], num_blocks: int) -> None:
        """Free `num_blocks` blocks if these victims have them; dirty ones are stored first."""
        self.outgrown = self.outgrown or bool(victims)
        chosen = first_blocks(victims, num_blocks, lambda s: s.unpinned_copies)
        leaving = [s for s in chosen if s.pins == 0]
        self._store(leaving)
        self.counts.evicted_blocks += sum(len(segment.blocks) for segment in leaving)
        for segment in chosen:
            self._wait_for(segment, *Direction)  # they read or write these blocks
            for blocks in segment.unpinned_copies:
                self.device.free(blocks)
            del segment.copies[segment.pins :]
            self._live.update(segment)

    def _make_resident(self, needs: Mapping[Segment, int]) -> None:
        self._touch(needs)
        self._make_room(missing_blocks(needs))
        lost = [s for s in needs if not s.resident and not s.stored]
        if self.host is not None:
            # Without shared loads, every further copy crosses the link on its own.
            loads = dict.fromkeys(needs, 1) if self.host.share_loads else needs
            with self.host.link.together():
                self._load_missing(loads, "load")
        loading = [t for s in needs for t in s.transfers if t.direction is Direction.H2D]
        if lost:
            self._recompute(lost)
        self._wait(loading)
        for segment, copies in needs.items():
            segment.transfers = segment.unfinished()
            while segment.length and len(segment.copies) < copies:
                source, blocks = segment.copies[0], self._take(segment.blocks_for(segment.length))
                segment.copies.append(blocks)
                self._live.update(segment)
                self.copy_on_device(source, blocks)

    def _touch(self, needs: Iterable[Segment]) -> None:
        self._tick += 1
        for segment in needs:
            segment.last_use = self._tick

    def _load_missing(self, wanted: Mapping[Segment, int], kind: str) -> None:
        for segment, copies in wanted.items():
            while segment.length and segment.stored and len(segment.copies) < copies:
                self._load(segment, kind)

    def _load(self, segment: Segment, kind: str) -> None:
        """Start loading one more copy of a segment from the host."""
        assert self.host is not None
        blocks = self._take(segment.blocks_for(segment.length))
        if not segment.copies:
            segment.restored_by = RestoreKind.LOADED
            self.counts.loaded_blocks += len(blocks)
        segment.copies.append(blocks)  # owned before anything can fail
        # A store of the same blocks may still be under way: the load must read its result.
        self._wait_for(segment, Direction.D2H)
        self.host.load(segment, blocks, kind, self.device)
        self._live.update(segment)

    def _recompute(self, lost: list[Segment]) -> None:
        assert self.recompute_segments is not None, "it is neither on the device nor on the host"
        nodes = list(dict.fromkeys(segment.first or segment for segment in lost))
        self.counts.recomputed_tokens += sum(segment.length for segment in nodes)
        self.counts.recomputed_blocks += sum(s.blocks_for(s.length) for s in lost)
        self.recompute_segments(nodes)

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
