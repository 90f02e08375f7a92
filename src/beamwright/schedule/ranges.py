"""Groups as contiguous ranges of the depth-first order: fewest, then cheapest, then most even.

Knows the forest. Weights are read again for every group, so the fewest groups win; among those, the
fewest bytes over the link, given what is resident; then the smallest largest group, which leaves
headroom to fetch the next one.

The two sweeps along the order load every segment at most once (`sweep`). Where they lose resident
bytes, which lie in the middle then, orders of the same groups that begin inside are tried. Segments
that the same neighbouring groups use behave alike, so bytes are kept per class (first group, last
group) rather than per segment; a class may be evicted in part, which differs from whole segments by
less than one segment per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from beamwright.schedule.forest import Forest
from beamwright.schedule.sweep import Sweep

_MOST_ROTATED_GROUPS = 6  # rating an order costs its groups cubed
_ALL_ORDERS = 4  # groups of which every order is tried
_TOLERATED_LOSS = 0.01  # of the union: less is not worth an order that begins inside

GroupOrder = tuple[list[range], int]
"""Groups in running order, and the bytes that they load to within a segment per group."""


def plan_ranges(
    forest: Forest, *, balance: bool = True, max_batch: int | None = None
) -> list[range]:
    """Ranges of beam numbers, of one at least, in the order in which they run.

    balance: False packs every group to capacity. A beam that does not fit is a group of its own.
    """
    union = sum(forest.path_bytes) - sum(forest.shared_bytes)
    resident = sum(forest.resident_path_bytes) - sum(forest.resident_shared_bytes)
    candidates: list[GroupOrder] = []
    for backwards in (False, True):
        sweep = Sweep(forest, backwards=backwards, max_batch=max_batch)
        ends = sweep.cut(balance=balance)
        candidates.append((sweep.ranges(ends), union - sweep.survivors(ends)))
    num_groups = len(candidates[0][0])
    loss = min(loaded for _, loaded in candidates) - (union - resident)
    if 2 <= num_groups <= _MOST_ROTATED_GROUPS and loss > _TOLERATED_LOSS * union:
        cuts = [sorted(groups, key=lambda group: group.start) for groups, _ in candidates]
        for groups in cuts[:1] if cuts[0] == cuts[1] else cuts:
            classes = shared_classes(forest, groups)
            for order in inner_orders(num_groups):
                loaded = estimated_loads(forest, groups, classes, order)
                candidates.append(([groups[number] for number in order], loaded))

    def cost(candidate: GroupOrder) -> tuple[int, int]:
        groups, loaded = candidate
        return loaded, max(forest.need(group.start, group.stop) for group in groups)

    return min(candidates, key=cost)[0]


@dataclass(frozen=True)
class Shared:
    """Segments that exactly the groups `first` to `last` use: all bytes, and those resident."""

    first: int
    last: int
    total_bytes: int
    resident_bytes: int


def inner_orders(num_groups: int) -> list[tuple[int, ...]]:
    """Orders to try: all of few groups; else on from any group, then the rest either way."""
    if num_groups <= _ALL_ORDERS:
        return list(permutations(range(num_groups)))
    found: dict[tuple[int, ...], None] = {}
    for begin in range(num_groups):
        below, above = range(begin), range(begin + 1, num_groups)
        for first, rest in ((above, below), (below[::-1], above)):
            found[(begin, *first, *rest)] = None
            found[(begin, *first, *rest[::-1])] = None
    return list(found)


def shared_classes(forest: Forest, ranges: Sequence[range]) -> list[Shared]:
    """Who shares what among groups that follow each other in depth-first order."""
    totals = _covers(ranges, forest.path_bytes, forest.shared_bytes)
    residents = _covers(ranges, forest.resident_path_bytes, forest.resident_shared_bytes)
    num_groups = len(ranges)
    found = []
    for first in range(num_groups):
        for last in range(first, num_groups):
            total = _exactly(totals, first, last)
            if total:
                found.append(Shared(first, last, total, _exactly(residents, first, last)))
    return found


def estimated_loads(
    forest: Forest, ranges: Sequence[range], classes: Sequence[Shared], order: Sequence[int]
) -> int:
    """Bytes that cross the link when the groups run in `order`."""
    held = [shared.resident_bytes for shared in classes]
    uses = [[n for n, g in enumerate(order) if c.first <= g <= c.last] for c in classes]
    loaded = 0
    for group in order:
        waiting: list[tuple[int, int]] = []
        for key, shared in enumerate(classes):
            if shared.first <= group <= shared.last:
                loaded += shared.total_bytes - held[key]
                held[key] = shared.total_bytes
                uses[key].pop(0)
            elif uses[key]:
                waiting.append((uses[key][0], key))
        where = ranges[group]
        room = max(0, forest.capacity_bytes - forest.need(where.start, where.stop))
        for _, key in sorted(waiting):
            held[key] = min(held[key], room)
            room -= held[key]
    return loaded


Covers = dict[tuple[int, int], int]


def _covers(ranges: Sequence[range], paths: Sequence[int], shared: Sequence[int]) -> Covers:
    """Bytes of the segments that all groups from i to j use: one group's union, or what the
    beams on both sides of all boundaries between them share."""
    covers: Covers = {}
    for first, where in enumerate(ranges):
        inner = range(where.start + 1, where.stop)
        common = sum(paths[beam] - shared[beam] for beam in inner) + paths[where.start]
        covers[first, first] = common
        for last in range(first + 1, len(ranges)):
            begin = where.stop if last == first + 1 else ranges[last - 1].start
            common = min(common, *shared[begin : ranges[last].start + 1])
            covers[first, last] = common
    return covers


def _exactly(covers: Covers, first: int, last: int) -> int:
    return (
        covers[first, last]
        - covers.get((first - 1, last), 0)
        - covers.get((first, last + 1), 0)
        + covers.get((first - 1, last + 1), 0)
    )
