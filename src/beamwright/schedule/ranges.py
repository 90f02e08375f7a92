"""Groups as contiguous ranges of the depth-first order: fewest, then cheapest, then most even.

Knows the forest and the replay of loads. Weights are read again for every group, so the fewest
groups win; among those, the fewest bytes over the link, given what is resident; then the
smallest largest group, which leaves headroom to fetch the next one.

The two sweeps along the order load every segment at most once (`sweep`); orders that begin inside
it are tried where a sweep loses resident bytes. Candidates are rated by class of segments, and
replayed exactly where segments are few: there one segment is a large share of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

from beamwright.protocols import KVDemand
from beamwright.schedule.forest import Forest, loaded_bytes
from beamwright.schedule.rotation import estimated_loads, inner_orders, shared_classes
from beamwright.schedule.sweep import Sweep

_MOST_ROTATED_GROUPS = 6  # rating an order costs its groups cubed
_MOST_CUTS = 36  # up to so many, all cuts are tried
_MOST_REPLAYED_SEGMENTS = 1000  # segments times candidates that are replayed exactly
_TOLERATED_LOSS = 0.01  # of the union: less is not worth an order that begins inside


@dataclass(frozen=True)
class GroupOrder:
    """Groups in running order, and what they load to within a segment per group."""

    groups: tuple[range, ...]
    loaded_bytes: int


def plan_ranges(
    demand: KVDemand, forest: Forest, *, balance: bool = True, max_batch: int | None = None
) -> list[range]:
    """Ranges of beam numbers in the order in which they run.

    balance: False packs every group to capacity. A beam that does not fit is a group of its own.
    """
    num_beams = len(forest)
    if num_beams == 0:
        return []
    fits = forest.need(0, num_beams) <= forest.capacity_bytes
    if fits and num_beams <= (max_batch or num_beams):
        return [range(num_beams)]
    candidates = _sweeps(forest, balance=balance, max_batch=max_batch)
    num_groups = len(candidates[0].groups)
    least = _union_bytes(forest) - _resident_bytes(forest)
    loss = min(candidate.loaded_bytes for candidate in candidates) - least
    if 2 <= num_groups <= _MOST_ROTATED_GROUPS and loss > _TOLERATED_LOSS * _union_bytes(forest):
        partitions = [sorted(c.groups, key=lambda group: group.start) for c in candidates]
        if balance and comb(num_beams - 1, num_groups - 1) <= _MOST_CUTS:
            partitions = _all_cuts(forest, num_groups, max_batch)
        else:
            partitions += _aligned(forest, num_groups, balance=balance, max_batch=max_batch)
        distinct = [p for number, p in enumerate(partitions) if p not in partitions[:number]]
        candidates += [rated for groups in distinct for rated in _rotated(forest, groups)]
    return list(_best(demand, forest, candidates).groups)


def _union_bytes(forest: Forest) -> int:
    return sum(forest.path_bytes) - sum(forest.shared_bytes)


def _resident_bytes(forest: Forest) -> int:
    return sum(forest.resident_path_bytes) - sum(forest.resident_shared_bytes)


def _sweeps(forest: Forest, *, balance: bool, max_batch: int | None) -> list[GroupOrder]:
    """The best cut in either direction."""
    found = []
    for backwards in (False, True):
        sweep = Sweep(forest, 0, len(forest), backwards=backwards, max_batch=max_batch)
        ends = sweep.cut(balance=balance)
        loaded = _union_bytes(forest) - sweep.survivors(ends)
        found.append(GroupOrder(tuple(sweep.ranges(ends)), loaded))
    return found


def _aligned(
    forest: Forest, num_groups: int, *, balance: bool, max_batch: int | None
) -> list[list[range]]:
    """Cuts with a boundary where the longest run of mostly resident beams begins or ends."""
    found = []
    for edge in _resident_run(forest):
        if not 0 < edge < len(forest):
            continue
        halves = [
            Sweep(forest, 0, edge, backwards=True, max_batch=max_batch),
            Sweep(forest, edge, len(forest), max_batch=max_batch),
        ]
        left, right = (half.ranges(half.cut(balance=balance)) for half in halves)
        if len(left) + len(right) == num_groups:
            found.append([*left[::-1], *right])
    return found


def _all_cuts(forest: Forest, num_groups: int, max_batch: int | None) -> list[list[range]]:
    """Every cut into this many groups that fit."""
    found = []
    num_beams = len(forest)
    for inner in combinations(range(1, num_beams), num_groups - 1):
        groups = [range(*ends) for ends in pairwise((0, *inner, num_beams))]
        if all(
            len(group) == 1
            or (
                len(group) <= (max_batch or num_beams)
                and forest.need(group.start, group.stop) <= forest.capacity_bytes
            )
            for group in groups
        ):
            found.append(groups)
    return found


def _resident_run(forest: Forest) -> tuple[int, int]:
    """Start and end of the longest run of beams with more than half of their path resident."""
    best = (0, 0)
    start = 0
    pairs = zip(forest.resident_path_bytes, forest.path_bytes, strict=True)
    for beam, (resident, path) in enumerate(pairs):
        if 2 * resident <= path:
            start = beam + 1
        elif beam + 1 - start > best[1] - best[0]:
            best = (start, beam + 1)
    return best


def _rotated(forest: Forest, groups: Sequence[range]) -> list[GroupOrder]:
    """Other orders of these groups than the two sweeps."""
    classes = shared_classes(forest, groups)
    return [
        GroupOrder(
            tuple(groups[number] for number in order),
            estimated_loads(forest, groups, classes, order),
        )
        for order in inner_orders(len(groups))
    ]


def _best(demand: KVDemand, forest: Forest, candidates: Sequence[GroupOrder]) -> GroupOrder:
    """Fewest bytes, then the smallest largest group, then the first."""

    def largest(candidate: GroupOrder) -> int:
        return max(forest.need(group.start, group.stop) for group in candidate.groups)

    ranked = sorted(candidates, key=lambda c: (c.loaded_bytes, largest(c)))
    num_replayed = _MOST_REPLAYED_SEGMENTS // max(1, len(demand.parent))
    if num_replayed < 2:
        return ranked[0]
    return min(ranked[:num_replayed], key=lambda c: (loaded_bytes(demand, c.groups), largest(c)))
