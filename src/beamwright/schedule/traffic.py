"""What crosses the link when groups run in an order: exact bookkeeping, segment by segment.

Knows KVDemand and the eviction order. Segments are loaded and evicted whole. One copy of a segment
on the device is enough: further copies are made there, so they never use the link, and dropping a
spare one costs nothing. Growth is written back while it is decoded, so evicting it is free too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from beamwright.protocols import KVDemand
from beamwright.schedule.eviction import eviction_order


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
