"""Eviction orders to compare with the engine's, in simulations only.

`tree` is the engine's order: KV that the round does not use, then KV used last in it. `lru` is
vLLM's, least recently used, as in the thesis on decoupled exploration. `cost` evicts KV first that
is cheapest to restore.
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
    """Sort as vLLM does: least recently used first, ties by the longest prefix.

    last_touch: increasing number of the last use.
    start: tokens before the candidate in its path.
    """
    return sorted(candidates, key=lambda key: (last_touch[key], -start[key]))


def cheapest_order(
    order: Sequence[K], next_use: Mapping[K, int], return_cost: Mapping[K, float]
) -> list[K]:
    """Sort candidates that the round still uses last, and each part by cost, cheapest first.

    order: candidates in the order that breaks ties.
    return_cost: cost per block of restoring a candidate.
    """
    return sorted(order, key=lambda key: (key in next_use, return_cost[key]))


@dataclass
class LeastRecent(HostTier):
    """A host tier that evicts the least recently pinned, leased or written KV first."""

    touched: WeakKeyDictionary[Segment, int] = field(default_factory=WeakKeyDictionary)

    def touch(self, segments: Iterable[Segment], tick: int) -> None:
        """Record that these segments are used at `tick`."""
        self.touched.update(dict.fromkeys(segments, tick))

    def order_for_eviction(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        del next_use
        leaving = list(segments)
        touched = {segment: self.touched.get(segment, 0) for segment in leaving}
        return least_recent_order(leaving, touched, {s: s.start for s in leaving})


class Cheapest(HostTier):
    """A host tier that evicts the KV first that is cheapest to restore, per freed block.

    The cost is in tokens to recompute, or in blocks to copy: back to the device, and before that
    to the host if not stored there.
    """

    def order_for_eviction(
        self, segments: Iterable[Segment], next_use: Mapping[Segment, int]
    ) -> list[Segment]:
        order, cost = super().order_for_eviction(segments, next_use), dict[Segment, float]()
        for segment in order:
            blocks = segment.blocks_for(segment.length)
            missing = blocks - segment.host_length // segment.group.block_tokens
            copied = 1 + (0 if segment.stored else missing / blocks)
            cost[segment] = segment.length / blocks if self.recompute else copied
        return cheapest_order(order, next_use, cost)


TIERS: Mapping[Victims, type[HostTier]] = {"tree": HostTier, "lru": LeastRecent, "cost": Cheapest}
