"""Solves a problem set and returns its records, or continues a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beamwright import Settings, Solver
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record
from beamwright.evaluate.problems import ProblemSet
from beamwright.evaluate.run import run
from beamwright_lab.common import say

_TOLD = 50


def records_of(
    settings: Settings,
    problems: ProblemSet,
    checker: AnswerChecker,
    out: Path | None,
    what: str,
    in_flight: Any = "auto",
) -> list[Record]:
    """Return one record per problem, in order.

    out: folder of the run, continued if it exists; None to keep nothing. what: name in progress
    messages.
    """
    records: dict[str, Record] = {}

    def keep(record: Record, done: int, total: int) -> None:
        records[record.unique_id] = record
        if done % _TOLD == 0 or done == total:
            right = sum(bool(each.correct) for each in records.values())
            say(f"  {what}: {done}/{total}, {right} right")

    solver: list[Solver] = []

    def solve_many(pairs: Any) -> Any:
        solver.append(Solver(settings))  # a finished run needs no models
        return solver[0].solve_many(pairs, in_flight=in_flight)

    try:
        run(problems, solve_many, settings, checker, out, on_record=keep)
    finally:
        for each in solver:
            each.close()
    return [records[problem.unique_id] for problem in problems.problems]
