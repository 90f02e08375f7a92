"""Whose KV leaves the device first, in orders that the engine does not have: vLLM's, and by costs.

The engine lets go what the round does not use, then what it uses last (`schedule.forest`); that is
`tree` here. Decoupled exploration's thesis has vLLM's least recently used (`lru`); `cost` is what
is cheapest to have again. An instrument: the simulator alone knows them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

from beamwright.kv.host import HostTier
from beamwright.kv.segments import Segment

K = TypeVar("K", bound=Hashable)
Victims = Literal["tree", "lru", "cost"]


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


@dataclass
class LeastRecent(HostTier):
    """What was held, leased or written last leaves last."""

    touched: WeakKeyDictionary[Segment, int] = field(default_factory=WeakKeyDictionary)

    def touch(self, segments: Iterable[Segment], tick: int) -> None:
        """They are in use."""
        self.touched.update(dict.fromkeys(segments, tick))

    def in_order(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        del next_use
        leaving = list(segments)
        touched = {segment: self.touched.get(segment, 0) for segment in leaving}
        return least_recent_order(leaving, touched, {s: s.start for s in leaving})


class Cheapest(HostTier):
    """By what it costs to have a segment again, per block that its leaving frees: in tokens to
    compute, or in blocks to copy, back, and to the host if they are not there."""

    def in_order(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        order, cost = super().in_order(segments, next_use), dict[Segment, float]()
        for segment in order:
            blocks = segment.blocks_for(segment.length)
            missing = blocks - segment.host_length // segment.group.block_tokens
            copied = 1 + (0 if segment.stored else missing / blocks)
            cost[segment] = segment.length / blocks if self.recompute else copied
        return cheapest_order(order, next_use, cost)


TIERS: Mapping[Victims, type[HostTier]] = {"tree": HostTier, "lru": LeastRecent, "cost": Cheapest}
