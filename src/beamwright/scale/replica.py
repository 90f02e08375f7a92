"""Replica: one engine in a process of its own, which solves what it is given until it is stopped.

Knows nothing of Ray: an actor is made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError, NotFiniteError
from beamwright.plugins import load_all
from beamwright.solver.handle import Handle
from beamwright.solver.solver import Solver


@dataclass(frozen=True)
class FarSolution:
    """A solution from another process: what there is to say of it, without its tree."""

    content: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As `Solution.to_json`."""
        return self.content


@dataclass(frozen=True)
class FarError:
    """A problem's error as it crosses processes. kind: whose fault it is."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BeamwrightError) -> FarError:
        """Errors hold what no pickle takes; one line is what anybody is shown."""
        if isinstance(error, InputError):
            return cls("input", str(error))
        return cls("not finite" if isinstance(error, NotFiniteError) else "other", str(error))

    def error(self) -> BeamwrightError:
        """The same kind of error again."""
        kinds = {"input": InputError, "not finite": NotFiniteError}
        return kinds.get(self.kind, BeamwrightError)(self.message)


Outcome = FarSolution | FarError | None
"""None for a problem that was given back before it had begun."""


class Replica:
    """Loads its models at once. plugins: files whose declarations the settings may name."""

    def __init__(self, settings: dict[str, Any], plugins: Sequence[str] = ()) -> None:
        load_all(plugins)
        self._solver = Solver(Settings.model_validate(settings))
        self._handles: dict[str | int, Handle] = {}
        self._given_back: set[str | int] = set()
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """True once the models are loaded."""
        return True

    def solve(self, problem_id: str | int, problem: str) -> Outcome:
        """Solve it beside the others; waits. By any thread."""
        with self._lock:
            self._given_back.discard(problem_id)  # it may come again
            handle = self._handles[problem_id] = self._solver.submit(problem, problem_id=problem_id)
        try:
            return FarSolution(handle.result().to_json())
        except BeamwrightError as error:
            return None if problem_id in self._given_back else FarError.of(error)
        finally:
            with self._lock:
                del self._handles[problem_id]

    def give_back(self, most: int) -> int:
        """Let go of so many problems that have not begun, those that came last; returns how many.

        Each of their `solve` returns None.
        """
        with self._lock:
            waiting = [each for each, handle in self._handles.items() if not handle.begun]
            chosen = waiting[len(waiting) - most :] if most < len(waiting) else waiting
            self._given_back.update(chosen)
            handles = [self._handles[each] for each in chosen]
        for handle in handles:
            handle.cancel()
        return len(handles)
