"""Prefix-aware order (FlashTTS, 4.2): consecutive beams share as much of their paths as possible.

A plugin with the schedules `prefix` and, to compare, `random-order`. `locality` decodes in
depth-first order, which shares as much and costs less (docs/log/2026-11.md#flashtts-order). A node
is a segment of the demand, that is, a step whose KV beams read.
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
    """A schedule that cuts the prefix-aware order into the largest groups that fit the device.

    It reads the settings max_batch and write_back only.
    """

    def make_groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        order = self.order(demand, round_robin(view))
        return cut_groups(demand, order, view.limit(self.settings.max_batch))

    def order(self, demand: KVDemand, arrival: Sequence[int]) -> list[int]:
        """Return the beams in prefix-aware order: T_{k+1} = argmax over c_i in Q of P(c_k, c_i).

        P counts shared nodes. The first arrival starts; ties go to the earlier arrival.

        arrival: beam numbers in order of arrival.
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
    """A schedule with a random order of beams, to compare with."""

    def order(self, demand: KVDemand, arrival: Sequence[int]) -> list[int]:
        return random.Random(0).sample(arrival, len(arrival))


def _shared_with(nodes: Forest, beam: int) -> Callable[[int], int]:
    """Return a function that gives P(beam, other) for another beam."""
    own, shared = nodes.path_bytes[beam], nodes.shared_bytes
    after = accumulate(shared[beam + 1 :], min, initial=own)
    before = accumulate(reversed(shared[1 : beam + 1]), min, initial=own)
    return [*reversed([*before][1:]), *after].__getitem__


def cut_groups(
    demand: KVDemand, order: Sequence[int], max_batch: int | None = None
) -> list[list[int]]:
    """Cut the order into groups, each "the largest possible group of consecutively scheduled CoTs".

    A group has at most `max_batch` beams. Its nodes and its beams' growth fit the capacity, unless
    it is a single beam.
    """
    groups: list[list[int]] = []
    held: set[int] = set()
    need = 0
    for beam in order:
        fresh, added = _new_nodes(demand, beam, set() if demand.copy_per_beam else held)
        full = bool(groups) and len(groups[-1]) == max_batch
        if not groups or full or need + added > demand.capacity_bytes:
            groups.append([])
            held, need = set(), 0
            fresh, added = _new_nodes(demand, beam, held)
        groups[-1].append(beam)
        held.update(fresh)
        need += added
    return groups


def _new_nodes(demand: KVDemand, beam: int, held: Iterable[int]) -> tuple[list[int], int]:
    """Return the beam's nodes that are not held, deepest first, and their bytes with its growth."""
    fresh: list[int] = []
    num_bytes, node = demand.growth_bytes[beam], demand.leaf[beam]
    while node is not None and node not in held:
        fresh.append(node)
        num_bytes += demand.segment_bytes[node]
        node = demand.parent[node]
    return fresh, num_bytes
