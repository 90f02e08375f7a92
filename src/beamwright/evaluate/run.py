"""Run a problem set to the end, resumable. Solving is injected; knows no solver and no models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError, NotFiniteError, UnavailableError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import summarise
from beamwright.evaluate.problems import Problem, ProblemSet
from beamwright.evaluate.results import Record, ResultsFolder, make_error_record, make_record
from beamwright.identity import plugin_code

InFlight = int | Literal["auto"]

_MOST_UNANSWERED = 16
"""Problems in a row that a generator elsewhere has failed, before it counts as gone."""


class Solved(Protocol):
    """A solution, as far as an evaluation looks at it."""

    def to_json(self) -> dict[str, Any]:
        """The object that `solve --json` prints."""
        ...


class SolveMany(Protocol):
    """Solves (id, text) pairs, so many at a time, and gives (id, outcome) as they finish.

    A problem's own error (an InputError; a NotFiniteError, numbers that overflow with this one; an
    UnavailableError, where something elsewhere has failed it) is its outcome, never raised.
    """

    def __call__(
        self, problems: Sequence[tuple[str | int, str]], /, *, in_flight: InFlight
    ) -> Iterable[tuple[str | int, Solved | BeamwrightError]]:
        """Solutions in the order in which they finish."""
        ...


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; none of it changes a result.

    out: folder to write and resume from. in_flight: problems solved at a time; None for as many
    as keep the device busy. on_record: called with a finished record, the number of
    finished problems and that of all; on resuming, first for what was finished before.
    """

    out: Path | None = None
    in_flight: int | None = None
    on_record: Callable[[Record, int, int], None] = lambda record, done, total: None


def run(
    problem_set: ProblemSet,
    solve_many: SolveMany,
    settings: Settings,
    options: RunOptions | None = None,
    checker: AnswerChecker | None = None,
) -> dict[str, Any]:
    """Solve every problem that is not finished yet and return the object of `eval --json`.

    With `options.out`, every problem is on disk as soon as it has finished.

    Raises:
        InputError: if the folder belongs to another run.
        BeamwrightError: what solving raised; everything finished before is kept.
    """
    options = options or RunOptions()
    in_flight: InFlight = "auto" if options.in_flight is None else options.in_flight
    if in_flight != "auto" and in_flight < 1:
        raise InputError(f"--in-flight must be at least 1, got {in_flight}")
    with ExitStack() as stack:
        checker = checker or stack.enter_context(AnswerChecker())
        log = _Log(problem_set, options)
        if options.out is not None:
            identity = _identity(problem_set, settings)
            log.folder = stack.enter_context(ResultsFolder(options.out, identity))
            log.resume()
        _solve(log.unfinished(), in_flight, solve_many, checker, log)
        records = log.in_order()
    return {
        "dataset": problem_set.name,
        **summarise(records, settings.search.n),
        "settings": settings.model_dump(mode="json"),
    }


class _Log:
    """Finished records by id, in memory and, where a folder is open, on disk."""

    def __init__(self, problem_set: ProblemSet, options: RunOptions) -> None:
        self.folder: ResultsFolder | None = None
        self._problems = problem_set.problems
        self._on_record = options.on_record
        self._records: dict[str, Record] = {}

    def resume(self) -> None:
        """Take over what an earlier run finished, as far as it was asked for this time."""
        assert self.folder is not None
        for problem in self._problems:
            record = self.folder.records.get(problem.unique_id)
            if record is not None:
                self._take(record)

    def add(self, record: Record) -> None:
        if self.folder is not None:
            self.folder.add(record)
        self._take(record)

    def _take(self, record: Record) -> None:
        self._records[record.unique_id] = record
        self._on_record(record, len(self._records), len(self._problems))

    def unfinished(self) -> list[Problem]:
        return [each for each in self._problems if each.unique_id not in self._records]

    def in_order(self) -> list[Record]:
        return [self._records[each.unique_id] for each in self._problems]


def _solve(
    problems: Sequence[Problem],
    in_flight: InFlight,
    solve_many: SolveMany,
    checker: AnswerChecker,
    log: _Log,
) -> None:
    if not problems:
        return
    by_id: dict[str | int, Problem] = {problem.unique_id: problem for problem in problems}
    pairs = [(problem.unique_id, problem.problem) for problem in problems]
    unanswered: list[tuple[Problem, UnavailableError]] = []
    for unique_id, outcome in solve_many(pairs, in_flight=in_flight):
        problem = by_id[unique_id]
        if isinstance(outcome, UnavailableError) and len(unanswered) < _MOST_UNANSWERED:
            unanswered.append((problem, outcome))
        elif isinstance(outcome, InputError | NotFiniteError):
            log.add(make_error_record(problem, outcome))
        elif isinstance(outcome, BeamwrightError):
            raise outcome  # not this problem's fault; what has finished is kept
        else:
            log.add(make_record(problem, outcome.to_json(), checker))
            for failed, error in unanswered:  # what answers others is there: it is their own
                log.add(make_error_record(failed, error))
            unanswered.clear()
    for _, error in unanswered:
        raise error


def _identity(problem_set: ProblemSet, settings: Settings) -> dict[str, Any]:
    """What must be equal for a run to go on. A limit may grow: problems do not interact."""
    code = plugin_code(settings)
    return {
        "dataset": problem_set.name,
        "dataset_sha256": problem_set.fingerprint,
        **({"fields": dict(problem_set.named)} if problem_set.named else {}),
        "settings": settings.model_dump(mode="json"),
        **({"code": code} if code else {}),
    }
