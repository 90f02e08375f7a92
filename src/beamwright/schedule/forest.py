"""Bytes along the paths of a round's beams: what they share, what a group needs, what is loaded.

Knows KVDemand and arithmetic; no device, no policy. All of it rests on depth-first order: what
two beams share is the least that neighbours share anywhere between them, so the union of a
contiguous range is a difference of two prefix sums. The order in which KV leaves the device stands
here, too (`--victims`: `eviction_order` is tree, `least_recent_order` lru, `cheapest_order` cost),
and the exact bookkeeping of what crosses the link when groups run in an order. Segments are loaded
and evicted whole. One copy of a segment on the device is enough: further copies are made there, so
they never use the link. Growth is written back while it is decoded, so evicting it is free too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    def common_bytes(self, left: int, right: int) -> int:
        """Bytes of the segments that both beams read; `left` comes first."""
        if left == right:
            return self.path_bytes[left]
        return min(self.shared_bytes[left + 1 : right + 1])


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
        own = self._forest.path_bytes[beam]
        overlap[beam] = own
        grown = [beam]
        common = own
        for other in range(beam + 1, len(overlap)):
            common = min(common, shared[other])
            if overlap[other] >= common:
                break
            overlap[other] = common
            grown.append(other)
        common = own
        for other in range(beam - 1, -1, -1):
            common = min(common, shared[other + 1])
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


def least_recent_order(
    candidates: Iterable[K], last_touch: Mapping[K, int], start: Mapping[K, int]
) -> list[K]:
    """vLLM's order: least recently used first; of those, the one behind the longest prefix.

    last_touch: a tick that grows. start: tokens before it in its path.
    """
    return sorted(candidates, key=lambda key: (last_touch[key], -start[key]))


def cheapest_order(
    order: Sequence[K], next_use: Mapping[K, int], return_cost: Mapping[K, float]
) -> list[K]:
    """What the rest of the round does not use, then the others; of each the cheapest first.

    order: decides between those that cost the same. return_cost: of having it again, per block.
    """
    return sorted(order, key=lambda key: (key in next_use, return_cost[key]))


@dataclass(frozen=True)
class RoundTraffic:
    """Outcome of a round.

    loaded_bytes: what crossed the link towards the device.
    resident: per segment, whether the device holds it at the end.
    grown_resident: per beam, whether the device still holds what its step wrote.
    """

    loaded_bytes: int
    resident: tuple[bool, ...]
    grown_resident: tuple[bool, ...]


def loaded_bytes(demand: KVDemand, groups: Sequence[Sequence[int]]) -> int:
    """Bytes that cross the link when the groups (of beam numbers) run in this order."""
    return replay(demand, groups).loaded_bytes


def replay(demand: KVDemand, groups: Sequence[Sequence[int]]) -> RoundTraffic:
    """Run the groups and keep count. A beam's growth has the key `number of segments + beam`."""
    num_segments = len(demand.parent)
    sizes = [*demand.segment_bytes, *demand.growth_bytes]
    reads = [_reads(demand, group) for group in groups]
    needs = _needs(demand, groups, reads)
    later_uses = _uses(reads)
    held = {segment: 0 for segment in range(num_segments) if demand.resident[segment]}
    next_use = {segment: uses[-1] for segment, uses in later_uses.items()}
    loaded = 0
    for number, group in enumerate(groups):
        for segment in reads[number]:
            if held.pop(segment, None) is None:
                loaded += sizes[segment]
            later_uses[segment].pop()
            if later_uses[segment]:
                next_use[segment] = later_uses[segment][-1]
            else:
                del next_use[segment]
        _evict(held, sizes, demand.capacity_bytes - needs[number], next_use)
        # Of equal age, growth goes first: most of it is pruned before the next round.
        grown = [num_segments + beam for beam in group]
        held.update(dict.fromkeys([*grown, *reads[number]], number + 1))
    return RoundTraffic(
        loaded,
        tuple(segment in held for segment in range(num_segments)),
        tuple(num_segments + beam in held for beam in range(len(demand.leaf))),
    )


def _reads(demand: KVDemand, group: Sequence[int]) -> dict[int, None]:
    """Segments that a group reads, each once."""
    parents = demand.parent
    found: dict[int, None] = {}
    for beam in group:
        segment = demand.leaf[beam]
        while segment is not None and segment not in found:
            found[segment] = None
            segment = parents[segment]
    return found


def _needs(
    demand: KVDemand, groups: Sequence[Sequence[int]], reads: Sequence[Iterable[int]]
) -> list[int]:
    """Device bytes of each group while it runs."""
    size, growth = demand.segment_bytes, demand.growth_bytes
    if not demand.copy_per_beam:
        pairs = zip(groups, reads, strict=True)
        return [sum(map(size.__getitem__, r)) + sum(growth[b] for b in g) for g, r in pairs]
    paths: list[int] = []
    for parent, num_bytes in zip(demand.parent, size, strict=True):
        paths.append(num_bytes + (0 if parent is None else paths[parent]))
    leaves = demand.leaf
    return [
        sum(growth[b] + (0 if (leaf := leaves[b]) is None else paths[leaf]) for b in group)
        for group in groups
    ]


def _uses(reads: Sequence[Iterable[int]]) -> dict[int, list[int]]:
    """Per segment, the numbers of the groups that read it, the last one first."""
    uses: dict[int, list[int]] = {}
    for number in range(len(reads) - 1, -1, -1):
        for segment in reads[number]:
            uses.setdefault(segment, []).append(number)
    return uses


def _evict(
    held: dict[int, int], sizes: Sequence[int], room_bytes: int, next_use: dict[int, int]
) -> None:
    """Drop keys from `held` (key: tick of its last use) until the rest fits `room_bytes`."""
    held_bytes = sum(map(sizes.__getitem__, held))
    if held_bytes <= room_bytes:
        return
    for key in eviction_order(held, next_use, held):
        if held_bytes <= room_bytes:
            return
        held_bytes -= sizes[key]
        del held[key]
