"""Prefill scheduling: batches requests, and pins the segments that each batch needs on the device.

This code uses the cache manager but no tensors, so that the model (`tree_model`) and the lab's
simulator can share it. The order of leases (pins) decides which segments are evicted. The simulator
counts the same bytes on the link as the engine only if all leases are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import (
    Lease,
    Path,
    Segment,
    Source,
    append_own_segment,
    copies_needed,
    for_all_groups,
)
from beamwright.models.decoder import padded_rows

_BATCH_PADDED_TOKENS = 4096  # maximum number of tokens of a batch, after padding


@dataclass
class PrefillRequest:
    """Tokens whose KV is computed and appended to `segment`, the node after `path`.

    start: the position of the first token.
    read: indices of the tokens whose hidden states are returned, in order; None for all tokens.
    recomputes: True if the request recomputes KV that was evicted.
    stays: True if the segment outlives the request, so that writing it back to the host is useful.
    """

    path: Path
    segment: Segment
    token_ids: Sequence[int]
    start: int
    read: Sequence[int] | None = None
    recomputes: bool = False
    stays: bool = True

    def reads(self, offset: int, count: int) -> list[int]:
        """Return the tokens of `read` within [offset, offset + count), relative to `offset`."""
        if self.read is None:
            return list(range(count))
        return [token - offset for token in self.read if offset <= token < offset + count]


# Runs one batch. Arguments: the requests' indices, each request's next tokens (its chunk), and the
# offset of the chunks in their requests.
Forward = Callable[[list[int], list[Sequence[int]], int], None]


def prefill_in_batches(
    residency: CacheManager,
    requests: Sequence[PrefillRequest],
    chunk_tokens: int,
    forward: Forward,
    *,
    reads_written: bool = True,
) -> None:
    """Call `forward` for each batch of chunks, while the segments it uses are pinned on the device.

    A request's path may contain a segment that an earlier request writes. All requests form one
    batch if they fit, so that the weights are read once. Otherwise parents run before children.

    reads_written: True if attention can read KV that the same pass wrote for the same layer.

    Raises:
        CapacityError: if the KV budget cannot hold the new segments.
    """
    levels = _levels(requests)
    if len(levels) > 1 and reads_written and _is_one_batch(residency, requests, chunk_tokens):
        batches: Iterator[tuple[int, list[int]]] = iter([(0, list(chain(*levels)))])
    else:
        batches = _batches(residency, requests, levels, chunk_tokens)
    for offset, batch in batches:
        members = [requests[i] for i in batch]
        with residency.lease(prefill_needs(residency, members)) as lease:
            lease.add(for_all_groups({request.segment: 1 for request in members}))
            forward(batch, [r.token_ids[offset : offset + chunk_tokens] for r in members], offset)
        # Recomputed tokens are not counted here: the request that needs them has counted them.
        fresh = [] if offset else [request for request in members if not request.recomputes]
        num_tokens = sum(len(request.token_ids) for request in fresh)
        residency.count_tokens_read(request.path for request in fresh)
        residency.counts.needed_tokens += num_tokens
        residency.counts.prefilled_tokens += num_tokens
    if residency.outgrown:
        residency.write_back(request.segment for request in requests if request.stays)


def _levels(requests: Sequence[PrefillRequest]) -> list[list[int]]:
    """Group the requests' indices, so that parents are in an earlier level than their children."""
    place: dict[Segment, int] = {}
    levels: list[list[int]] = [[]]
    for number, request in enumerate(requests):
        above = (place[part.segment] for part in request.path if part.segment in place)
        level = place[request.segment] = 1 + max(above, default=-1)
        levels += [[]] * (level == len(levels))
        levels[level].append(number)
    return levels


def _is_one_batch(
    residency: CacheManager, requests: Sequence[PrefillRequest], chunk_tokens: int
) -> bool:
    """Return whether parents and children can be computed in the same pass.

    This is impossible with recurrent states, which are written at the end of a pass, and with a
    copy of KV for each beam, which is made when a path is read.
    """
    lengths = [len(request.token_ids) for request in requests]
    split = max(lengths) > chunk_tokens or sum(map(padded_rows, lengths)) > _BATCH_PADDED_TOKENS
    by_beam = residency.copies_per_beam or any(
        r.segment.group_segments[-1].group.state_blocks for r in requests
    )
    return not split and not by_beam and _fits(residency, requests, lengths)


def prefill_needs(
    residency: CacheManager, requests: Sequence[PrefillRequest]
) -> dict[Segment, int]:
    """Return the segments that the requests read, each with its number of copies on the device."""
    paths = [append_own_segment(r.path, r.segment, r.segment.length) for r in requests]
    return copies_needed(paths, per_beam=residency.copies_per_beam)


def record_source(request: PrefillRequest, token_ids: Sequence[int]) -> None:
    """Record in the segment from which tokens its KV was computed, for recomputation."""
    known = request.segment.source or Source(request.path, (), request.start)
    tokens = (*known.token_ids, *token_ids)
    request.segment.source = Source(known.path, tokens, known.start)


def _add_lost_ancestors(lost: Sequence[Segment]) -> list[Segment]:
    """Add to evicted segments the ancestors whose recurrent states must be recomputed first.

    The search for ancestors ends at the first one whose state still exists.
    """
    ordered = dict.fromkeys(lost)
    for segment in lost:
        source = segment.source
        while source is not None and source.path:
            before = source.path[-1].segment
            state, source = before.group_segments[-1], before.source
            if not state.group.state_blocks or state.resident or state.stored:
                break
            ordered[before] = None
    return list(ordered)


def recompute(store: CacheManager, lost: Sequence[Segment], run: Callable[..., object]) -> None:
    """Recompute evicted segments, and recurrent states before them; parents come first.

    Each lost segment is computed into a new one, which replaces the evicted parts at the end. So
    running out of blocks loses no KV, and layer groups that were not evicted stay readable.

    lost: the evicted segments. run: prefills a list of requests.
    """
    requests = list[PrefillRequest]()
    for segment in _add_lost_ancestors(lost):
        source = segment.source
        assert source is not None, "a lost segment does not know its tokens"
        tokens = source.token_ids, source.start
        requests.append(PrefillRequest(source.path, segment, *tokens, read=(), recomputes=True))
    requests.sort(key=lambda request: len(request.path))
    for _, members in groupby(requests, key=lambda request: len(request.path)):
        level = list(members)
        twins = [replace(request, segment=store.create()) for request in level]
        try:
            # Pinned, so that no twin evicts another.
            with Lease(for_all_groups({twin.segment: 1 for twin in twins})):
                run(twins)
                for request, twin in zip(level, twins, strict=True):
                    store.adopt_blocks(request.segment, twin.segment)
        finally:
            for twin in twins:
                store.free(twin.segment)


def _batches(
    residency: CacheManager,
    requests: Sequence[PrefillRequest],
    levels: Iterable[Sequence[int]],
    chunk_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (offset, indices of requests) for each batch, level by level and chunk by chunk.

    offset: the first token of the batch's chunks, relative to their requests. Requests with the
    most remaining tokens come first. A batch has at most `_BATCH_PADDED_TOKENS` padded tokens and
    fits the KV budget, or it has one request.
    """
    for level in levels:
        longest = max((len(requests[i].token_ids) for i in level), default=0)
        for offset in range(0, longest, chunk_tokens):
            left = {i: min(len(requests[i].token_ids) - offset, chunk_tokens) for i in level}
            order = sorted((i for i in level if left[i] > 0), key=lambda i: -left[i])
            while order:
                batch = order[: max(1, _BATCH_PADDED_TOKENS // padded_rows(left[order[0]]))]
                while len(batch) > 1:
                    members = [requests[i] for i in batch]
                    if _fits(residency, members, [left[i] for i in batch]):
                        break
                    batch = batch[: len(batch) // 2]
                yield offset, batch
                order = order[len(batch) :]


def _fits(
    residency: CacheManager, members: Sequence[PrefillRequest], lengths: Sequence[int]
) -> bool:
    if not residency.evicts:
        # Nothing can be evicted between batches, so smaller ones need as much KV in the end.
        return True
    pairs = zip(members, lengths, strict=True)
    grown = {request.segment: request.segment.length + length for request, length in pairs}
    return residency.fits(prefill_needs(residency, members), grown)
