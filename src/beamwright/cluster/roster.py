"""Roster: which replicas are alive, their memory and counts, and their loads.

The load of a replica is the sum of n over its searches. A new search goes to the replica with the
smallest load. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Literal

from beamwright.counters import Usage

# What a replica sends of the tree, apart from the solution: "rounds": the changes after each round;
# "tree": the whole tree at the end; "nothing": no tree.
SentTree = Literal["rounds", "tree", "nothing"]


@dataclass(frozen=True)
class Heartbeat:
    """A replica's report that it is alive, with its memory and counts, sent every few seconds."""

    name: str
    process: int  # process id on the replica's machine
    exact: bool  # `Solver.exact` of the replica
    usage: Usage
    candidates: int = 0  # the replica's load: sum of n over its searches; set by the roster


@dataclass(eq=False)
class SearchRequest:
    """A search that a ClusterSolver sends to a replica."""

    id: str
    problem: Any
    problem_id: str | int
    options: dict[str, Any]
    n: int
    # The sender's roster, which the router in the sender's process reads. Not sent to the replica.
    roster: Roster | None = field(default=None, repr=False)
    tells: SentTree = "rounds"
    replica: str | None = None  # name of the replica that runs the search; None while it waits
    paths: Any = None  # paths to score; None for a search

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without the roster."""
        return {**vars(self), "roster": None}


class Roster:
    """Table of the live replicas and of the searches in flight. Any thread may use it.

    The counts of dead replicas are kept, so that totals never shrink.

    wanted: the number of replicas that should run.
    deaths: the number of replicas that have died.
    """

    def __init__(self) -> None:
        self.wanted = self.deaths = 0
        self._lock = threading.Lock()
        self._alive: dict[str, Heartbeat] = {}
        self._gone: list[Usage] = []
        self._heard_s = time.monotonic()
        self._given: dict[str, SearchRequest] = {}

    # --- live replicas -----------------------------------------------------------------------

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life from any replica."""
        return time.monotonic() - self._heard_s

    def update(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Set the live replicas to those that sent `heartbeats`, and count the others as dead."""
        there = {heartbeat.name: heartbeat for heartbeat in heartbeats}
        for name in self._alive.keys() - there.keys():
            self.mark_dead(name)
        with self._lock:
            self._alive.update(there)
            if there:
                self._heard_s = time.monotonic()

    def update_usage(self, name: str | None, usage: Usage) -> None:
        """Store the current usage of a live replica."""
        with self._lock:
            self._heard_s = time.monotonic()
            if name in self._alive:
                self._alive[name] = replace(self._alive[name], usage=usage)

    def mark_dead(self, name: str) -> None:
        """Remove a replica, count it as dead, and keep its usage."""
        with self._lock:
            heartbeat = self._alive.pop(name, None)
            if heartbeat is not None:
                self.deaths += 1
                self._gone = [reduce(add, [*self._gone, heartbeat.usage.without_memory()])]

    def usage(self) -> Usage:
        """Return the sum of the usage of all replicas, including the counts of dead ones."""
        with self._lock:
            return reduce(
                add, [*(heartbeat.usage for heartbeat in self._alive.values()), *self._gone]
            )

    def replicas(self) -> list[Heartbeat]:
        """Return the live replicas in the order of their names, with their loads."""
        with self._lock:
            alive, loads = sorted(self._alive.items()), self._count_loads()
        return [replace(heartbeat, candidates=loads[name]) for name, heartbeat in alive]

    # --- searches ----------------------------------------------------------------------------

    def ranked(self, names: Iterable[str]) -> list[str]:
        """Sort names of replicas by load, the smallest first."""
        with self._lock:
            loads = self._count_loads()
        return sorted(names, key=lambda name: (loads[name], name))

    def add(self, given: SearchRequest) -> None:
        """Add a search that waits for a replica: a new one, or one whose replica has died."""
        with self._lock:
            self._given[given.id] = given
            given.replica = None

    def assign(self, given: SearchRequest, name: str) -> None:
        """Assign a search to a replica, unless the search has ended."""
        with self._lock:
            if given.id in self._given:
                given.replica = name

    def remove(self, given: SearchRequest) -> None:
        """Remove a search that has ended."""
        with self._lock:
            self._given.pop(given.id, None)

    def _count_loads(self) -> Counter[str | None]:
        """Return the number of candidates per replica; waiting searches count under None."""
        loads: Counter[str | None] = Counter()
        for given in self._given.values():
            loads[given.replica] += given.n
        return loads
