"""CacheManager: the KV cache's block allocator, with eviction, offload to the host, and prefetch.

Rows pin the segments that they read (`Lease`). Eviction takes the segment whose next use, told by
`announce_uses`, is last (LBS sections 4.1 and 4.2). The manager has no tensors (`SegmentStore` adds
them), so the simulator can run it too. Its decisions depend on the order of calls, never on when a
transfer finishes, so that equal runs move equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain

from beamwright.counters import Counters
from beamwright.errors import CapacityError
from beamwright.kv.host import HostTier
from beamwright.kv.link import Transfer, TransferTimeline
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import (
    Lease,
    LiveSegments,
    Path,
    RestoreKind,
    Segment,
    for_all_groups,
    missing_blocks,
    parts_read,
    prefix_with_blocks,
)
from beamwright.protocols import Direction


class CacheManager:
    """Manager of one model's segments: it allocates, pins, evicts, stores and loads their blocks.

    copies_per_beam: True: every row has its own device copy of its path (the LBS paper's layout).
    outgrown: True once a segment had to be evicted.
    num_relocated: blocks that `resize` has moved; readers that cache block numbers compare it.
    recompute_segments: callback that computes KV of evicted segments again, given parents first.
    """

    def __init__(
        self,
        device: BlockLedger,
        host: HostTier | None = None,
        *,
        copies_per_beam: bool = False,
        log: TransferTimeline | None = None,
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
        """Create a node's empty segments, one per group; return the first. start: see `Segment`."""
        segment = self.create_unmanaged(name, start)
        for each in segment.group_segments:
            self._live.add(each)
        return segment

    def create_unmanaged(self, name: str = "", start: int = 0) -> Segment:
        """Create a segment that is not managed and gets no blocks, only to compute sizes."""
        return self._live.create_unregistered(self.device.groups, name, start)

    def free(self, segment: Segment) -> None:
        """Free a segment's blocks in both tiers. Freeing it twice is an AssertionError."""
        if segment.freed:
            raise AssertionError("a segment was freed twice")
        self.clear(segment)
        segment.freed = True
        for each in segment.group_segments:
            self._live.remove(each)
            self._next_use.pop(each, None)

    def clear(self, segment: Segment) -> None:
        """Remove a segment's tokens, free its blocks, and cancel its transfers."""
        for each in segment.group_segments:
            self._drop(each)
            each.length, each.attention_data, each.out_of_window = 0, None, False

    def free_window(self, segment: Segment, window: int) -> None:
        """Free a segment's KV of layers with this sliding window, which no later row reads.

        Its length stays. If evicted KV is recomputed, nothing is freed: eviction costs no memory.
        """
        if self.host is not None and self.host.recompute:
            return
        for each in segment.group_segments:
            if each.group.window == window and not each.out_of_window and not each.pins:
                self._drop(each)
                each.out_of_window = True

    def adopt_blocks(self, segment: Segment, twin: Segment) -> None:
        """Move recomputed blocks from a temporary segment, `twin`, to one that no tier holds."""
        for each, fresh in zip(segment.group_segments, twin.group_segments, strict=True):
            if not each.resident and not each.stored:
                each.copies, fresh.copies = fresh.copies, []
                each.restored_by, each.out_of_window = RestoreKind.RECOMPUTED, False
                self._live.update(each)
                self._live.update(fresh)

    def _drop(self, segment: Segment) -> None:
        """Free the blocks of one group's segment, and cancel its transfers."""
        self.counts.cancelled_transfers += 0 if self.host is None else self.host.drop(segment)
        for blocks in segment.copies:
            self.device.free(blocks)
        segment.copies, segment.restored_by = [], None
        self._live.update(segment)

    def trim(self, segment: Segment) -> None:
        """Free blocks of a segment that were reserved but hold no token."""
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
        """Bytes of all live segments in whole blocks, each counted once wherever its copies are."""
        return self._live.num_blocks * self.device.bytes_per_block

    @property
    def num_segments(self) -> int:
        """Number of nodes whose segments are not freed."""
        return self._live.num_nodes

    def check(self) -> None:
        """Check conservation: every block is free or owned by one copy of one live segment."""
        self._live.check(self.device, None if self.host is None else self.host.ledger)

    def reserve(self, wanted: Mapping[Segment, int]) -> None:
        """Allocate blocks in which each segment can grow to `wanted` tokens; may evict others.

        Raises:
            CapacityError: if memory is too small; nothing has changed in that case.
        """
        wanted, missing = for_all_groups(wanted), dict[Segment, list[int]]()
        for segment, num_tokens in wanted.items():
            size, copies = segment.blocks_for(num_tokens), segment.copies
            if segment.length and not copies:
                raise AssertionError("only a resident segment can grow")
            held = len(copies[0]) if len(copies) == 1 else min(map(len, copies), default=0)
            if size > held:
                missing[segment] = [max(0, size - len(blocks)) for blocks in copies or [[]]]
        if not missing:
            return
        with Lease({s: len(s.copies) for s in wanted}):  # pinned, so `_alloc` evicts none
            fresh = self._alloc(sum(map(sum, missing.values())))
        for segment, counts in missing.items():
            segment.copies = segment.copies or [[]]
            for blocks, num_blocks in zip(segment.copies, counts, strict=True):
                blocks.extend(fresh[:num_blocks])
                del fresh[:num_blocks]
            self._live.update(segment)

    def extend(self, segment: Segment, num_tokens: int) -> None:
        """Count `num_tokens` more tokens as written to a segment's reserved blocks."""
        for each in segment.group_segments:
            each.length += num_tokens

    def lease(
        self, needs: Mapping[Segment, int], copies: Mapping[Segment, int] | None = None
    ) -> Lease:
        """Pin segments on the device, after loading or recomputing what is missing.

        needs: how many copies to pin. copies: how many the device must have; None: `needs`.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        lease = Lease(needs)
        try:
            self._make_resident(needs if copies is None else copies)
        except BaseException:
            lease.keep_only({})
            raise
        return lease

    def acquire(self, needs: Mapping[Segment, int]) -> Lease:
        """Lease segments for joining rows, in addition to what running rows have pinned."""
        return self.lease(needs, self.total_copies(needs))

    def missing_bytes(self, needs: Mapping[Segment, int]) -> int:
        """Return the bytes to load or copy until the device has these copies."""
        return missing_blocks(needs) * self.device.bytes_per_block

    def prefetch_rows(self, needs: Mapping[Segment, int]) -> None:
        """Start loading one copy of each segment for rows that join later; may evict others.

        Raises:
            CapacityError: if they do not fit; LinkError: if the link has failed.
        """
        once = dict.fromkeys(needs, 1)
        with Lease(needs):
            self._make_room(missing_blocks(once))
            self._load_missing(once, "prefetch")

    def fits(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Return True if `needs` copies of segments, grown to `grown` tokens, can be leased."""
        grown = for_all_groups(grown)
        taken = (self.blocks_taken(s, needs.get(s, 0), grown.get(s, 0)) for s in {**needs, **grown})
        return sum(taken) <= self.available_blocks

    @property
    def available_blocks(self) -> int:
        """Number of blocks that new leases can use: unpinned ones; without eviction, free ones."""
        unpinned = self.device.num_blocks - self._live.tally.pinned_blocks
        return unpinned if self.evicts else self.device.num_free

    def blocks_taken(self, segment: Segment, copies: int, num_tokens: int) -> int:
        """Return how many of `available_blocks` a lease on `copies` copies of a segment takes.

        num_tokens: tokens that the segment grows to; 0: it does not grow.
        """
        count = segment.newly_pinned_blocks if self.evicts else segment.fresh_blocks
        return count(copies, num_tokens)

    def fits_free_blocks(self, needs: Mapping[Segment, int], grown: Mapping[Segment, int]) -> bool:
        """Return True if leasing `needs` copies, grown to `grown` tokens, evicts nothing."""
        grown = for_all_groups(grown)
        fresh = [s.fresh_blocks(needs.get(s, 0), grown.get(s, 0)) for s in {**needs, **grown}]
        return sum(fresh) <= self.device.num_free

    def total_copies(self, needs: Mapping[Segment, int]) -> dict[Segment, int]:
        """Return how many copies the device must hold for existing leases and these new ones."""
        if not self.copies_per_beam:
            return dict(needs)
        return {s: min(s.pins, len(s.copies)) + copies for s, copies in needs.items()}

    def count_tokens_read(self, paths: Iterable[Path]) -> None:
        """Count the tokens that these paths read: all, loaded, recomputed (`dropped_tokens`)."""
        for segment, visible, _ in chain.from_iterable(parts_read(path, 0) for path in paths):
            self.counts.needed_tokens += visible
            if segment.restored_by is RestoreKind.LOADED:
                self.counts.loaded_tokens += visible
            elif segment.restored_by is RestoreKind.RECOMPUTED:
                self.counts.dropped_tokens += visible
            segment.restored_by = None

    @property
    def evicts(self) -> bool:
        """True if segments can be evicted, to the host or to be computed again."""
        return self.host is not None

    @property
    def never_moves(self) -> bool:
        """True if KV needs no pins: its only copy stays on the device until it is freed."""
        first, *others = self.device.groups
        plain = not others and first.window is None and not first.state_blocks
        return plain and not self.evicts and not self.copies_per_beam

    def announce_uses(self, upcoming: Sequence[Iterable[Segment]]) -> None:
        """Tell eviction which segments the coming groups of this round read, in their order."""
        self._next_use = {}
        for distance, needs in enumerate(upcoming, start=1):
            for segment in needs:
                self._next_use.setdefault(segment, distance)

    def prefetch_group(self, needs: Mapping[Segment, int]) -> None:
        """Start loading segments that the next group reads, until no more blocks can be freed.

        Only segments that the rest of the round does not read are evicted. They would be evicted
        anyway when the next group begins, so prefetching adds no traffic.
        """
        if self.host is None or self.host.recompute:
            return
        missing = [s for s in needs if not s.resident and s.stored]
        short = sum(s.blocks_for(s.length) for s in missing) - self.device.num_free
        if short > 0:
            self._evict([s for s in self._victims() if s not in self._next_use], short)
        with self.host.link.batch_transfers():
            for segment in missing:
                if segment.blocks_for(segment.length) > self.device.num_free:
                    return
                self._load(segment, "prefetch")

    def write_back(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """Start copying blocks to the host. If it is full, eviction raises the CapacityError later.

        sealed: the segments will not grow, so their last, partly filled block is copied too.
        """
        with suppress(CapacityError):
            self._store(
                (each for first in segments for each in first.group_segments), sealed=sealed
            )

    def _store(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """Start copying segments to the host, each for its own group of layers only."""
        if self.host is not None:
            self.host.write_back(segments, self.device, sealed=sealed)

    def store_for_group(
        self, needs: Mapping[Segment, int], growth: Iterable[int], growing: Collection[Segment]
    ) -> None:
        """Start copying to the host the segments that make room for the next group.

        needs: copies of segments that the group reads. growth: tokens of each of its steps.
        growing: unfinished segments, which are not stored.
        """
        if self.host is None or self.host.recompute:
            return
        kept = {*needs, *(each for first in growing for each in first.group_segments)}
        short = missing_blocks(needs) + sum(map(self.device.blocks_for, growth))
        short -= self.device.num_free
        if short <= 0:
            return
        others = (s for s in self._live.resident_segments() if s not in kept)
        order = self.host.order_for_eviction(others, self._next_use)
        with suppress(CapacityError):  # eviction raises the error if it needs the blocks
            self._store(prefix_with_blocks(order, short, lambda s: s.copies))

    def dirty_segments(self) -> list[Segment]:
        """Return segments whose eviction must first store them, in the order of eviction."""
        return [s for s in self._victims() if not s.stored]

    def evict_all(self) -> None:
        """Evict everything that is not pinned (for runs that do not reuse KV between steps)."""
        self._evict(self._victims(), self.device.num_blocks)

    def resize(self, total_bytes: int) -> int:
        """Set the KV budget of the device, and return it in bytes.

        Segments are evicted if they exceed the budget. Blocks that stay, but lie beyond the end of
        the budget, are copied to blocks before it, after all queued compute.

        Raises:
            CapacityError: if the host tier is full; LinkError: if the link has failed.
        """
        device = self.device
        used = device.num_blocks - device.num_free
        if (excess := used - total_bytes // device.bytes_per_block) > 0:
            self._evict(self._victims(), excess)
        total_bytes = device.resize(total_bytes)
        outside = [
            s for s in self._live.segments_on_device() if any(map(device.outside_budget, s.copies))
        ]
        for segment in outside:
            self._wait_for(segment, *Direction)
        source, destination = device.move_inside([blocks for s in outside for blocks in s.copies])
        if source:
            self.copy_on_device(source, destination)
            self.num_relocated += len(source)
        device.forget_outside()
        return total_bytes

    def _alloc(self, num_blocks: int) -> list[int]:
        """Allocate device blocks, evicting segments if too few are free."""
        self._make_room(num_blocks)
        return self.device.allocate(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` blocks are free. If that is impossible, evict nothing."""
        missing = num_blocks - self.device.num_free
        victims = self._victims() if missing > 0 else []
        if victims and sum(len(b) for s in victims for b in s.unpinned_copies) >= missing:
            self._evict(victims, missing)

    def _victims(self) -> list[Segment]:
        """Return the segments that may be evicted, in the order of eviction."""
        unpinned = (s for s in self._live.resident_segments() if len(s.copies) > s.pins)
        return [] if self.host is None else self.host.order_for_eviction(unpinned, self._next_use)

    def _evict(self, victims: Sequence[Segment], num_blocks: int) -> None:
        """Free `num_blocks` blocks of these segments, storing them on the host where necessary."""
        self.outgrown = self.outgrown or bool(victims)
        chosen = prefix_with_blocks(victims, num_blocks, lambda s: s.unpinned_copies)
        leaving = [s for s in chosen if s.pins == 0]
        self._store(leaving)
        self.counts.evicted_blocks += sum(len(segment.blocks) for segment in leaving)
        for segment in chosen:
            self._wait_for(segment, *Direction)  # its transfers read or write these blocks
            for blocks in segment.unpinned_copies:
                self.device.free(blocks)
            del segment.copies[segment.pins :]
            self._live.update(segment)

    def _make_resident(self, needs: Mapping[Segment, int]) -> None:
        self._touch(needs)
        self._make_room(missing_blocks(needs))
        lost = [s for s in needs if not s.resident and not s.stored]
        if self.host is not None:
            # Without shared loads, every copy crosses the link.
            loads = dict.fromkeys(needs, 1) if self.host.share_loads else needs
            with self.host.link.batch_transfers():
                self._load_missing(loads, "load")
        loading = [t for s in needs for t in s.transfers if t.direction is Direction.H2D]
        if lost:
            self._recompute(lost)
        self._wait(loading)
        for segment, copies in needs.items():
            segment.transfers = segment.unfinished()
            while segment.length and len(segment.copies) < copies:
                source, blocks = segment.copies[0], self._alloc(segment.blocks_for(segment.length))
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
        """Start loading a segment from the host into new blocks: one more of `segment.copies`."""
        assert self.host is not None
        blocks = self._alloc(segment.blocks_for(segment.length))
        if not segment.copies:
            segment.restored_by = RestoreKind.LOADED
            self.counts.loaded_blocks += len(blocks)
        segment.copies.append(blocks)  # entered now: none is lost if a later call fails
        # The load must read the result of a store that may still be under way.
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
        """Copy blocks within the device. Only `SegmentStore`, with tensors, implements this."""

    def _wait_for(self, segment: Segment, *directions: Direction) -> None:
        self._wait([t for t in segment.transfers if t.direction in directions])
        segment.transfers = segment.unfinished()

    def _wait(self, transfers: Iterable[Transfer]) -> None:
        """Make compute wait for these transfers, and count the waiting time as stall."""
        pending = [transfer for transfer in transfers if not transfer.finished]
        if pending and self.host is not None:
            with self.log.span("wait", "stall") if self.log is not None else nullcontext():
                self.counts.transfer_wait_s += self.host.link.wait(pending)
