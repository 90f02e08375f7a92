"""`solve_many(ray=...)`: problems that engines elsewhere solve, as this one would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError
from beamwright.protocols import RoundCallback
from beamwright.solver.request import BatchProblem, UserParts
from beamwright.solver.scheduler import Outcome
from beamwright.solver.solution import Solution

SentProblem = tuple[str | int, str, dict[str, Any]]


Spreads = Callable[
    [Settings, Sequence[SentProblem], int | None], Iterator[tuple[str | int, Outcome]]
]
"""Has problems solved by engines elsewhere, such as `cluster.OnRay`: (id, outcome) as they end, of
so many at a time in each engine, None for what keeps it busy."""


def check_spread(
    own: UserParts, given: Sequence[BatchProblem], on_round: RoundCallback | None
) -> list[SentProblem]:
    """The problems as they are sent, those of a larger priority first.

    Raises:
        InputError: for what cannot be sent: objects of the user's own, and two of one id.
    """
    if own != UserParts():
        raise InputError("ray: a strategy, schedule, verifier or stop goes by name, from a plugin")
    if on_round is not None:
        raise InputError("ray: rounds are not told of; trees are in the solutions")
    for each in given:
        for name, value in each.options.items():
            if callable(value) or callable(getattr(value, "select", None)):
                raise InputError(f"ray: {name}: goes by name, from a plugin")
    if len({each.problem_id for each in given}) < len(given):
        raise InputError("ray: every problem needs an id of its own")
    ordered = sorted(given, key=lambda each: -each.priority)
    return [(each.problem_id, each.text, each.options) for each in ordered]


def in_order(
    given: Sequence[BatchProblem], ended: Iterator[tuple[str | int, Outcome]]
) -> list[Solution | BeamwrightError]:
    """Outcomes in the order of the problems, when all have ended."""
    by_id = dict(ended)
    return [by_id[each.problem_id] for each in given]
