"""What callers hand to a Solver, checked and in one form, and one call at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from beamwright.conversation import Conversation, RawPrompt
from beamwright.errors import InputError
from beamwright.solver.options import ProblemOptions

GivenProblem = str | tuple[str | int, str] | tuple[str | int, str, ProblemOptions]
"""A problem's text, or its id and its text, or these and options of its own."""


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


class BatchProblem(NamedTuple):
    """One of several problems: who it is, and what it is asked with but for its priority."""

    problem_id: str | int
    text: str
    options: dict[str, Any]
    priority: int


def asked(problems: Iterable[GivenProblem], common: Mapping[str, Any]) -> list[BatchProblem]:
    """What several problems are asked with; the id of a plain text is its place, from 0.

    common: options of all of them, before which those of one go.

    Raises:
        InputError: if it is one text, or holds something else than texts and such tuples.
    """
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        kind = type(problems).__name__
        raise InputError(f"solve_many takes a list of problems, not {kind}; one goes to solve")
    found = []
    for place, each in enumerate(problems):
        problem_id, text, own = _with_id(place, each)
        options = {**common, **own}
        found.append(BatchProblem(problem_id, text, options, take_priority(options)))
    return found


def _with_id(place: int, problem: Any) -> tuple[str | int, str, Mapping[str, Any]]:
    match problem:
        case str():
            return place, problem, {}
        case (str() | int() as problem_id, str() as text):
            return problem_id, text, {}
        case (str() | int() as problem_id, str() as text, dict() as options):
            return problem_id, text, options
        case _:
            kind = type(problem).__name__
            raise InputError(
                f"problem {place}: give a text or an (id, text) pair, with options or without, "
                f"not {kind}"
            )


def take_priority(options: dict[str, Any]) -> int:
    """Takes it out of the options; 0 where it is not given.

    Raises:
        InputError: if it is no int.
    """
    priority = options.pop("priority", None)
    if type(priority) is not int and priority is not None:
        raise InputError(f"priority: is an int, not {type(priority).__name__}")
    return priority or 0


def check_problem(problem: Any, problem_id: Any) -> None:
    """Raises InputError if they are not a text and an id."""
    if not isinstance(problem, str | Conversation | RawPrompt):
        raise InputError(f"a problem is one text, not {type(problem).__name__}")
    if not isinstance(problem_id, str | int):
        raise InputError(f"problem_id is a str or an int, not {type(problem_id).__name__}")


def check_callback(on_round: Callable[..., None] | None) -> None:
    """Raises InputError if it cannot be called."""
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round is called after every round; {on_round!r} cannot be called")
