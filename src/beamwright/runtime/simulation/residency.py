"""Simulated KV: residency without tensors, and prefills that only take time.

`Prefill` goes step by step as `models.TreeModel.prefill` does: the order of leases decides what is
evicted, so bytes on the link are equal only if every lease is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from beamwright.kv import BlockLedger, HomeTier, Residency, Segment, copies_needed
from beamwright.models.decoder import padded_rows
from beamwright.models.session import visible_path
from beamwright.models.tree_model import PREFILL_CHUNK_TOKENS, PrefillRequest
from beamwright.runtime.simulation.clock import VirtualClock
from beamwright.runtime.simulation.costs import DeviceCosts
from beamwright.runtime.timeline import Timeline

_BATCH_PADDED_TOKENS = 4096  # as in `models.TreeModel`


class SimulatedResidency(Residency):
    """Residency on ledgers alone; copies on the device take their time."""

    def __init__(
        self,
        device: BlockLedger,
        home: HomeTier | None,
        clock: VirtualClock,
        costs: DeviceCosts,
        *,
        copies_per_beam: bool,
        log: Timeline | None = None,
    ) -> None:
        super().__init__(device, home, copies_per_beam=copies_per_beam, log=log)
        self._clock, self._costs = clock, costs

    def copy_on_device(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """See `kv.Residency`."""
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


class Prefill:
    """Computes the KV of several tokens behind stored paths; see `models.TreeModel.prefill`."""

    def __init__(
        self, residency: SimulatedResidency, clock: VirtualClock, costs: DeviceCosts
    ) -> None:
        self._residency, self._clock, self._costs = residency, clock, costs
        residency.recompute_segments = self._recompute

    def run(self, requests: Sequence[PrefillRequest]) -> None:
        """Count the tokens of each request.

        Raises:
            CapacityError: if the KV budget cannot hold the new segments.
        """
        residency = self._residency
        offset = 0
        longest = max((len(request.token_ids) for request in requests), default=0)
        while offset < longest:
            for batch in self._batches(requests, offset):
                mine = [requests[i] for i in batch]
                with residency.lease(self._needs(mine)) as lease:
                    lease.add({request.segment: 1 for request in mine})
                    self._forward(mine, [_chunk_length(r, offset) for r in mine])
            offset += PREFILL_CHUNK_TOKENS
        if residency.outgrown:
            residency.write_back(request.segment for request in requests)

    def _forward(self, requests: Sequence[PrefillRequest], lengths: Sequence[int]) -> None:
        num_tokens, seen = sum(lengths), 0
        for request, length in zip(requests, lengths, strict=True):
            before = sum(part.visible for part in request.path) + request.segment.length
            seen += length * before + length * (length + 1) // 2
        read = sum(segment.length for segment in self._needs(requests)) + num_tokens
        self._clock.advance(self._costs.prefill(num_tokens, read, seen))
        self._residency.append([request.segment for request in requests], lengths)

    def _batches(self, requests: Sequence[PrefillRequest], offset: int) -> Iterator[list[int]]:
        """Requests that still have tokens at `offset`, longest first, in bounded batches."""
        length = {
            i: _chunk_length(request, offset)
            for i, request in enumerate(requests)
            if len(request.token_ids) > offset
        }
        order = sorted(length, key=lambda i: -length[i])
        while order:
            rows = max(1, _BATCH_PADDED_TOKENS // padded_rows(length[order[0]]))
            batch = order[:rows]
            while len(batch) > 1 and not self._fits([requests[i] for i in batch], length, batch):
                batch = batch[: len(batch) // 2]
            yield batch
            order = order[len(batch) :]

    def _fits(
        self, mine: Sequence[PrefillRequest], length: dict[int, int], batch: Sequence[int]
    ) -> bool:
        if not self._residency.evicts:
            return True
        grown = {r.segment: r.segment.length + length[i] for r, i in zip(mine, batch, strict=True)}
        return self._residency.fits(self._needs(mine), grown)

    def _needs(self, requests: Sequence[PrefillRequest]) -> dict[Segment, int]:
        paths = [visible_path(r.path, r.segment, r.segment.length) for r in requests]
        return copies_needed(paths, per_beam=self._residency.copies_per_beam)

    def _recompute(self, lost: Sequence[Segment]) -> None:
        """Compute the KV of evicted segments again, level by level."""
        requests = [
            PrefillRequest(source.path, segment, source.token_ids, source.start)
            for segment in lost
            if (source := segment.source) is not None
        ]
        if len(requests) != len(lost):
            raise AssertionError("a lost segment does not know its tokens")
        requests.sort(key=lambda request: len(request.path))
        for _, level in groupby(requests, key=lambda request: len(request.path)):
            self.run(list(level))


def _chunk_length(request: PrefillRequest, offset: int) -> int:
    return min(len(request.token_ids) - offset, PREFILL_CHUNK_TOKENS)
