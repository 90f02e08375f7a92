"""Searches that were given to replicas, and who has how much to do, in tokens. No Ray, no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

_FIRST_GUESS = 256
_LEARNS = 0.1


Tells = Literal["rounds", "tree", "nothing"]
"""rounds: each as it is decided, and so the tree; tree: with the end; nothing: no tree."""


@dataclass(eq=False)
class Given:
    """A search as it goes to a replica. tokens: that it is expected to take, the prompt's included.

    tells: what comes back beside its solution. ledger: of whoever gives it; stays there.
    """

    id: str
    problem: Any
    problem_id: str | int
    options: dict[str, Any]
    tokens: float
    ledger: Ledger | None = field(default=None, repr=False)
    tells: Tells = "rounds"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ledger": None}


class Ledger:
    """Tokens that each replica still has to generate, by what is known here. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[str, tuple[str | None, float]] = {}
        self._per_candidate = float(_FIRST_GUESS)

    def expected(self, prompt_tokens: int, n: int, most: int | None) -> float:
        """Of one search: n candidates as long as those that ended, at most so many tokens each."""
        candidate = self._per_candidate if most is None else min(self._per_candidate, most)
        return prompt_tokens + n * candidate

    def learn(self, generated: int, n: int) -> None:
        """A search of n candidates has ended."""
        with self._lock:
            self._per_candidate += _LEARNS * (generated / max(1, n) - self._per_candidate)

    def ranked(self, replicas: Iterable[str]) -> list[str]:
        """The one with the fewest tokens first; of equals the one that has fewer searches."""
        loads = self.loads()
        return sorted(replicas, key=lambda name: (*loads.get(name, (0.0, 0)), name))

    def loads(self) -> dict[str, tuple[float, int]]:
        """Tokens and searches of each replica that has some."""
        loads: dict[str, tuple[float, int]] = {}
        with self._lock:
            for replica, tokens in self._given.values():
                if replica is not None:
                    sum_tokens, searches = loads.get(replica, (0.0, 0))
                    loads[replica] = (sum_tokens + tokens, searches + 1)
        return loads

    def enter(self, given: Given) -> None:
        """It waits for a replica, for the first time or again."""
        with self._lock:
            self._given[given.id] = (None, given.tokens)

    def give(self, given: Given, replica: str) -> None:
        """It goes, or went, there; nothing, if it is over by now."""
        with self._lock:
            if given.id in self._given:
                self._given[given.id] = (replica, given.tokens)

    def note(self, given: Given, generated: int) -> None:
        """So much of it is done."""
        with self._lock:
            if given.id in self._given:
                replica, _ = self._given[given.id]
                self._given[given.id] = (replica, max(0.0, given.tokens - generated))

    def take_back(self, given: Given) -> None:
        """It is nobody's any more."""
        with self._lock:
            self._given.pop(given.id, None)
