"""HostTier: where evicted KV goes, and how it comes back over the link. Decides nothing else."""

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
    """Where evicted KV goes, and how it comes back.

    recompute: evicted segments are not kept on the host; they are computed again.
    share_loads: several copies of a segment cross the link once; otherwise each on its own
        (no inter-beam locality, LBS Fig. 10b).
    """

    ledger: BlockLedger
    link: Link
    recompute: bool = False
    share_loads: bool = True

    def write_back(
        self, segments: Iterable[Segment], device: BlockLedger, *, sealed: bool = True
    ) -> None:
        """Start storing what the host lacks: whole blocks, and the tail of sealed segments.

        Raises:
            CapacityError: if the host tier is full.
        """
        if self.recompute:
            return
        with self.link.together():
            for segment in segments:
                size = segment.group.block_tokens
                until = segment.length if sealed else segment.length // size * size
                if segment.copies and until > segment.host_length:
                    self.store(segment, until, device)

    def store(self, segment: Segment, until: int, device: BlockLedger) -> None:
        """Start storing blocks up to token `until`, from the first incomplete one on.

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
        """Start loading a segment into these device blocks; no store of it is under way."""
        pieces = self._pieces(device, blocks, self.ledger, segment.host_blocks)
        segment.transfers.append(self.link.submit(Direction.H2D, kind, pieces))

    def drop(self, segment: Segment) -> int:
        """Free a segment's host blocks; its transfers are cancelled. Returns how many were."""
        cancelled = len(segment.unfinished())
        if segment.transfers:
            self.link.cancel(segment.transfers)
        self.ledger.free(segment.host_blocks)
        segment.transfers, segment.host_blocks, segment.host_length = [], [], 0
        return cancelled

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
