"""Lower bounds on KV traffic over the link, for a scheduler that knows the whole tree in advance.

The bounds count blocks. They follow from when each node's KV is needed and from the device's
capacity, and hold for every schedule that keeps whole paths on the device (so not for layer-wise
ones) and never recomputes KV. They assume:

- When a step ends, its whole path and its own KV are on the device. When it begins, so are its
  parent's recurrent state and its own, in models that keep states.
- KV that is read again was kept on the device or is loaded. KV on the host was stored there once.
- The device may run one beam at a time in any order, and load or evict single blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True)
class Life:
    """The rounds during which a node's KV is needed. Rounds count from 1.

    born: the round in which its step is decoded; 0 for a prompt. last: the last round whose beams
    read it; `born` if none does. blocks: size when the step is complete (children may add one).
    is_state: it is a recurrent state, which is read only when steps begin.
    """

    born: int
    last: int
    blocks: int
    is_state: bool = False


@dataclass(frozen=True)
class TrafficBound:
    """The least number of blocks that cross the link.

    loads: to the device. stores: to the host, for a scheduler that knows what will be pruned and
    drops it at once. blind_stores: to the host, for one that keeps each candidate until its round
    is scored.
    """

    loads: int
    stores: int
    blind_stores: int


def traffic_bound(lives: Sequence[Life], capacity: int) -> TrafficBound:
    """Return the bounds for a search with these nodes, on a device of `capacity` blocks.

    Loads: when the first step of a round is complete, the device holds at most `capacity` blocks
    minus that step (with states: minus one state, when it begins). All other needed blocks are
    loaded later in the round. Stores: between rounds the host holds what does not fit; storing the
    KV that is needed longest costs the fewest blocks.
    """
    needed: Counter[int] = Counter()
    least_growth: dict[int, int] = {}
    has_states = any(life.is_state for life in lives)
    for life in lives:
        for number in range(life.born + 1, life.last + 1):
            needed[number] += life.blocks
        if life.born and life.is_state == has_states:
            least = least_growth.get(life.born, life.blocks)
            least_growth[life.born] = min(least, life.blocks)
    loads = sum(
        max(0, blocks + least_growth.get(number, 0) - capacity) for number, blocks in needed.items()
    )
    survivors = [(life.born, life.last - 1, life.blocks) for life in lives]
    final = max((life.born for life in lives), default=0)
    candidates = [
        (life.born, min(max(life.born, life.last), final - 1), life.blocks) for life in lives
    ]
    return TrafficBound(loads, _cover(survivors, capacity), _cover(candidates, capacity))


def _cover(spans: Iterable[tuple[int, int, int]], capacity: int) -> int:
    """Return the fewest blocks to store so that every round ends with at most `capacity` left.

    spans: the first and last round's end at which KV exists, and its blocks.
    """
    begins: dict[int, list[tuple[int, int]]] = {}
    for first, last, blocks in spans:
        if last >= first:
            begins.setdefault(first, []).append((last, blocks))
    num_ends = 1 + max((last for each in begins.values() for last, _ in each), default=-1)
    on_device: list[tuple[int, int]] = []  # (-last, blocks): needed longest in front
    present = sent = 0
    for end in range(num_ends):
        for last, blocks in begins.get(end, ()):
            heappush(on_device, (-last, blocks))
            present += blocks
        short = present - capacity
        while short > 0:
            last, blocks = heappop(on_device)
            moved = min(blocks, short)
            present, short, sent = present - moved, short - moved, sent + moved
            if moved < blocks:
                heappush(on_device, (last, blocks - moved))
        gone = [each for each in on_device if -each[0] <= end]
        if gone:
            present -= sum(blocks for _, blocks in gone)
            on_device = [each for each in on_device if -each[0] > end]
            heapify(on_device)
    return sent
