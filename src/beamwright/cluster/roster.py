"""Roster: which replicas are alive, what they use, and how many candidates each has to write.

Searches are given by these loads. No Ray, no torch.
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

Tells = Literal["rounds", "tree", "nothing"]
"""rounds: each as it is decided, and so the tree; tree: with the end; nothing: no tree."""


@dataclass(frozen=True)
class Pulse:
    """A replica is alive, and uses this much. process: its id, where it runs. exact: as of its
    solver. candidates: of the searches that it has, by the roster."""

    name: str
    process: int
    exact: bool
    usage: Usage
    candidates: int = 0


@dataclass(eq=False)
class Given:
    """A search of n candidates as it goes to a replica.

    tells: what comes back beside its solution. roster: of whoever gives it; stays there. replica:
    who has it, None while it waits for one. paths: that are to be scored; None for a search.
    """

    id: str
    problem: Any
    problem_id: str | int
    options: dict[str, Any]
    n: int
    roster: Roster | None = field(default=None, repr=False)
    tells: Tells = "rounds"
    replica: str | None = None
    paths: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "roster": None}


class Roster:
    """From any thread. wanted: replicas that there should be; deaths: of replicas. Counts of those
    that are gone stay."""

    def __init__(self) -> None:
        self.wanted = self.deaths = 0
        self._lock = threading.Lock()
        self._alive: dict[str, Pulse] = {}
        self._gone: list[Usage] = []
        self._heard_s = time.monotonic()
        self._given: dict[str, Given] = {}

    # --- who is there ------------------------------------------------------------------------

    @property
    def absent_s(self) -> float:
        """Seconds since any replica was heard of."""
        return time.monotonic() - self._heard_s

    def update(self, pulses: Iterable[Pulse]) -> None:
        """Replace the replicas that are alive."""
        there = {pulse.name: pulse for pulse in pulses}
        for name in self._alive.keys() - there.keys():
            self.forget(name)
        with self._lock:
            self._alive.update(there)
            if there:
                self._heard_s = time.monotonic()

    def note(self, name: str | None, usage: Usage) -> None:
        """Note what a replica uses now."""
        with self._lock:
            self._heard_s = time.monotonic()
            if name in self._alive:
                self._alive[name] = replace(self._alive[name], usage=usage)

    def forget(self, name: str) -> None:
        """Count a replica as dead."""
        with self._lock:
            pulse = self._alive.pop(name, None)
            if pulse is not None:
                self.deaths += 1
                self._gone = [reduce(add, [*self._gone, pulse.usage.over()])]

    def usage(self) -> Usage:
        """Sum over all replicas, with the counts of dead ones."""
        with self._lock:
            return reduce(add, [*(pulse.usage for pulse in self._alive.values()), *self._gone])

    def replicas(self) -> list[Pulse]:
        """List the live replicas by name, with their loads."""
        with self._lock:
            alive, loads = sorted(self._alive.items()), self._loads()
        return [replace(pulse, candidates=loads[name]) for name, pulse in alive]

    # --- what they have to do ----------------------------------------------------------------

    def ranked(self, names: Iterable[str]) -> list[str]:
        """Sort replicas by load, the fewest candidates first."""
        with self._lock:
            loads = self._loads()
        return sorted(names, key=lambda name: (loads[name], name))

    def enter(self, given: Given) -> None:
        """Add a search that waits for a replica, for the first time or again."""
        with self._lock:
            self._given[given.id] = given
            given.replica = None

    def give(self, given: Given, name: str) -> None:
        """Assign a search to a replica, unless it is over by now."""
        with self._lock:
            if given.id in self._given:
                given.replica = name

    def take_back(self, given: Given) -> None:
        """Remove a search that is over."""
        with self._lock:
            self._given.pop(given.id, None)

    def _loads(self) -> Counter[str | None]:
        loads: Counter[str | None] = Counter()
        for given in self._given.values():
            loads[given.replica] += given.n
        return loads
