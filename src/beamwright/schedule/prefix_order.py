"""Prefix-aware order: consecutive beams share as much of their paths as they can (FlashTTS, 4.2).

Knows the view's demand and the order in which beams arrive; no tier, no transfer. A node is a
segment of the demand: a step whose KV the beams read. What the step at hand writes is no node, but
counts where a group has to fit.

A subtree whose beams follow each other has its nodes in groups that follow each other, too, so
every node is loaded once: orders in which all do are the depth-first ones, and `greedy` and
`siblings` give one of them. `random` and `worst` are there to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, get_args

from beamwright.protocols import KVDemand, ScheduleView
from beamwright.registry import option
from beamwright.schedule.declare import schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.locality import LocalitySchedule, round_robin

PrefixOrder = Literal["greedy", "siblings", "depth-first", "random", "worst"]
PREFIX_ORDERS: tuple[PrefixOrder, ...] = get_args(PrefixOrder)


@schedule("prefix", meaning="groups cut from a prefix-aware order (FlashTTS)")
class PrefixSchedule(LocalitySchedule):
    """Groups are the largest runs of the order that fit the device.

    Of the settings it reads max_batch and write_back.
    """

    order: PrefixOrder = option("greedy", help="Order of beams.")
    order_seed: int = option(0, ge=0, help="Of --order random.")

    def groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        order = ordered(self.order, node_forest(demand), round_robin(view), self.order_seed)
        return cut(demand, order, view.limit(self.settings.max_batch))


# --- orders ----------------------------------------------------------------------------------


def node_forest(demand: KVDemand) -> Forest:
    """The demand with every node of size 1: its `common_bytes` are P(c_i, c_j), in nodes."""
    ones, none = [1] * len(demand.parent), [0] * len(demand.leaf)
    return Forest(replace(demand, segment_bytes=ones, growth_bytes=none, copy_per_beam=False))


def ordered(name: PrefixOrder, forest: Forest, arrival: Sequence[int], seed: int = 0) -> list[int]:
    """Beam numbers in the order of that name.

    forest: whose beams are depth-first. arrival: beam numbers as the queue has them. seed: of
    `random`.
    """
    if name == "depth-first":
        return list(range(len(forest)))
    if name == "random":
        return random.Random(seed).sample(arrival, len(arrival))
    if name == "siblings":
        return siblings_together(forest, arrival)
    return nearest(forest, arrival, max if name == "greedy" else min)


def siblings_together(forest: Forest, arrival: Iterable[int]) -> list[int]:
    """Beams of one parent together, parents as their first beams arrive.

    What FlashTTS implements: where the queue keeps the parents' order from round to round, it has
    been depth-first from the root on.
    """
    num_beams = len(forest)
    first = list(range(num_beams))
    for beam in range(1, num_beams):
        if forest.shared_bytes[beam] == forest.path_bytes[beam] == forest.path_bytes[beam - 1]:
            first[beam] = first[beam - 1]  # equal paths: of one parent
    families: dict[int, list[int]] = {}
    for beam in arrival:
        families.setdefault(first[beam], []).append(beam)
    return [beam for family in families.values() for beam in family]


def nearest(forest: Forest, arrival: Iterable[int], choose: Callable[..., int] = max) -> list[int]:
    """T_{k+1} = argmax over c_i in Q of P(c_k, c_i), as printed; the first that arrived begins.

    Of equals the first that arrived is next. choose: `min` makes the worst of each choice.
    """
    queue = dict.fromkeys(arrival)
    order: list[int] = []
    while queue:
        beam = choose(queue, key=_shared_with(forest, order[-1])) if order else next(iter(queue))
        order.append(beam)
        del queue[beam]
    return order


def _shared_with(forest: Forest, beam: int) -> Callable[[int], int]:
    """P(beam, other) of every other beam, in the forest's unit."""
    own, shared = forest.path_bytes[beam], forest.shared_bytes
    after = accumulate(shared[beam + 1 :], min, initial=own)
    before = accumulate(reversed(shared[1 : beam + 1]), min, initial=own)
    return [*reversed([*before][1:]), *after].__getitem__


# --- batches and what they cost ---------------------------------------------------------------


def cut(demand: KVDemand, order: Sequence[int], max_batch: int | None = None) -> list[list[int]]:
    """The order in groups, each "the largest possible group of consecutively scheduled CoTs".

    A group's nodes and the growth of its beams fit the capacity, and it has at most `max_batch`
    beams. A beam that does not fit is a group of its own.
    """
    groups: list[list[int]] = []
    held: set[int] = set()
    need = 0
    for beam in order:
        fresh = _path_above(demand, beam, set() if demand.copy_per_beam else held)
        added = _bytes_of(demand, fresh) + demand.growth_bytes[beam]
        full = bool(groups) and len(groups[-1]) == max_batch
        if not groups or full or need + added > demand.capacity_bytes:
            groups.append([])
            held, need = set(), 0
            fresh = _path_above(demand, beam, held)
            added = _bytes_of(demand, fresh) + demand.growth_bytes[beam]
        groups[-1].append(beam)
        held.update(fresh)
        need += added
    return groups


def trie(demand: KVDemand, group: Iterable[int]) -> set[int]:
    """The nodes that a group's beams read, each once: T_i of the paper."""
    nodes: set[int] = set()
    for beam in group:
        nodes.update(_path_above(demand, beam, nodes))
    return nodes


def _path_above(demand: KVDemand, beam: int, known: set[int]) -> list[int]:
    """A beam's nodes from the deepest up, until one is known: all above that are, too."""
    found: list[int] = []
    node = demand.leaf[beam]
    while node is not None and node not in known:
        found.append(node)
        node = demand.parent[node]
    return found


def _bytes_of(demand: KVDemand, nodes: Iterable[int]) -> int:
    return sum(map(demand.segment_bytes.__getitem__, nodes))
