"""Compute the KV bytes that beams share and that a group of beams needs; order KV for eviction.

The input is a `KVDemand` (the KV segments of a round's beams); no device and no policy is involved.
All formulas rely on depth-first order: two beams share the minimum of what neighbouring beams
between them share. So the distinct bytes of consecutive beams are a difference of two prefix sums.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import TypeVar

from beamwright.protocols import KVDemand


class Forest:
    """KV bytes of a round per beam, from a `KVDemand` whose beams are in depth-first order.

    growth_bytes, capacity_bytes, copy_per_beam: the same as in the demand.
    path_bytes: per beam, the bytes of all KV on its path.
    shared_bytes: per beam, the bytes that the beam shares with the previous beam; 0 for the first.
    resident_path_bytes, resident_shared_bytes: the same two lists, counting only KV on the device.
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
        """Return the device bytes that `beam` needs alone, the KV of its step included."""
        return self.path_bytes[beam] + self.growth_bytes[beam]

    def needed_bytes(self, start: int, end: int) -> int:
        """Return the device bytes that beams `start` to `end - 1` need as one group, in O(1).

        The KV that they write in their step is included.
        """
        if start >= end:
            return 0
        first = 0 if self.copy_per_beam else self.shared_bytes[start]
        return self._before[end] - self._before[start] + first


class Overlap:
    """KV bytes that each beam shares with a group, updated while beams are added to the group.

    overlap_bytes: per beam, the bytes of its longest prefix that a beam of the group also has.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.overlap_bytes = [0] * len(forest)

    def add(self, beam: int) -> list[int]:
        """Add `beam` to the group, and return the beams whose overlap has grown, `beam` first.

        The walk goes from `beam` to lower and to higher numbers. In each direction it stops at the
        first beam that shares at least as much with an earlier member of the group: all beams
        beyond it also share at least as much with that member.
        """
        overlap, shared = self.overlap_bytes, self._forest.shared_bytes
        own = overlap[beam] = self._forest.path_bytes[beam]
        changed = [beam]
        # Pairs of a beam and the bytes that it shares with its neighbour nearer to `beam`.
        after = ((other, shared[other]) for other in range(beam + 1, len(overlap)))
        before = ((other, shared[other + 1]) for other in range(beam - 1, -1, -1))
        for outwards in (after, before):
            common = own
            for other, with_nearer in outwards:
                common = min(common, with_nearer)
                if overlap[other] >= common:
                    break
                overlap[other] = common
                changed.append(other)
        return changed


def _cumulative(demand: KVDemand) -> tuple[list[int], list[int]]:
    """Return two lists per segment: bytes of the path down to it, and those on the device."""
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
    """Return per beam the deepest segment that it shares with the previous beam; None: none."""
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
    """Return KV `candidates` in the order of eviction, the first to be evicted first.

    Candidates that no later group of this round uses come first. Among them, those that the host
    already stores precede those that must be written back: many of the latter are about to be
    pruned. Each kind is in least-recently-used order, because the next round runs in the opposite
    order and needs the most recently used KV first.

    Candidates that a later group uses follow, the farthest use first (Belady). Ties go to the least
    recently used candidate, then to the given order.

    Args:
        next_use: number of groups until the next use (1: the next group); keys without a next use
            are absent.
        last_use: time of the last use, as a growing counter; an absent key counts as the oldest.
        stored: candidates that the host already stores.
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
