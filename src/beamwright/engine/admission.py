"""Who is taken in beside the trees under way, and who goes first where not all can go at once.

`decoupled` fills the generator's batch from queued problems before anything else (eager; decoupled
tree exploration, Alg. 5), only where a tree's KV fits as well: how much that becomes is known when
the first one has ended. Where a number of problems is given, it is taken at its word: KV that has
to leave may cost less than rows that stay empty (docs/experiments.md).

A larger priority goes first. Decoding, and of equal priority, whoever was served least; elsewhere,
whoever came first. Nobody waits for ever: waits are bounded by a share of everybody's work
(`Fairness`), or by how many may pass (`PriorityQueue`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Generic, TypeVar

from beamwright.engine.tree_run import TreeRun
from beamwright.kv.cache import CacheManager
from beamwright.protocols import Plan
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node

T = TypeVar("T")

USUAL_ROWS = 64
"""Candidates of all problems together that keep most devices busy."""

REMOTE_ROWS = 256
"""The same of a remote generator, which has a batch, memory and a queue of its own."""

PATIENT_ROUNDS = 2
"""Rounds of all trees under way that may be decoded before one that waits goes before all."""

WAITING_ROUNDS = PATIENT_ROUNDS + 1
"""The bound: behind what stood in front of it then, whoever waits is decoded."""


@dataclass
class Admission:
    """A place for one more tree, or none.

    in_flight: problems at a time at most; None for as many as there is work for. usual_rows:
    candidates of all problems together that keep the generator busy.
    """

    settings: ScheduleSettings
    in_flight: int | None
    stores: Sequence[CacheManager]
    usual_rows: int = USUAL_ROWS
    _filling: bool = field(default=True, init=False)
    _largest_tokens: int = field(default=0, init=False)
    _before: frozenset[TreeRun] = field(default=frozenset(), init=False)
    _ended: bool = field(default=False, init=False)
    _pressed: bool = field(default=False, init=False)
    _evicted: int = field(default=0, init=False)

    def has_place(self, live: Mapping[TreeRun, int], num_open: int) -> bool:
        """live: trees under way, and how many candidates each may have; num_open: their steps that
        are decoded, or wait for it."""
        self._look(live)
        if not live:
            self._filling = True
        elif self._is_full(list(live.values()), num_open):
            self._filling = self.settings.explore != "lockstep"  # whose batch is complete
            return False
        return self._filling

    def _is_full(self, sizes: Sequence[int], num_open: int) -> bool:
        if self.in_flight is not None:
            return len(sizes) >= self.in_flight
        if sum(sizes) < self.usual_rows or self.settings.explore != "decoupled":
            return sum(sizes) >= self.usual_rows
        rows = self.settings.max_batch or self.usual_rows  # N_LLM
        return num_open >= rows or not self._fits(len(sizes))

    def _look(self, live: Mapping[TreeRun, int]) -> None:
        """See how large trees become; whenever one has ended, whether KV has had to leave since the
        one before it: then nobody comes in its place."""
        now = frozenset(live)
        if not self._before <= now:
            evicted = sum(store.counts.evicted_blocks for store in self.stores)
            self._pressed, self._evicted = evicted > self._evicted, evicted
            self._ended = True
        self._before = now
        for run in live:
            self._largest_tokens = max(self._largest_tokens, *run.round_tokens[-1:], 0)

    def _fits(self, num_live: int) -> bool:
        """True if one more has room, were all as large as the largest so far."""
        tree_bytes = self._largest_tokens * sum(s.device.bytes_per_token for s in self.stores)
        room = sum(store.device.budget.total_bytes for store in self.stores)
        roomy = self._ended and not self._pressed
        return roomy and tree_bytes * (num_live + 1) <= room


class Fairness:
    """The order in which trees under way are decoded.

    A tree *waits* while it has open steps of which none runs. Its wait is counted in steps of
    other trees that are decoded meanwhile. A round of all is as many steps as all trees under way
    have in the rounds that they are in. After `PATIENT_ROUNDS` of them the tree goes before all
    others, and what is in front of it by then is at most one more.
    """

    def __init__(self) -> None:
        self._num_decoded = 0
        self._since: dict[TreeRun, int] = {}

    def began(self, run: TreeRun) -> None:
        """A round of this tree begins: it waits."""
        self._since[run] = self._num_decoded

    def decoded(self, run: TreeRun) -> None:
        """A step of this tree is complete."""
        self._since.pop(run, None)
        self._num_decoded += 1

    def note(self, runs: Iterable[TreeRun], running: Iterable[Node]) -> None:
        """See who waits still. running: nodes whose steps are under way."""
        served = {node.root for node in running if not node.speculative}
        waiting = [run for run in runs if run.open and run.tree.root not in served]
        self._since = {run: self._since.get(run, self._num_decoded) for run in waiting}

    def waits(self) -> dict[TreeRun, int]:
        """Steps that were decoded of others since each tree waits."""
        return {run: self._num_decoded - since for run, since in self._since.items()}

    def order(self, runs: Collection[TreeRun]) -> list[TreeRun]:
        """Those in front first."""
        ranks = self._ranks(runs)
        return sorted(runs, key=lambda run: (ranks[run.tree.root], run.served))

    def cut(self, plan: Plan, runs: Collection[TreeRun]) -> Plan:
        """A plan whose groups are cut so that who is in front comes first, whatever it says."""
        ranks = self._ranks(runs)
        if len(set(ranks.values())) < 2:
            return plan

        def rank(node: Node) -> tuple[int, int]:
            return ranks[node.root]

        parts = [
            tuple(nodes)
            for group in plan.groups
            for _, nodes in groupby(sorted(group, key=rank), rank)
        ]
        return replace(plan, groups=tuple(sorted(parts, key=lambda nodes: rank(nodes[0]))))

    def _ranks(self, runs: Collection[TreeRun]) -> dict[Node, tuple[int, int]]:
        """Who has waited for too long first, the longest in front; then by priority."""
        too_long, waits = PATIENT_ROUNDS * sum(len(run.beams) for run in runs), self.waits()
        return {
            run.tree.root: (0, -waits[run])
            if waits.get(run, -1) >= too_long
            else (1, -run.priority)
            for run in runs
        }


class PriorityQueue(Generic[T]):
    """Who waits in the order of their turns: a larger priority first, then who came first.

    most_passed: nobody is passed by more than so many who came later.
    """

    def __init__(self, most_passed: int) -> None:
        self._most_passed = most_passed
        self._entries: list[_Entry[T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    def put(self, item: T, priority: int = 0) -> None:
        """Wait from now on."""
        number = len(self._entries)
        for entry in reversed(self._entries):
            if entry.priority >= priority or entry.passed >= self._most_passed:
                break
            entry.passed += 1
            number -= 1
        self._entries.insert(number, _Entry(item, priority))

    def take(self) -> T:
        """The first one waits no more."""
        return self._entries.pop(0).item

    def change(self, change: Callable[[T], T | None]) -> None:
        """Put something else in the place of each; None: it waits no more."""
        changed = [(entry, change(entry.item)) for entry in self._entries]
        self._entries = [replace(entry, item=item) for entry, item in changed if item is not None]

    def clear(self) -> None:
        """Nobody waits any more."""
        self._entries.clear()


@dataclass
class _Entry(Generic[T]):
    """passed: how many who came later stand in front of it, or stood there."""

    item: T
    priority: int
    passed: int = 0
