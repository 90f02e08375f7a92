"""Orders of groups that do not begin at an end, for when what is resident lies in the middle.

Knows the forest. Segments that the same neighbouring groups use behave alike, so bytes are kept
per class (first group, last group) rather than per segment; a class may be evicted in part, which
differs from whole segments by less than one segment per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from beamwright.schedule.forest import Forest

_ALL_ORDERS = 4  # groups of which every order is tried


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
        union = sum(paths[beam] - shared[beam] for beam in inner) + paths[where.start]
        covers[first, first] = union
        common = union
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
