"""Movement: loads, stores and evictions of segments, and waiting for them.

Bookkeeping only: the simulator runs this very code without tensors. Every decision follows from
the order of calls and never from when a transfer happens to finish, so equal runs move equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from beamwright.counters import Counters
from beamwright.kv.ledger import BlockLedger
from beamwright.kv.link import Link, Piece, Transfer
from beamwright.kv.segments import Return, Segment
from beamwright.protocols import Direction
from beamwright.schedule.forest import cheapest_order, eviction_order, least_recent_order
from beamwright.sections import Victims


class ResidenceLog(Protocol):
    """Records where a segment's KV is, and when compute waited (a timeline)."""

    def residence(self, segment: str, change: str) -> None: ...

    def span(self, name: str, track: str, **args: Any) -> AbstractContextManager[Any]: ...


@dataclass
class HostTier:
    """The host side: its blocks, the link to it, and how evicted KV comes back.

    recompute: evicted segments are not kept on the host; they are computed again.
    share_loads: several copies of a segment cross the link once; otherwise each on its own
        (no inter-beam locality, LBS Fig. 10b).
    victims: who leaves the device first (`schedule.eviction`).
    """

    ledger: BlockLedger
    link: Link
    recompute: bool = False
    share_loads: bool = True
    victims: Victims = "tree"


class Movement:
    """Segments of one device ledger, with an optional host tier behind a link.

    copies_per_beam: every beam of a group gets its own device copy (the LBS paper's layout).
    outgrown: True once something had to leave the device.
    """

    def __init__(
        self,
        device: BlockLedger,
        host: HostTier | None = None,
        *,
        copies_per_beam: bool = False,
        log: ResidenceLog | None = None,
    ) -> None:
        self.device, self.host = device, host
        self.copies_per_beam = copies_per_beam
        self.counts = Counters()
        self.log = log
        self.outgrown = False
        self._segments: dict[Segment, None] = {}
        self._next_use: dict[Segment, int] = {}

    # --- storing and loading -----------------------------------------------------------------

    def write_back(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        """Start copying what the host lacks: whole blocks, and the tail of sealed segments.

        Raises:
            CapacityError: if the host tier is full.
        """
        if self.host is None or self.host.recompute:
            return
        with self.host.link.together():
            for segment in segments:
                size = self.device.block_tokens
                until = segment.length if sealed else segment.length // size * size
                if segment.copies and until > segment.host_length:
                    self._store(segment, until)

    def _load(self, segment: Segment, blocks: list[int], kind: str) -> Transfer:
        """Start loading a segment from the host into fresh device blocks."""
        assert self.host is not None
        if not segment.copies:
            segment.returned = Return.LOADED
            self.counts.loaded_blocks += len(blocks)
        segment.copies.append(blocks)  # owned before anything can fail
        # A store of the same blocks may still be under way: the load must read its result.
        self._wait_for(segment, Direction.D2H)
        pieces = self.pieces(Direction.H2D, blocks, segment.host_blocks[: len(blocks)])
        transfer = self.host.link.submit(Direction.H2D, kind, pieces)
        segment.transfers.append(transfer)
        self._log_residence(segment)
        return transfer

    def _load_copies(self, segment: Segment, copies: int) -> None:
        """Without shared loads, every further copy crosses the link on its own."""
        if self.host is None or self.host.share_loads or segment.host_length < segment.length:
            return
        for _ in range(copies - len(segment.copies)):
            self._load(segment, self._take(self.device.blocks_for(segment.length)), "load")

    def _duplicate(self, segment: Segment, copies: int) -> None:
        """Further copies by copying on the device."""
        while segment.length and len(segment.copies) < copies:
            blocks = self._take(self.device.blocks_for(segment.length))
            segment.copies.append(blocks)
            self.copy_on_device(segment.copies[0], blocks)

    def _store(self, segment: Segment, until: int) -> None:
        """Start storing blocks up to token `until`, from the first incomplete one on."""
        assert self.host is not None
        size = self.device.block_tokens
        first, end = segment.host_length // size, self.device.blocks_for(until)
        if end > len(segment.host_blocks):
            segment.host_blocks += self.host.ledger.allocate(end - len(segment.host_blocks))
        blocks = segment.copies[0][first:end], segment.host_blocks[first:end]
        pieces = self.pieces(Direction.D2H, *blocks)
        segment.transfers = [t for t in segment.transfers if not t.finished]
        segment.transfers.append(self.host.link.submit(Direction.D2H, "store", pieces))
        segment.host_length = until
        self._log_residence(segment)

    # --- making room -------------------------------------------------------------------------

    def _take(self, num_blocks: int) -> list[int]:
        """Device blocks, evicting what is wanted last."""
        self._make_room(num_blocks)
        return self.device.allocate(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        """Evict until so many blocks are free; if that cannot be, evict nothing."""
        missing = num_blocks - self.device.num_free
        if missing <= 0 or self.host is None:
            return
        victims = self._victims()
        if sum(len(b) for s in victims for b in s.copies[s.pins :]) >= missing:
            self._evict(victims, missing)

    def _victims(self) -> list[Segment]:
        """Segments with an unpinned copy, the one to go first in front."""
        return self._in_order(s for s in self._segments if len(s.copies) > s.pins and s.length)

    def _in_order(self, segments: Iterable[Segment]) -> list[Segment]:
        """These segments, the one to be evicted first in front."""
        found, rule = list(segments), "tree" if self.host is None else self.host.victims
        if rule == "lru":
            return least_recent_order(
                found, {s: s.last_touch for s in found}, {s: s.start for s in found}
            )
        last_use = {segment: segment.last_use for segment in found}
        stored = frozenset(segment for segment in found if segment.stored)
        order = eviction_order(found, self._next_use, last_use, stored)
        if rule == "cost":
            return cheapest_order(order, self._next_use, {s: self._return_cost(s) for s in order})
        return order

    def _return_cost(self, segment: Segment) -> float:
        """What it costs to have a segment again, per block that its leaving frees.

        In tokens to compute, or in blocks to copy: back, and to the host if they are not there.
        """
        assert self.host is not None
        blocks = self.device.blocks_for(segment.length)
        if self.host.recompute:
            return segment.length / blocks
        stored = segment.host_length // self.device.block_tokens
        return 1 + (0 if segment.stored else (blocks - stored) / blocks)

    def _evict(self, victims: Sequence[Segment], num_blocks: int) -> None:
        """Free `num_blocks` blocks if these victims have them; dirty ones are stored first."""
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
        self.counts.evicted_blocks += sum(len(segment.blocks) for segment in leaving)
        for segment in chosen:
            # Loads and stores under way read or write these blocks.
            self._wait_for(segment, Direction.D2H)
            self._wait_for(segment, Direction.H2D)
            for blocks in segment.copies[segment.pins :]:
                self.device.free(blocks)
            del segment.copies[segment.pins :]
            self._log_residence(segment)

    # --- transfers ---------------------------------------------------------------------------

    def pieces(
        self, direction: Direction, device: Sequence[int], host: Sequence[int]
    ) -> list[Piece]:
        """One piece per block; without tensors there is nothing behind them."""
        del direction, host
        return [Piece(None, None, self.device.bytes_per_block) for _ in device]

    def copy_on_device(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy blocks within the device; without tensors there is nothing to do."""

    def _wait_for(self, segment: Segment, direction: Direction) -> None:
        self._wait([t for t in segment.transfers if t.direction is direction])
        segment.transfers = [t for t in segment.transfers if not t.finished]

    def _wait(self, transfers: Iterable[Transfer]) -> None:
        """Compute waits for these: that is the stall."""
        pending = [transfer for transfer in transfers if not transfer.finished]
        if not pending or self.host is None:
            return
        with self.log.span("wait", "stall") if self.log is not None else nullcontext():
            self.counts.transfer_wait_s += self.host.link.wait(pending)

    def _cancel(self, segment: Segment) -> None:
        if segment.transfers and self.host is not None:
            self.counts.cancelled_transfers += sum(not t.finished for t in segment.transfers)
            self.host.link.cancel(segment.transfers)
            segment.transfers = []

    def _log_residence(self, segment: Segment) -> None:
        if self.log is not None and segment.name:
            self.log.residence(segment.name, segment.place or "none")
