"""Planner `ranges`: cut the beams, in depth-first order, into groups that fit the device.

The planner minimises three costs, in this order:

1. the number of groups, because every group reads the weights again,
2. the KV bytes loaded over the link, given the KV that is on the device,
3. the size of the largest group, because free memory lets the next group be prefetched.

A sweep runs the groups from one end of the order to the other and loads every segment (the KV of
one node) at most once (`Sweep`). But a sweep may evict KV in the middle of the order before its
use. The planner then also tries other orders of the same groups that begin in the middle.

Segments that the same groups use are treated alike. So bytes are counted per class (first group,
last group), not per segment. The model may evict a class in part; this differs from evicting whole
segments by less than one segment per group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

from beamwright.schedule.forest import Forest

# With more groups than this, only the two sweeps are rated: rating the orders of `inner_orders`
# takes O(groups ** 3) time.
_MOST_ROTATED_GROUPS = 6
# With at most this many groups, `inner_orders` returns every permutation.
_ALL_ORDERS = 4
# Other orders are rated if the sweeps evict more than this fraction of all KV before its use.
_TOLERATED_LOSS = 0.01

# The groups in the order in which they run, and the KV bytes that they load. The bytes of an order
# that is no sweep are an estimate, with an error of less than one segment per group.
GroupOrder = tuple[list[range], int]


def plan_ranges(
    forest: Forest, *, balance: bool = True, max_batch: int | None = None
) -> list[range]:
    """Return the groups as ranges of beam numbers, in running order.

    The forest must have at least one beam. A beam larger than the capacity is a group of its own.

    Args:
        balance: make groups even; False packs every group to capacity.
        max_batch: maximum number of beams of a group; None for no limit.
    """
    union = sum(forest.path_bytes) - sum(forest.shared_bytes)
    resident = sum(forest.resident_path_bytes) - sum(forest.resident_shared_bytes)
    candidates: list[GroupOrder] = []
    for backwards in (False, True):
        sweep = Sweep(forest, backwards=backwards, max_batch=max_batch)
        ends = sweep.group_ends(balance=balance)
        candidates.append((sweep.ranges(ends), union - sweep.surviving_bytes(ends)))
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
        return loaded, max(forest.needed_bytes(group.start, group.stop) for group in groups)

    return min(candidates, key=cost)[0]


@dataclass(frozen=True)
class SharedBytes:
    """A class of KV: the bytes that exactly the groups `first` to `last` use.

    resident_bytes: those of `total_bytes` that are on the device before the round.
    """

    first: int
    last: int
    total_bytes: int
    resident_bytes: int


def inner_orders(num_groups: int) -> list[tuple[int, ...]]:
    """Return the orders of groups to try, as permutations of their numbers.

    For few groups these are all orders. Otherwise an order starts at any group, continues to one
    end, and then runs the remaining groups in either direction.
    """
    if num_groups <= _ALL_ORDERS:
        return list(permutations(range(num_groups)))
    orders: dict[tuple[int, ...], None] = {}
    for begin in range(num_groups):
        below, above = range(begin), range(begin + 1, num_groups)
        for first, rest in ((above, below), (below[::-1], above)):
            orders[(begin, *first, *rest)] = None
            orders[(begin, *first, *rest[::-1])] = None
    return list(orders)


def shared_classes(forest: Forest, ranges: Sequence[range]) -> list[SharedBytes]:
    """Return the KV of `ranges`, divided into classes by the groups that use it."""
    totals = _covered_bytes(ranges, forest.path_bytes, forest.shared_bytes)
    residents = _covered_bytes(ranges, forest.resident_path_bytes, forest.resident_shared_bytes)
    num_groups = len(ranges)
    classes = []
    for first in range(num_groups):
        for last in range(first, num_groups):
            total = _exact_bytes(totals, first, last)
            if total:
                classes.append(
                    SharedBytes(first, last, total, _exact_bytes(residents, first, last))
                )
    return classes


def estimated_loads(
    forest: Forest, ranges: Sequence[range], classes: Sequence[SharedBytes], order: Sequence[int]
) -> int:
    """Return the estimated KV bytes loaded over the link if the groups run in `order`.

    Free memory keeps the KV that is needed soonest.
    """
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
        room = max(0, forest.capacity_bytes - forest.needed_bytes(where.start, where.stop))
        for _, key in sorted(waiting):
            held[key] = min(held[key], room)
            room -= held[key]
    return loaded


Covers = dict[tuple[int, int], int]


def _covered_bytes(ranges: Sequence[range], paths: Sequence[int], shared: Sequence[int]) -> Covers:
    """Return for each pair (i, j) the KV bytes that all groups from i to j use.

    For i == j these are the distinct bytes of the group. Otherwise they are the minimum that
    neighbouring beams share, from the last beam of group i to the first beam of group j.

    Args:
        paths: path bytes per beam.
        shared: bytes that each beam shares with the previous beam.
    """
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


def _exact_bytes(covers: Covers, first: int, last: int) -> int:
    """Return the bytes that exactly the groups `first` to `last` use (inclusion-exclusion)."""
    return (
        covers[first, last]
        - covers.get((first - 1, last), 0)
        - covers.get((first, last + 1), 0)
        + covers.get((first - 1, last + 1), 0)
    )


# --- cutting along the order --------------------------------------------------------------------


_STEPS = 1 << 10  # bisection finds limits to within 1 / _STEPS of the largest limit


class Sweep:
    """A run over all beams in depth-first order, forwards or backwards, cut into groups.

    Only consecutive groups share a segment, so each segment is loaded at most once. The cuts decide
    only how many bytes on the device survive until their first use. With prefix sums in the running
    direction,

        need(start, end) = until[end] - offset[start]
        survivors        = min over groups of (resident[end] + capacity - need)

    because a group leaves `capacity - need` bytes to KV that waits for a later group, and KV with
    the nearest first use is evicted last. Both numbers are monotone in start and end. Under any
    limits on the two, the largest possible group is therefore optimal, and bisection finds the best
    limits. This gives
    the exact optimum without a table over all ranges.

    Positions count beams in the running direction. An end is the position after the last beam of a
    group.
    """

    def __init__(
        self, forest: Forest, *, backwards: bool = False, max_batch: int | None = None
    ) -> None:
        self._backwards, self._size = backwards, len(forest)
        self._capacity, self._max_batch = forest.capacity_bytes, max_batch or len(forest)
        way = slice(None, None, -1 if backwards else 1)

        def running(shared: Sequence[int]) -> list[int]:
            """Return the bytes that each beam shares with the beam that runs before it."""
            return [0, *shared[1:][way]]

        shared = running(forest.shared_bytes)
        fresh = _minus(forest.path_bytes[way], [] if forest.copy_per_beam else shared)
        self._until = [0, *accumulate(map(int.__add__, fresh, forest.growth_bytes[way]))]
        self._offset = self._until if forest.copy_per_beam else _minus(self._until, shared)
        resident = _minus(forest.resident_path_bytes[way], running(forest.resident_shared_bytes))
        self._resident = [0, *accumulate(resident)]
        self._waiting = _minus(self._until, self._resident)

    # --- limits ------------------------------------------------------------------------------

    def group_ends(self, *, balance: bool) -> list[int]:
        """Return the ends of the fewest groups that fit the device.

        With `balance`, they also load the fewest bytes and are as even as possible.
        """
        ends = self._ends_within(self._capacity, 0, self._size)
        assert ends is not None, "without limits every beam finds a group"
        if not balance or len(ends) <= 1:
            return ends
        most = len(ends)
        bound = min(self._capacity, self._until[-1])
        step = max(1, bound // _STEPS)
        keep = _largest(self._resident[-1], step, lambda keep: self._ends_within(bound, keep, most))
        spare = _largest(bound, step, lambda spare: self._ends_within(bound - spare, keep, most))
        return self._even_ends(bound - spare, keep, most)

    def surviving_bytes(self, ends: list[int]) -> int:
        """Return how many bytes on the device are not evicted before their first use.

        ends: the ends of the groups. The result is exact to one segment per group.
        """
        kept = self._resident[-1]
        start = 0
        for end in ends:
            room = max(0, self._capacity - self._until[end] + self._offset[start])
            kept = min(kept, self._resident[end] + room)
            start = end
        return kept

    def ranges(self, ends: list[int]) -> list[range]:
        """Convert the ends of groups to ranges of beam numbers, in running order."""
        pairs = list(zip([0, *ends[:-1]], ends, strict=True))
        if self._backwards:
            return [range(self._size - end, self._size - start) for start, end in pairs]
        return [range(start, end) for start, end in pairs]

    # --- ends --------------------------------------------------------------------------------

    def _ends_within(self, largest: int, keep: int, most: int) -> list[int] | None:
        """Return the ends of at most `most` groups within the limits; None if there are none.

        The limits: a group needs at most `largest` bytes, and at least `keep` bytes on the device
        survive until their first use.
        """
        ends: list[int] = []
        start = 0
        while start < self._size:
            end = self._last_end(start, largest, keep)
            if end == start or len(ends) == most:
                return None
            ends.append(end)
            start = end
        return ends

    def _last_end(self, start: int, largest: int, keep: int) -> int:
        """Return the last end of a group from `start` within the limits; `start` if none exists."""
        offset = self._offset[start]
        end = min(
            bisect_right(self._until, offset + largest) - 1,
            bisect_right(self._waiting, offset + self._capacity - keep) - 1,
            start + self._max_batch,
        )
        if end > start:
            return end
        too_large = self._until[start + 1] - offset > self._capacity
        return start + 1 if too_large and self._resident[start + 1] >= keep else start

    def _first_start(self, end: int, largest: int, keep: int) -> int:
        """Return the first start of a group with end `end` within the limits; one must exist."""
        offset, until = self._offset, self._until[end]
        start = max(
            bisect_left(offset, until - largest, 0, end),
            bisect_left(offset, self._waiting[end] + keep - self._capacity, 0, end),
            end - self._max_batch,
        )
        return min(start, end - 1)

    def _even_ends(self, largest: int, keep: int, num_groups: int) -> list[int]:
        """Return the ends of `num_groups` groups within the limits, as even as possible.

        Smaller groups come first, because they leave free memory to prefetch the next group.
        """
        lows = [self._size]
        for _ in range(num_groups - 1):
            lows.append(self._first_start(lows[-1], largest, keep))
        ends: list[int] = []
        start = 0
        until = self._until
        for left in range(num_groups, 0, -1):
            share = until[start] + (until[-1] - until[start]) // left
            even = bisect_right(until, share) - 1
            low = max(lows[left - 1], start + 1)
            end = min(max(even, low), self._last_end(start, largest, keep))
            ends.append(end)
            start = end
        return ends


def _minus(values: list[int], others: list[int]) -> list[int]:
    """Return `values` minus `others` element by element; `others` may be shorter (missing: 0)."""
    return [*map(int.__sub__, values, others), *values[len(others) :]]


def _largest(bound: int, step: int, possible: Callable[[int], object]) -> int:
    """Return the largest value up to `bound` for which `possible` holds, to within `step`.

    `possible` must hold for 0, and for every value smaller than one for which it holds.
    """
    if possible(bound):
        return bound
    low, high = 0, bound
    while high - low > step:
        middle = (low + high) // 2
        if possible(middle):
            low = middle
        else:
            high = middle
    return low
