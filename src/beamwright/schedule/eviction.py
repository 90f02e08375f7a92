"""The order in which KV leaves the device. Pure functions; they know neither tiers nor bytes.

`eviction_order` is `--victims tree`, `least_recent_order` is `lru`, `cheapest_order` is `cost`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

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
