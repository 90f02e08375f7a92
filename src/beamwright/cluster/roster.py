"""Roster: which replicas are there, what they use, and who has how many candidates to write.

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
    """That a replica is there, and what it uses. process: its id, where it runs. exact: as of its
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
        """Seconds since anything was heard of any."""
        return time.monotonic() - self._heard_s

    def update(self, pulses: Iterable[Pulse]) -> None:
        """These are there, and nobody else is."""
        there = {pulse.name: pulse for pulse in pulses}
        for name in self._alive.keys() - there.keys():
            self.forget(name)
        with self._lock:
            self._alive.update(there)
            if there:
                self._heard_s = time.monotonic()

    def note(self, name: str | None, usage: Usage) -> None:
        """It has been heard of."""
        with self._lock:
            self._heard_s = time.monotonic()
            if name in self._alive:
                self._alive[name] = replace(self._alive[name], usage=usage)

    def forget(self, name: str) -> None:
        """It is gone."""
        with self._lock:
            pulse = self._alive.pop(name, None)
            if pulse is not None:
                self.deaths += 1
                self._gone = [reduce(add, [*self._gone, pulse.usage.over()])]

    def usage(self) -> Usage:
        """Of all together; counts of those that are gone included."""
        with self._lock:
            return reduce(add, [*(pulse.usage for pulse in self._alive.values()), *self._gone])

    def replicas(self) -> list[Pulse]:
        """Those that are there, by their names, with what they have to do."""
        with self._lock:
            alive, loads = sorted(self._alive.items()), self._loads()
        return [replace(pulse, candidates=loads[name]) for name, pulse in alive]

    # --- what they have to do ----------------------------------------------------------------

    def ranked(self, names: Iterable[str]) -> list[str]:
        """The one with the fewest candidates first."""
        with self._lock:
            loads = self._loads()
        return sorted(names, key=lambda name: (loads[name], name))

    def enter(self, given: Given) -> None:
        """It waits for a replica, for the first time or again."""
        with self._lock:
            self._given[given.id] = given
            given.replica = None

    def give(self, given: Given, name: str) -> None:
        """It goes, or went, there; nothing, if it is over by now."""
        with self._lock:
            if given.id in self._given:
                given.replica = name

    def take_back(self, given: Given) -> None:
        """It is nobody's any more."""
        with self._lock:
            self._given.pop(given.id, None)

    def _loads(self) -> Counter[str | None]:
        loads: Counter[str | None] = Counter()
        for given in self._given.values():
            loads[given.replica] += given.n
        return loads
