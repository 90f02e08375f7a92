"""Cutting the beams into groups that follow each other along the depth-first order.

Knows the forest. Run in that order, or in its reverse, every segment is used by groups that follow
each other, so it crosses the link at most once; all that a cut decides is how much of what is
resident survives until its first use. With prefix sums in the running direction,

    need(start, end) = until[end] - offset[start]
    survivors        = min over groups of (resident[end] + capacity - need)

because a group leaves `capacity - need` to what waits, nearest first use kept longest. Both limits
are monotone in start and end, so the farthest possible jump is optimal under any limits, and the
limits themselves are found by bisection: the exact optimum without a table over all ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from beamwright.schedule.forest import Forest

_STEPS = 1 << 10  # limits are found to this part of what a group may need


class Sweep:
    """All beams, run forwards or backwards.

    Positions count in the running direction. Ends are positions after a group's last beam.
    """

    def __init__(
        self, forest: Forest, *, backwards: bool = False, max_batch: int | None = None
    ) -> None:
        self._backwards, self._size = backwards, len(forest)
        self._capacity, self._max_batch = forest.capacity_bytes, max_batch or len(forest)
        way = slice(None, None, -1 if backwards else 1)

        def running(shared: Sequence[int]) -> list[int]:
            """What each beam shares with the one that runs before it; nothing for the first."""
            return [0, *shared[1:][way]]

        shared = running(forest.shared_bytes)
        fresh = _less(forest.path_bytes[way], [] if forest.copy_per_beam else shared)
        self._until = [0, *accumulate(map(int.__add__, fresh, forest.growth_bytes[way]))]
        self._offset = self._until if forest.copy_per_beam else _less(self._until, shared)
        resident = _less(forest.resident_path_bytes[way], running(forest.resident_shared_bytes))
        self._resident = [0, *accumulate(resident)]
        self._waiting = _less(self._until, self._resident)

    # --- limits ------------------------------------------------------------------------------

    def cut(self, *, balance: bool) -> list[int]:
        """Ends of the fewest groups; balanced ones also load least, then are even in need."""
        ends = self._jumps(self._capacity, 0, self._size)
        assert ends is not None, "without limits every beam finds a group"
        if not balance or len(ends) <= 1:
            return ends
        most = len(ends)
        bound = min(self._capacity, self._until[-1])
        step = max(1, bound // _STEPS)
        keep = _largest(self._resident[-1], step, lambda keep: self._jumps(bound, keep, most))
        spare = _largest(bound, step, lambda spare: self._jumps(bound - spare, keep, most))
        return self._spread(bound - spare, keep, most)

    def survivors(self, ends: list[int]) -> int:
        """Resident bytes that are still there at their first use, to within one segment."""
        kept = self._resident[-1]
        start = 0
        for end in ends:
            room = max(0, self._capacity - self._until[end] + self._offset[start])
            kept = min(kept, self._resident[end] + room)
            start = end
        return kept

    def ranges(self, ends: list[int]) -> list[range]:
        """The groups as ranges of beam numbers, in running order."""
        pairs = list(zip([0, *ends[:-1]], ends, strict=True))
        if self._backwards:
            return [range(self._size - end, self._size - start) for start, end in pairs]
        return [range(start, end) for start, end in pairs]

    # --- jumps -------------------------------------------------------------------------------

    def _jumps(self, largest: int, keep: int, most: int) -> list[int] | None:
        """Ends of at most `most` groups that need at most `largest` and let `keep` survive."""
        ends: list[int] = []
        start = 0
        while start < self._size:
            end = self._farthest(start, largest, keep)
            if end == start or len(ends) == most:
                return None
            ends.append(end)
            start = end
        return ends

    def _farthest(self, start: int, largest: int, keep: int) -> int:
        """The last possible end of a group from `start`; `start` itself if there is none."""
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

    def _nearest(self, end: int, largest: int, keep: int) -> int:
        """The first possible start of a group until `end`, where there is one."""
        offset, until = self._offset, self._until[end]
        start = max(
            bisect_left(offset, until - largest, 0, end),
            bisect_left(offset, self._waiting[end] + keep - self._capacity, 0, end),
            end - self._max_batch,
        )
        return min(start, end - 1)

    def _spread(self, largest: int, keep: int, num_groups: int) -> list[int]:
        """Even groups within the limits, smaller ones first: headroom for the next group."""
        lows = [self._size]
        for _ in range(num_groups - 1):
            lows.append(self._nearest(lows[-1], largest, keep))
        ends: list[int] = []
        start = 0
        until = self._until
        for left in range(num_groups, 0, -1):
            share = until[start] + (until[-1] - until[start]) // left
            even = bisect_right(until, share) - 1
            low = max(lows[left - 1], start + 1)
            end = min(max(even, low), self._farthest(start, largest, keep))
            ends.append(end)
            start = end
        return ends


def _less(values: list[int], others: list[int]) -> list[int]:
    """Difference, as far as `others` goes; the rest of `values` is kept as it is."""
    return [*map(int.__sub__, values, others), *values[len(others) :]]


def _largest(bound: int, step: int, possible: Callable[[int], object]) -> int:
    """The largest value up to `bound`, to within `step`, with which something is possible.

    0 always is, and what is possible with a value is possible with every smaller one.
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
