"""Turns: who goes first where not all can go at once, and that nobody waits for ever.

A larger priority goes first. Decoding, and of equal priority, whoever was served least; elsewhere,
whoever came first. Both are bounded: by a share of everybody's work (`Turns`), or by how many may
pass (`PriorityQueue`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar

from beamwright.engine.tree_run import TreeRun
from beamwright.protocols import Plan
from beamwright.tree import Node

T = TypeVar("T")
_Rank = tuple[int, int]

PATIENT_ROUNDS = 2
"""Rounds of all trees in flight that may be decoded before one that waits goes before all."""

WAITING_ROUNDS = PATIENT_ROUNDS + 1
"""The bound: behind what stood in front of it then, whoever waits is decoded."""


class Turns:
    """The order in which trees in flight are decoded.

    A tree *waits* while it has open steps of which none runs. Its wait is counted in steps of
    other trees that are decoded meanwhile. A round of all is as many steps as all trees in flight
    have in the rounds that they are in. After `PATIENT_ROUNDS` of them the tree goes before all
    others, and what is in front of it by then is at most one more.

    longest: of all waits so far; round_steps: the most steps of a round of all.
    """

    def __init__(self) -> None:
        self.longest = self.round_steps = self._num_decoded = 0
        self._since: dict[TreeRun, int] = {}

    def began(self, run: TreeRun) -> None:
        """A round of this tree begins: it waits."""
        self._since[run] = self._num_decoded

    def note(self, runs: Collection[TreeRun], running: Iterable[Node]) -> None:
        """See who waits still. running: nodes whose steps are under way."""
        served = {node.root for node in running if not node.speculative}
        waits = [run for run in runs if run.open and run.tree.root not in served]
        before, self._since = self._since, {}
        for run in waits:
            self._since[run] = before.pop(run, self._num_decoded)
        for since in before.values():
            self.longest = max(self.longest, self._num_decoded - since)
        self.round_steps = max(self.round_steps, _round_steps(runs))

    def decoded(self, run: TreeRun) -> None:
        """A step of this tree is complete."""
        since = self._since.pop(run, self._num_decoded)
        self.longest = max(self.longest, self._num_decoded - since)
        self._num_decoded += 1

    def order(self, runs: Collection[TreeRun]) -> list[TreeRun]:
        """Those in front first."""
        ranks = self._ranks(runs)
        return sorted(runs, key=lambda run: (ranks[run.tree.root], run.served))

    def cut(self, plan: Plan, runs: Collection[TreeRun]) -> Plan:
        """A plan whose groups are cut so that who is in front comes first, whatever it says."""
        ranks = self._ranks(runs)
        if len(set(ranks.values())) < 2:
            return plan
        parts: list[tuple[_Rank, tuple[Node, ...]]] = []
        for group in plan.groups:
            by_rank = sorted(group, key=lambda node: ranks[node.root])
            for rank, nodes in groupby(by_rank, lambda node: ranks[node.root]):
                parts.append((rank, tuple(nodes)))
        parts.sort(key=lambda part: part[0])
        return replace(plan, groups=tuple(nodes for _, nodes in parts))

    def _ranks(self, runs: Collection[TreeRun]) -> dict[Node, _Rank]:
        """Who has waited for too long first, the longest in front; then by priority."""
        too_long = PATIENT_ROUNDS * _round_steps(runs)
        ranks: dict[Node, _Rank] = {}
        for run in runs:
            since = self._since.get(run, self._num_decoded)
            overdue = run in self._since and self._num_decoded - since >= too_long
            ranks[run.tree.root] = (0, since) if overdue else (1, -run.priority)
        return ranks


def _round_steps(runs: Iterable[TreeRun]) -> int:
    return sum(len(run.beams) for run in runs)


@dataclass
class _Place(Generic[T]):
    """passed: how many who came later stand in front of it, or stood there."""

    item: T
    priority: int
    passed: int = 0


class PriorityQueue(Generic[T]):
    """Who waits in the order of their turns: a larger priority first, then who came first.

    most_passed: nobody is passed by more than so many who came later.
    """

    def __init__(self, most_passed: int) -> None:
        self._most_passed = most_passed
        self._places: list[_Place[T]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        return (place.item for place in self._places)

    def put(self, item: T, priority: int = 0) -> None:
        """Wait from now on."""
        number = len(self._places)
        while number and self._gives_way(self._places[number - 1], priority):
            number -= 1
            self._places[number].passed += 1
        self._places.insert(number, _Place(item, priority))

    def take(self) -> T:
        """The first one waits no more."""
        return self._places.pop(0).item

    def change(self, change: Callable[[T], T | None]) -> None:
        """Put something else in the place of each; None: it waits no more."""
        changed = [(place, change(place.item)) for place in self._places]
        self._places = [replace(place, item=item) for place, item in changed if item is not None]

    def clear(self) -> None:
        """Nobody waits any more."""
        self._places.clear()

    def _gives_way(self, place: _Place[T], priority: int) -> bool:
        return place.priority < priority and place.passed < self._most_passed
