"""HostTier: the host's side of a cache: its blocks, the link there, and who leaves the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from beamwright.kv.link import Link
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import Segment
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from beamwright.schedule.forest import cheapest_order, eviction_order, least_recent_order
from beamwright.sections import Victims


@dataclass
class HostTier:
    """Where evicted KV goes, and how it comes back.

    recompute: evicted segments are not kept on the host; they are computed again.
    share_loads: several copies of a segment cross the link once; otherwise each on its own
        (no inter-beam locality, LBS Fig. 10b).
    victims: who leaves the device first (`schedule.forest`).
    """

    ledger: BlockLedger
    link: Link
    recompute: bool = False
    share_loads: bool = True
    victims: Victims = "tree"

    def store(self, segment: Segment, until: int, device: BlockLedger) -> None:
        """Start storing blocks up to token `until`, from the first incomplete one on.

        Raises:
            CapacityError: if the host tier is full.
        """
        first, end = segment.host_length // device.block_tokens, device.blocks_for(until)
        segment.host_blocks += self.ledger.allocate(end - len(segment.host_blocks))
        here, there = segment.blocks[first:end], segment.host_blocks[first:end]
        pieces = self._pieces((there, self.ledger), (here, device))
        segment.transfers = segment.unfinished()
        segment.transfers.append(self.link.submit(Direction.D2H, "store", pieces))
        segment.host_length = until

    def load(self, segment: Segment, blocks: Sequence[int], kind: str, device: BlockLedger) -> None:
        """Start loading a segment into these device blocks; no store of it is under way."""
        pieces = self._pieces((blocks, device), (segment.host_blocks, self.ledger))
        segment.transfers.append(self.link.submit(Direction.H2D, kind, pieces))

    def _pieces(
        self, to: tuple[Sequence[int], BlockLedger], source: tuple[Sequence[int], BlockLedger]
    ) -> list[Piece]:
        """One contiguous piece per block; without tensors there is nothing behind them."""
        num_bytes = self.ledger.bytes_per_block
        ends = (map(ledger.block_bytes, blocks) for blocks, ledger in (to, source))
        return [Piece(there, here, num_bytes) for there, here in zip(*ends, strict=True)]

    def in_order(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        """These segments, the one to leave the device first in front.

        next_use: groups until the next use; absent if the rest of the round has none.
        """
        found = list(segments)
        if self.victims == "lru":
            last_touch = {segment: segment.last_touch for segment in found}
            return least_recent_order(found, last_touch, {s: s.start for s in found})
        last_use = {segment: segment.last_use for segment in found}
        stored = frozenset(segment for segment in found if segment.stored)
        order = eviction_order(found, next_use, last_use, stored)
        if self.victims == "cost":
            return cheapest_order(order, next_use, {s: self._return_cost(s) for s in order})
        return order

    def _return_cost(self, segment: Segment) -> float:
        """What it costs to have a segment again, per block that its leaving frees.

        In tokens to compute, or in blocks to copy: back, and to the host if they are not there.
        """
        blocks = self.ledger.blocks_for(segment.length)
        if self.recompute:
            return segment.length / blocks
        stored = segment.host_length // self.ledger.block_tokens
        return 1 + (0 if segment.stored else (blocks - stored) / blocks)
