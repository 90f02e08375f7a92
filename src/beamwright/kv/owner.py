"""SegmentOwner: makes and frees segments in the blocks of one device ledger, and of a host tier.

Knows who has which block, and nothing of when it is read.
"""

from __future__ import annotations

from itertools import count

from beamwright.counters import Counters
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import HostTier, Return, Segment, Tally


class SegmentOwner:
    """Creates, trims, forgets and frees segments; `check` finds every block with its owner."""

    def __init__(self, device: BlockLedger, host: HostTier | None) -> None:
        self.device, self.host = device, host
        self.counts = Counters()
        self._segments: dict[Segment, None] = {}
        self._present: dict[int, Segment] = {}  # by serial, those that have blocks on the device
        self._next_use: dict[Segment, int] = {}
        self._tally, self._serials = Tally(), count()

    def create(self, name: str = "", start: int = 0) -> Segment:
        """An empty segment that owns no block yet, with those of the other groups.

        start: position of its first token.
        """
        segment = self.blank(name, start)
        for each in segment.every:
            each.serial = next(self._serials)
            self._segments[each] = None
        return segment

    def blank(self, name: str = "", start: int = 0) -> Segment:
        """What `create` makes, to be asked about and nothing else."""
        tally, groups = self._tally, self.device.groups
        first, *others = [
            Segment(
                name,
                start=start,
                block_tokens=g.block_tokens,
                window=g.window,
                fixed=g.fixed,
                tally=tally,
            )
            for g in groups
        ]
        first.others = tuple(others)
        for each in others:
            each.first = first
        return first

    def free(self, segment: Segment) -> None:
        """Free a segment's blocks in both tiers at once; twice is an AssertionError."""
        if segment.freed:
            raise AssertionError("a segment was freed twice")
        self.clear(segment)
        segment.freed = True
        for each in segment.every:
            self._segments.pop(each, None)
            self._next_use.pop(each, None)

    def clear(self, segment: Segment) -> None:
        """Forget a segment's tokens and free its blocks; transfers of it are cancelled."""
        for each in segment.every:
            self._drop(each)
            each.length, each.memory, each.gone = 0, None, False

    def forget(self, segment: Segment, window: int) -> None:
        """No row's window reaches it in layers that see so many tokens, and none ever will: free
        what they have of it. It keeps its length, and nothing is read of it any more.

        Where evicted KV is computed again nothing is to be freed: it costs nothing once it is gone.
        """
        if self.host is not None and self.host.recompute:
            return
        for each in segment.every:
            if each.window == window and not each.gone and not each.pins:
                self._drop(each)
                each.gone = True

    def take_over(self, segment: Segment, twin: Segment) -> None:
        """What no tier holds of a segment is what the twin has, which is to be freed."""
        for each, fresh in zip(segment.every, twin.every, strict=True):
            if not each.resident and not each.stored:
                each.copies, fresh.copies = fresh.copies, []
                each.returned, each.gone = Return.RECOMPUTED, False
                self._placed(each)
                self._placed(fresh)

    def _drop(self, segment: Segment) -> None:
        """Free the blocks of one group's segment; transfers of it are cancelled."""
        if segment.transfers and self.host is not None:
            self.counts.cancelled_transfers += sum(not t.finished for t in segment.transfers)
            self.host.link.cancel(segment.transfers)
            segment.transfers = []
        for blocks in segment.copies:
            self.device.free(blocks)
        if self.host is not None:
            self.host.ledger.free(segment.host_blocks)
        segment.copies, segment.host_blocks = [], []
        segment.host_length, segment.returned = 0, None
        self._placed(segment)

    def trim(self, segment: Segment) -> None:
        """Give back reserved blocks that hold no token."""
        for each in segment.every:
            kept = each.blocks_for(each.length)
            if kept and len(each.copies) == 1 and len(each.copies[0]) == kept:
                continue
            for blocks in each.copies:
                self.device.free(blocks[kept:])
                del blocks[kept:]
            if not kept:
                each.copies = []
            self._placed(each)

    def _placed(self, segment: Segment) -> None:
        """Its blocks, or the tiers that have some, are others now."""
        segment.pin()
        if segment.copies:
            self._present[segment.serial] = segment
        else:
            self._present.pop(segment.serial, None)

    @property
    def held_bytes(self) -> int:
        """Whole blocks of all segments, wherever they are; a copy of each."""
        blocks = (s.blocks_for(s.length) for s in self._segments if not s.gone)
        return sum(blocks) * self.device.bytes_per_block

    @property
    def num_segments(self) -> int:
        """Segments that are not freed; those of a node's other groups are not counted."""
        return sum(segment.first is None for segment in self._segments)

    def check(self) -> None:
        """Conservation: every block is free or owned by one copy of one live segment."""
        live = list(self._segments)
        self.device.check([b for s in live for blocks in s.copies for b in blocks])
        if self.host is not None:
            self.host.ledger.check([block for segment in live for block in segment.host_blocks])
        for segment in live:
            wanted = segment.blocks_for(segment.length)
            short = any(len(blocks) < wanted for blocks in segment.copies)
            assert not short, f"{segment.length} tokens lack blocks"
            assert segment.length or segment.pins <= max(1, len(segment.copies)), "pins no copy"
            assert bool(segment.copies) == (segment.serial in self._present), "astray"
        pinned = sum(min(s.pins, len(s.copies)) * len(s.blocks) for s in live)
        assert pinned == self._tally.pinned_blocks, f"{pinned} blocks are pinned"
