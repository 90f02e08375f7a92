"""Prefill as a sequence of leased batches: which requests go together, what they hold meanwhile.

Knows residency, no tensors: the model and the simulator run this very code, since the order of
leases decides what is evicted, and bytes on the link are equal only if every lease is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Path, Segment, Source, copies_needed, visible_path
from beamwright.models.decoder import padded_rows

PREFILL_CHUNK_TOKENS = 256
_BATCH_PADDED_TOKENS = 4096


@dataclass
class PrefillRequest:
    """Tokens to append to `segment`, which follows `path`.

    start: position of the first token.
    read: which of the tokens' hidden states are wanted, in order; None for all of them.
    again: they had KV that has left the device.
    """

    path: Path
    segment: Segment
    token_ids: Sequence[int]
    start: int
    read: Sequence[int] | None = None
    again: bool = False

    def reads(self, offset: int, count: int) -> list[int]:
        """Which of the `count` tokens from `offset` on are read, counted from there."""
        if self.read is None:
            return list(range(count))
        return [token - offset for token in self.read if offset <= token < offset + count]


# Numbers of the requests, their next tokens, and how many came before those.
Forward = Callable[[list[int], list[Sequence[int]], int], None]


def prefill_in_batches(
    residency: CacheManager, requests: Sequence[PrefillRequest], chunk_tokens: int, forward: Forward
) -> None:
    """Call `forward` for every batch of chunks, with all that it reads and writes held.

    Raises:
        CapacityError: if the KV budget cannot hold the new segments.
    """
    longest = max((len(request.token_ids) for request in requests), default=0)
    for offset in range(0, longest, chunk_tokens):
        for batch in _batches(residency, requests, offset, chunk_tokens):
            mine = [requests[i] for i in batch]
            with residency.lease(prefill_needs(residency, mine)) as lease:
                lease.add({request.segment: 1 for request in mine})
                forward(batch, [r.token_ids[offset : offset + chunk_tokens] for r in mine], offset)
            if not offset:
                _count(residency, mine)
    if residency.outgrown:
        residency.write_back(request.segment for request in requests)


def _count(residency: CacheManager, requests: Sequence[PrefillRequest]) -> None:
    """Count what these needed. What is computed again is needed by whoever asked for it."""
    fresh = [request for request in requests if not request.again]
    residency.needed(request.path for request in fresh)
    num_tokens = sum(len(request.token_ids) for request in fresh)
    residency.counts.needed_tokens += num_tokens
    residency.counts.prefilled_tokens += num_tokens


def prefill_needs(
    residency: CacheManager, requests: Sequence[PrefillRequest]
) -> dict[Segment, int]:
    """Device copies of each segment that these requests read."""
    paths = [visible_path(r.path, r.segment, r.segment.length) for r in requests]
    return copies_needed(paths, per_beam=residency.copies_per_beam)


def remember(request: PrefillRequest, token_ids: Sequence[int]) -> None:
    """Note in the segment what these tokens' KV was computed from."""
    known = request.segment.source or Source(request.path, (), request.start)
    tokens = (*known.token_ids, *token_ids)
    request.segment.source = Source(known.path, tokens, known.start)


def recompute_levels(lost: Sequence[Segment]) -> list[list[PrefillRequest]]:
    """Requests that compute the KV of evicted segments again, level by level."""
    requests = [
        PrefillRequest(source.path, segment, source.token_ids, source.start, read=(), again=True)
        for segment in lost
        if (source := segment.source) is not None
    ]
    if len(requests) != len(lost):
        raise AssertionError("a lost segment does not know its tokens")
    requests.sort(key=lambda request: len(request.path))
    return [list(level) for _, level in groupby(requests, key=lambda request: len(request.path))]


def _batches(
    residency: CacheManager, requests: Sequence[PrefillRequest], offset: int, chunk_tokens: int
) -> Iterator[list[int]]:
    """Requests that still have tokens at `offset`, longest first, in bounded batches."""
    length = {
        i: min(len(request.token_ids) - offset, chunk_tokens)
        for i, request in enumerate(requests)
        if len(request.token_ids) > offset
    }

    def fits(batch: list[int]) -> bool:
        if not residency.evicts:
            return True  # a smaller batch would not help
        mine = [requests[i] for i in batch]
        grown = {requests[i].segment: requests[i].segment.length + length[i] for i in batch}
        return residency.fits(prefill_needs(residency, mine), grown)

    order = sorted(length, key=lambda i: -length[i])
    while order:
        rows = max(1, _BATCH_PADDED_TOKENS // padded_rows(length[order[0]]))
        batch = order[:rows]
        while len(batch) > 1 and not fits(batch):
            batch = batch[: len(batch) // 2]
        yield batch
        order = order[len(batch) :]
