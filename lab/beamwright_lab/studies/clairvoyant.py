"""What must cross the link, whoever schedules: bounds for those who know the whole tree beforehand.

Counts blocks; knows lives and a capacity, no schedule. The rules that all of it rests on: a step is
complete while its whole path and its own KV are on the device, and begins beside its parent's state
and its own, where layers keep one; what is read again was kept there or comes over the link; what
is on the host was sent there once. The device may run one beam at a time in any order and take
blocks in and out singly, so the bounds hold for every schedule that keeps paths whole (layer-wise
ones do not) and does not compute KV again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True)
class Life:
    """The KV of a node, in rounds, counted from 1.

    born: the round in which its step is decoded; 0 for a prompt. last: the last round whose beams
    read it; `born` if none does. blocks: when its step is complete (children may add one more).
    is_state: it is read where steps begin.
    """

    born: int
    last: int
    blocks: int
    is_state: bool = False


@dataclass(frozen=True)
class TrafficBound:
    """Blocks that must cross the link.

    loads: to the device. stores: to the host, for one who knows what will be pruned, and so drops
    it at once; blind_stores: for one who must keep every candidate until its round is scored.
    """

    loads: int
    stores: int
    blind_stores: int


def traffic_bound(lives: Sequence[Life], capacity: int) -> TrafficBound:
    """The bounds of a search whose nodes live like this, on a device of so many blocks.

    Loads: of a round's `needed` blocks, the device holds at most `capacity` less one beam's step
    when the first step is complete, less one state when it begins where there are states; the
    others are loaded later in the round. Stores: between two
    rounds the host holds what does not fit, and serves longest with what lives longest.
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
    """Fewest blocks that have to be sent for all but `capacity` to be on the host at every end of
    a round. spans: first and last of these ends at which so many blocks are there."""
    begins: dict[int, list[tuple[int, int]]] = {}
    for first, last, blocks in spans:
        if last >= first:
            begins.setdefault(first, []).append((last, blocks))
    num_ends = 1 + max((last for each in begins.values() for last, _ in each), default=-1)
    on_device: list[tuple[int, int]] = []  # (-last, blocks): what lives longest in front
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
