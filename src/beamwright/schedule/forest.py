"""Bytes along the paths of a round's beams: what they share, and what a group needs.

Knows KVDemand and arithmetic; no device, no policy. All of it rests on depth-first order: what
two beams share is the least that neighbours share anywhere between them, so the union of a
contiguous range is a difference of two prefix sums. The order in which KV leaves the device stands
here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import TypeVar

from beamwright.protocols import KVDemand


class Forest:
    """A `KVDemand` seen beam by beam; the beams must be in depth-first order.

    path_bytes: per beam, the bytes of the segments that it reads.
    shared_bytes: per beam, the bytes that it shares with the beam before it; 0 for the first.
    growth_bytes, capacity_bytes, copy_per_beam: as in the demand.
    resident_path_bytes, resident_shared_bytes: the same, counting resident segments only.
    """

    def __init__(self, demand: KVDemand) -> None:
        self.growth_bytes: Sequence[int] = demand.growth_bytes
        self.capacity_bytes = demand.capacity_bytes
        self.copy_per_beam = demand.copy_per_beam
        total, resident = _cumulative(demand)
        shared = _shared_segments(demand)
        self.path_bytes = [0 if s is None else total[s] for s in demand.leaf]
        self.shared_bytes = [0 if s is None else total[s] for s in shared]
        self.resident_path_bytes = [0 if s is None else resident[s] for s in demand.leaf]
        self.resident_shared_bytes = [0 if s is None else resident[s] for s in shared]
        fresh = [
            path + growth - (0 if self.copy_per_beam else common)
            for path, common, growth in zip(
                self.path_bytes, self.shared_bytes, self.growth_bytes, strict=True
            )
        ]
        self._before = [0, *accumulate(fresh)]

    def __len__(self) -> int:
        return len(self.path_bytes)

    def beam_bytes(self, beam: int) -> int:
        """What `beam` needs when it is a group of its own, growth included."""
        return self.path_bytes[beam] + self.growth_bytes[beam]

    def need(self, start: int, end: int) -> int:
        """Device bytes of the beams `start` to `end - 1` as one group, growth included. O(1)."""
        if start >= end:
            return 0
        first = 0 if self.copy_per_beam else self.shared_bytes[start]
        return self._before[end] - self._before[start] + first


class Overlap:
    """What every beam shares with the union of a growing set of beams.

    overlap_bytes: per beam, the bytes on the path to its deepest ancestor that the set reads.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.overlap_bytes = [0] * len(forest)

    def add(self, beam: int) -> list[int]:
        """Put `beam` into the set; returns the beams whose overlap has grown, itself first.

        Going outwards, the first beam that shares no less with an earlier member ends the walk:
        whatever lies beyond it shares no less with that member either.
        """
        overlap, shared = self.overlap_bytes, self._forest.shared_bytes
        own = overlap[beam] = self._forest.path_bytes[beam]
        grown = [beam]
        # Of each neighbour, what it shares with the one nearer to the beam.
        after = ((other, shared[other]) for other in range(beam + 1, len(overlap)))
        before = ((other, shared[other + 1]) for other in range(beam - 1, -1, -1))
        for outwards in (after, before):
            common = own
            for other, with_nearer in outwards:
                common = min(common, with_nearer)
                if overlap[other] >= common:
                    break
                overlap[other] = common
                grown.append(other)
        return grown


def _cumulative(demand: KVDemand) -> tuple[list[int], list[int]]:
    """Per segment, the bytes of its whole path, and of the resident part of it."""
    total: list[int] = []
    resident: list[int] = []
    add_total, add_resident = total.append, resident.append
    for parent, size, copies in zip(
        demand.parent, demand.segment_bytes, demand.resident, strict=True
    ):
        if parent is None:
            add_total(size)
            add_resident(size if copies else 0)
        else:
            add_total(total[parent] + size)
            add_resident(resident[parent] + size if copies else resident[parent])
    return total, resident


def _shared_segments(demand: KVDemand) -> list[int | None]:
    """Per beam, the deepest segment that the beam before it reads too."""
    parents = demand.parent
    seen = bytearray(len(parents))
    shared: list[int | None] = []
    for leaf in demand.leaf:
        segment = leaf
        while segment is not None and not seen[segment]:
            seen[segment] = 1
            segment = parents[segment]
        shared.append(segment)
    return shared


K = TypeVar("K", bound=Hashable)


def eviction_order(
    candidates: Iterable[K],
    next_use: Mapping[K, int],
    last_use: Mapping[K, int],
    stored: Collection[K] = (),
) -> list[K]:
    """Candidates, the first to be evicted first.

    First those that the rest of the round does not use: what the host holds already, then what
    would have to be stored, much of which is about to be pruned; least recently used first, as the
    next round runs in the opposite order, so what was used last is wanted first. Then the others,
    farthest use first. Ties go to the least recently used, then to the order given.

    next_use: groups until the next use (1: the next group); absent if there is none.
    last_use: a tick that grows; absent if never used, which counts as before all ticks.
    stored: what the host holds.
    """
    keys = list(candidates)
    if last_use:
        keys.sort(key=lambda key: last_use.get(key, -inf))
    wanted = [key for key in keys if key in next_use] if next_use else []
    wanted.sort(key=next_use.__getitem__, reverse=True)
    unused = [key for key in keys if key not in next_use] if wanted else keys
    if stored:
        unused.sort(key=lambda key: key not in stored)
    return unused + wanted
