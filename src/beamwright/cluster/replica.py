"""Replica: one engine in a process of its own, which solves what it is given until it is stopped.

Knows nothing of Ray: an actor is made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from beamwright import errors
from beamwright.cluster.mirror import Changes, Mirror, TreeNews
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError, NotFiniteError
from beamwright.plugins import load_all
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver

_SIMPLE = (InputError, NotFiniteError)  # told by their line alone


@dataclass(frozen=True)
class FarSolution:
    """A solution from another process: what there is to say of it, without its tree."""

    content: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As `Solution.to_json`."""
        return self.content


@dataclass(frozen=True)
class FarError:
    """A problem's error as it crosses processes. kind: its class in `beamwright.errors`.

    known: its arguments and attributes; None where only its line is sent.
    """

    kind: str
    message: str
    known: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @classmethod
    def of(cls, error: BeamwrightError) -> FarError:
        """What there was of a solution stays where it is; a user's own class is the nearest of
        ours: another process may not have it."""
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        if kind is not type(error):
            simple = next((each for each in _SIMPLE if isinstance(error, each)), BeamwrightError)
            return cls(simple.__name__, str(error))
        facts = {name: value for name, value in vars(error).items() if name != "partial"}
        return cls(kind.__name__, str(error), (error.args, facts))

    def error(self) -> BeamwrightError:
        """The same kind of error again."""
        args, facts = self.known or ((self.message,), {})
        kind: type[BeamwrightError] = getattr(errors, self.kind)
        found = kind.__new__(kind)
        found.args = args
        vars(found).update(facts)
        return found


@dataclass(frozen=True)
class WholeSolution:
    """A solution with its tree, as they cross processes. bare: without it."""

    bare: Solution
    tree: TreeNews

    @classmethod
    def of(cls, solution: Solution) -> WholeSolution:
        """Its tree holds no KV any more."""
        bare = replace(solution, tree=solution.tree.bare())
        return cls(bare, Changes().of_end(solution.tree))

    def solution(self) -> Solution:
        """The same again."""
        mirror = Mirror()
        mirror.hear(self.tree)
        return replace(self.bare, tree=mirror.tree)


Outcome = FarSolution | WholeSolution | FarError | None
"""None for a problem that was given back before it had begun."""


class Replica:
    """Loads its models at once. plugins: files whose declarations the settings may name.

    in_flight: problems at a time; None for as many as keep the device busy.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        plugins: Sequence[str] = (),
        in_flight: int | None = None,
    ) -> None:
        load_all(plugins)
        self._solver = Solver(Settings.model_validate(settings))
        self._solver.most_submitted = in_flight
        self._numbers = count()
        self._handles: dict[int, Handle] = {}
        self._given_back: set[int] = set()
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """True once the models are loaded."""
        return True

    def solve(
        self,
        problem_id: str | int,
        problem: str,
        options: dict[str, Any] | None = None,
        *,
        whole: bool = False,
    ) -> Outcome:
        """Solve it beside the others; waits. By any thread. whole: with its tree."""
        with self._lock:
            number = next(self._numbers)
            handle = self._solver.submit(problem, problem_id=problem_id, **(options or {}))
            self._handles[number] = handle
        try:
            found = handle.result()
            return WholeSolution.of(found) if whole else FarSolution(found.to_json())
        except BeamwrightError as error:
            return None if number in self._given_back else FarError.of(error)
        finally:
            with self._lock:
                del self._handles[number]
                self._given_back.discard(number)

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
