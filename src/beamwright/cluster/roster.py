"""Roster: which replicas are there, and what they use; counts of those that are gone stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from beamwright.cluster.replica import Pulse
from beamwright.counters import Usage


@dataclass(frozen=True)
class ReplicaState:
    """A replica that is there. process: its id, where it runs.

    searches, tokens: that it was given and has not ended; tokens are those still expected of it.
    """

    name: str
    process: int
    searches: int
    tokens: int
    usage: Usage


class Roster:
    """From any thread. deaths: of replicas; restarts: of searches that began again elsewhere."""

    def __init__(self) -> None:
        self.deaths = self.restarts = 0
        self._lock = threading.Lock()
        self._alive: dict[str, Pulse] = {}
        self._gone: Usage | None = None
        self._heard_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def absent_s(self) -> float:
        """Seconds since anything was heard of any."""
        return time.monotonic() - self._heard_s

    def update(self, pulses: Iterable[Pulse]) -> None:
        """These are there, and nobody else is."""
        there = {pulse.replica: pulse for pulse in pulses}
        for name in self._alive.keys() - there.keys():
            self.forget(name)
        with self._lock:
            self._alive.update(there)
            if there:
                self._heard_s = time.monotonic()

    def note(self, name: str | None, usage: Usage | None = None) -> None:
        """It has been heard of, perhaps with what it uses."""
        with self._lock:
            self._heard_s = time.monotonic()
            pulse = self._alive.get(name or "")
            if pulse is not None and usage is not None:
                self._alive[pulse.replica] = replace(pulse, usage=usage)

    def forget(self, name: str) -> None:
        """It is gone."""
        with self._lock:
            pulse = self._alive.pop(name, None)
            if pulse is not None:
                self.deaths += 1
                counts = pulse.usage.over()
                self._gone = counts if self._gone is None else self._gone + counts

    def usage(self) -> Usage:
        """Of all together; counts of those that are gone included."""
        with self._lock:
            usages = [pulse.usage for pulse in self._alive.values()]
            return reduce(add, usages if self._gone is None else [*usages, self._gone])

    def states(self, loads: Mapping[str, tuple[float, int]]) -> list[ReplicaState]:
        """Those that are there, by their names. loads: tokens and searches of each."""
        with self._lock:
            alive = sorted(self._alive.items())
        states = []
        for name, pulse in alive:
            tokens, searches = loads.get(name, (0.0, 0))
            states.append(ReplicaState(name, pulse.process, searches, round(tokens), pulse.usage))
        return states
