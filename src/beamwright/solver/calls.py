"""What callers hand to a Solver, checked and in one form, and one call at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from beamwright.errors import InputError

GivenProblem = str | tuple[str | int, str]
"""A problem's text, or its id and its text."""


class OneAtATime:
    """Calls from several threads take turns; a call from inside a call is refused.

    A solver's KV, budgets and peaks belong to the search that runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the calls of other threads to end, and keep them waiting.

        Raises:
            InputError: if this thread is in the middle of a call: it would wait for ever.
        """
        if self._owner == threading.get_ident():
            raise InputError(
                "this Solver is in the middle of a search: its callbacks and verifier cannot "
                "call it again; make another Solver for them"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


def as_path(value: str | os.PathLike[str], name: str) -> Path:
    """Raises InputError if `value`, an argument of this name, is no path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name}: a path is a str or a Path, not {type(value).__name__}")
    return Path(value)


def with_ids(problems: Iterable[GivenProblem]) -> list[tuple[str | int, str]]:
    """(id, text) pairs; the id of a plain text is its place, from 0.

    Raises:
        InputError: if it is one text, or holds something else than texts and pairs.
    """
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        kind = type(problems).__name__
        raise InputError(f"solve_many takes a list of problems, not {kind}; one goes to solve")
    return [_with_id(place, each) for place, each in enumerate(problems)]


def _with_id(place: int, problem: Any) -> tuple[str | int, str]:
    match problem:
        case str():
            return place, problem
        case (str() | int() as problem_id, str() as text):
            return problem_id, text
        case _:
            kind = type(problem).__name__
            raise InputError(f"problem {place}: give a text or an (id, text) pair, not {kind}")


def check_problem(problem: Any, problem_id: Any) -> None:
    """Raises InputError if they are not a text and an id."""
    if not isinstance(problem, str):
        raise InputError(f"a problem is one text, not {type(problem).__name__}")
    if not isinstance(problem_id, str | int):
        raise InputError(f"problem_id is a str or an int, not {type(problem_id).__name__}")


def check_callback(on_round: Callable[..., None] | None) -> None:
    """Raises InputError if it cannot be called."""
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round is called after every round; {on_round!r} cannot be called")
