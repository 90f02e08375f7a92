"""Prefix-aware order: consecutive beams share as much of their paths as they can (FlashTTS, 4.2).

Knows the view's demand and the order in which beams arrive; no tier, no transfer. A node is a
segment of the demand: a step whose KV the beams read. What the step at hand writes is no node, but
counts where a group has to fit. Depth-first order, which `locality` has, shares as much at less
cost (docs/log/2026-11.md#flashtts-order): `--plugin` with this file has `--schedule prefix`
and, to compare it with, `random-order`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from beamwright.protocols import KVDemand, ScheduleView
from beamwright.schedule.declare import schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.locality import LocalitySchedule, round_robin


@schedule("prefix", meaning="groups cut from a prefix-aware order (FlashTTS)")
class PrefixSchedule(LocalitySchedule):
    """Groups are the largest runs of the order that fit the device.

    Of the settings it reads max_batch and write_back.
    """

    def groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        order = self.order(demand, round_robin(view))
        return cut(demand, order, view.limit(self.settings.max_batch))

    def order(self, demand: KVDemand, arrival: Sequence[int]) -> list[int]:
        """T_{k+1} = argmax over c_i in Q of P(c_k, c_i), as printed; the first that arrived begins.

        P is in nodes. Of equals the first that arrived is next. arrival: beam numbers as the queue
        has them.
        """
        ones, none = [1] * len(demand.parent), [0] * len(demand.leaf)
        nodes = Forest(replace(demand, segment_bytes=ones, growth_bytes=none, copy_per_beam=False))
        queue = dict.fromkeys(arrival)
        order: list[int] = []
        while queue:
            beam = max(queue, key=_shared_with(nodes, order[-1])) if order else next(iter(queue))
            order.append(beam)
            del queue[beam]
        return order


@schedule("random-order", meaning="groups cut from a random order")
class RandomOrder(PrefixSchedule):
    """What the prefix-aware order is compared with."""

    def order(self, demand: KVDemand, arrival: Sequence[int]) -> list[int]:
        return random.Random(0).sample(arrival, len(arrival))


def _shared_with(nodes: Forest, beam: int) -> Callable[[int], int]:
    """P(beam, other) of every other beam."""
    own, shared = nodes.path_bytes[beam], nodes.shared_bytes
    after = accumulate(shared[beam + 1 :], min, initial=own)
    before = accumulate(reversed(shared[1 : beam + 1]), min, initial=own)
    return [*reversed([*before][1:]), *after].__getitem__


def cut(demand: KVDemand, order: Sequence[int], max_batch: int | None = None) -> list[list[int]]:
    """The order in groups, each "the largest possible group of consecutively scheduled CoTs".

    A group's nodes and the growth of its beams fit the capacity, and it has at most `max_batch`
    beams. A beam that does not fit is a group of its own.
    """
    groups: list[list[int]] = []
    held: set[int] = set()
    need = 0
    for beam in order:
        fresh, added = _fresh(demand, beam, set() if demand.copy_per_beam else held)
        full = bool(groups) and len(groups[-1]) == max_batch
        if not groups or full or need + added > demand.capacity_bytes:
            groups.append([])
            held, need = set(), 0
            fresh, added = _fresh(demand, beam, held)
        groups[-1].append(beam)
        held.update(fresh)
        need += added
    return groups


def _fresh(demand: KVDemand, beam: int, held: Iterable[int]) -> tuple[list[int], int]:
    """A beam's nodes from the deepest up, until one is held, as all above it are; and their bytes
    with what the beam writes."""
    fresh: list[int] = []
    num_bytes, node = demand.growth_bytes[beam], demand.leaf[beam]
    while node is not None and node not in held:
        fresh.append(node)
        num_bytes += demand.segment_bytes[node]
        node = demand.parent[node]
    return fresh, num_bytes
