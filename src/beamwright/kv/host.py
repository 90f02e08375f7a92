"""HostTier: KV offload to host memory. `CacheManager` decides what is stored and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from beamwright.kv.link import Link
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import Segment
from beamwright.kv.streams import Blocks, Piece
from beamwright.protocols import Direction
from beamwright.schedule.forest import eviction_order


@dataclass
class HostTier:
    """Host memory for evicted KV, and the link to the device.

    recompute: True: evicted segments are not stored on the host; the model computes them again.
    share_loads: True: a segment crosses the link once, however many copies the device gets. False:
        each copy crosses it (no inter-beam locality, LBS Fig. 10b).
    """

    ledger: BlockLedger
    link: Link
    recompute: bool = False
    share_loads: bool = True

    def write_back(
        self, segments: Iterable[Segment], device: BlockLedger, *, sealed: bool = True
    ) -> None:
        """Start copying blocks that the host lacks; of unsealed (growing) segments only full ones.

        Raises:
            CapacityError: if the host tier is full.
        """
        if self.recompute:
            return
        with self.link.batch_transfers():
            for segment in segments:
                size = segment.group.block_tokens
                until = segment.length if sealed else segment.length // size * size
                if segment.copies and until > segment.host_length:
                    self.store(segment, until, device)

    def store(self, segment: Segment, until: int, device: BlockLedger) -> None:
        """Start copying to the host a segment's tokens up to `until`, except those it already has.

        Raises:
            CapacityError: if the host tier is full.
        """
        first, end = segment.host_length // segment.group.block_tokens, segment.blocks_for(until)
        segment.host_blocks += self.ledger.allocate(end - len(segment.host_blocks))
        to, source = segment.host_blocks[first:end], segment.blocks[first:end]
        pieces = self._pieces(self.ledger, to, device, source)
        segment.transfers = segment.unfinished()
        segment.transfers.append(self.link.submit(Direction.D2H, "store", pieces))
        segment.host_length = until

    def load(self, segment: Segment, blocks: Sequence[int], kind: str, device: BlockLedger) -> None:
        """Start loading a segment into these device blocks. Its stores must have finished.

        kind: the transfer's name in counters and timelines: "load" or "prefetch".
        """
        pieces = self._pieces(device, blocks, self.ledger, segment.host_blocks)
        segment.transfers.append(self.link.submit(Direction.H2D, kind, pieces))

    def drop(self, segment: Segment) -> int:
        """Free a segment's host blocks, and return how many of its transfers were cancelled."""
        cancelled = len(segment.unfinished())
        if segment.transfers:
            self.link.cancel(segment.transfers)
        self.ledger.free(segment.host_blocks)
        segment.transfers, segment.host_blocks, segment.host_length = [], [], 0
        return cancelled

    def _pieces(
        self, there: BlockLedger, to: Sequence[int], here: BlockLedger, source: Sequence[int]
    ) -> list[Piece]:
        """Return what the link must copy: one piece per block, or for a GPU one list of blocks.

        In the simulator, which has no tensors, a piece has only its size.
        """
        size, memory, held = self.ledger.bytes_per_block, there.memory, here.memory
        if memory is not None and held is not None:
            sides = Blocks(memory, tuple(to)), Blocks(held, tuple(source))
            return [Piece(*sides, size * len(to))]
        pairs = zip(to, source, strict=True)
        return [Piece(there.block_memory(a), here.block_memory(b), size) for a, b in pairs]

    def order_for_eviction(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        """Return these segments in the order in which they should be evicted.

        next_use: number of groups until a segment's next use. Segments that the rest of the round
            does not use are absent.
        """
        leaving = list(segments)
        last_use = {segment: segment.last_use for segment in leaving}
        stored = frozenset(segment for segment in leaving if segment.stored)
        return eviction_order(leaving, next_use, last_use, stored)
