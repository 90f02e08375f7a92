"""Simulated KV cache: block accounting without tensors, and prefills that only take time.

`SimulatedPrefill` runs the batching and leasing code of `models.TreeModel.prefill`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from beamwright.counters import Counters
from beamwright.engine.timeline import Timeline
from beamwright.kv.cache import CacheManager
from beamwright.kv.host import HostTier
from beamwright.kv.pool import BlockLedger
from beamwright.kv.segments import Segment
from beamwright.models.prefill import PrefillRequest, prefill_in_batches, prefill_needs, recompute
from beamwright.plan.costs import CHUNK_TOKENS
from beamwright.solver.solution import CacheStats
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.link import STATE
from beamwright_lab.simulator.victims import LeastRecent


class SimulatedResidency(CacheManager):
    """A CacheManager without tensors. Copies within the device advance the clock."""

    def __init__(
        self,
        device: BlockLedger,
        host: HostTier | None,
        clock: VirtualClock,
        costs: RooflineCosts,
        *,
        copies_per_beam: bool,
        log: Timeline | None = None,
    ) -> None:
        super().__init__(device, host, copies_per_beam=copies_per_beam, log=log)
        self._clock, self._costs = clock, costs

    def extend(self, segment: Segment, num_tokens: int) -> None:
        super().extend(segment, num_tokens)
        if isinstance(self.host, LeastRecent):
            self.host.touch(segment.group_segments, self._tick)

    def _touch(self, needs: Iterable[Segment]) -> None:
        super()._touch(needs)
        if isinstance(self.host, LeastRecent):
            held = (segment for segment in self._live.segments_on_device() if segment.pins)
            self.host.touch([*needs, *held], self._tick)

    def _load(self, segment: Segment, kind: str) -> None:
        super()._load(segment, kind)
        _mark_state_transfer(segment)

    def _store(self, segments: Iterable[Segment], *, sealed: bool = True) -> None:
        storing = list(segments)
        super()._store(storing, sealed=sealed)
        for segment in storing:
            _mark_state_transfer(segment)

    def copy_on_device(self, source: Sequence[int], destination: Sequence[int]) -> None:
        del destination
        self._clock.advance(self._costs.copy(len(source) * self.device.bytes_per_block))

    def append(self, segments: Sequence[Segment], lengths: Sequence[int]) -> None:
        """Count tokens at the end of each segment, as `kv.SegmentStore.append` writes them.

        Raises:
            CapacityError: if the blocks do not fit; no token has been counted then.
        """
        pairs = list(zip(segments, lengths, strict=True))
        self.reserve({segment: segment.length + length for segment, length in pairs})
        for segment, length in pairs:
            self.extend(segment, length)


def _mark_state_transfer(segment: Segment) -> None:
    """Mark the last transfer of a recurrent state's segment as such."""
    if segment.group.state_blocks and segment.transfers:
        segment.transfers[-1].kind = STATE


def cache_stats(stores: Sequence[SimulatedResidency]) -> CacheStats | None:
    """Return the cache hits of all these stores together; None without stores."""
    counts = [store.counts for store in stores]
    return CacheStats.of(sum(counts, start=Counters())) if counts else None


class SimulatedPrefill:
    """Simulates `models.TreeModel.prefill`: KV of new tokens behind stored paths."""

    def __init__(
        self, residency: SimulatedResidency, clock: VirtualClock, costs: RooflineCosts
    ) -> None:
        self._residency, self._clock, self._costs = residency, clock, costs
        residency.recompute_segments = self._recompute

    def run(self, requests: Sequence[PrefillRequest]) -> None:
        """Advance the clock by the prefill of these requests, and add their tokens to segments.

        Raises:
            CapacityError: if the KV budget cannot hold the new segments.
        """

        def forward(batch: list[int], chunks: list[Sequence[int]], offset: int) -> None:
            del offset
            self._forward([requests[i] for i in batch], [len(chunk) for chunk in chunks])

        prefill_in_batches(self._residency, requests, CHUNK_TOKENS, forward)

    def _forward(self, requests: Sequence[PrefillRequest], lengths: Sequence[int]) -> None:
        num_tokens, seen = sum(lengths), 0
        for request, length in zip(requests, lengths, strict=True):
            before = sum(part.visible for part in request.path) + request.segment.length
            seen += length * before + length * (length + 1) // 2
        needs = prefill_needs(self._residency, requests)
        read = num_tokens + sum(
            segment.length for segment in needs if not segment.group.state_blocks
        )
        self._clock.run(self._costs.prefill(num_tokens, read, seen))
        self._residency.append([request.segment for request in requests], lengths)

    def _recompute(self, lost: Sequence[Segment]) -> None:
        recompute(self._residency, lost, self.run)
