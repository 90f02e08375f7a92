"""Problem sets: the bundled ones, local files and folders, and those of the hub.

Knows which kind of source a name means. How files become rows is in `formats`, how rows become
problems in `fields`. Never looks at two problems at once, except to give every problem an id of
its own: equal texts stay different problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources

from beamwright.errors import InputError
from beamwright.evaluate.fields import (
    ANSWER_FIELDS,
    SOLUTION_FIELDS,
    FieldNames,
    Problem,
    read_problem,
    unread_fields,
)
from beamwright.evaluate.formats import DataRows, read_content, read_hub, read_path

__all__ = ["BUNDLED", "Problem", "ProblemSet", "load_problems"]

BUNDLED = ("test", "dev")
NO_ANSWERS = "none"


@dataclass(frozen=True)
class ProblemSet:
    """Problems in file order, under the name that they were asked for by.

    fingerprint: SHA-256 of all that was read, whatever the limit. named: the fields that the user
    named, by what they hold ("problem", "answer").
    """

    name: str
    problems: tuple[Problem, ...]
    fingerprint: str
    named: Mapping[str, str] = field(default_factory=dict)


def load_problems(
    source: str,
    limit: int | None = None,
    *,
    problem_field: str | None = None,
    answer_field: str | None = None,
) -> ProblemSet:
    """The first `limit` problems of `source`; everything is read and checked all the same, but for
    what lies behind them in a parquet file that holds more than fits (`formats.read_content`).

    `bundled:test` or `bundled:dev`; a JSONL, JSON, CSV or parquet file, or a folder of them
    (`FOLDER@SPLIT` for one split of several); `hf:ORG/NAME`, `hf:ORG/NAME/CONFIG@SPLIT` of the
    hub. Either every problem has an answer, or none has.
    problem_field, answer_field: where the problem and its right answer are, in other fields than
    the known ones (`fields.QUESTION_FIELDS`, `ANSWER_FIELDS`, `SOLUTION_FIELDS`); the answer field
    "none" says that the right answers are not known.

    Raises:
        InputError: one line that names the file, and the line or row where there is one.
        UnavailableError: if a package is not installed, or the hub cannot be reached.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}")
    rows = _read(source, limit)
    names = FieldNames(problem_field, answer_field)
    problems = [
        read_problem(row.fields, row.where, index, names) for index, row in enumerate(rows.rows)
    ]
    if not problems:
        raise InputError(f"{source}: holds no problems")
    if answer_field != NO_ANSWERS:
        _check_answers(rows, problems, names)
    unique = _with_unique_ids(problems)
    named = {name: value for name, value in asdict(names).items() if value is not None}
    return ProblemSet(source, tuple(unique[:limit]), rows.fingerprint, named)


def bundled_samples(count: int) -> list[tuple[str, str]]:
    """The first problems of bundled:dev and their solutions, steps apart by blank lines."""
    rows = _read("bundled:dev").rows
    return [(row.fields["problem"], row.fields["solution"]) for row in rows[:count]]


def _read(source: str, limit: int | None = None) -> DataRows:
    if source.startswith("hf:"):
        return read_hub(source)
    if not source.startswith("bundled:"):
        return read_path(source, limit)
    name = source.removeprefix("bundled:")
    if name not in BUNDLED:
        known = ", ".join(f"bundled:{each}" for each in BUNDLED)
        raise InputError(f"{source}: no such bundled problem set (there are {known})")
    file = resources.files("beamwright").joinpath("bundled", f"{name}.jsonl")
    try:
        return read_content(file.read_bytes(), source)
    except OSError as error:
        raise InputError(f"{source}: missing from this installation") from error


def _check_answers(rows: DataRows, problems: list[Problem], names: FieldNames) -> None:
    """A hole among the answers is a damaged file: an accuracy would silently leave it out.

    Where no problem has one, a field that nothing reads is likely to be it.
    """
    missing = [problem.index for problem in problems if problem.answer is None]
    if not missing:
        return
    first = rows.rows[missing[0]]
    known = (*ANSWER_FIELDS, *SOLUTION_FIELDS) if names.answer is None else (names.answer,)
    if len(missing) < len(problems):
        looked = ", ".join(known)
        raise InputError(f"{first.where}: no answer, though others have one (looked for {looked})")
    unread = [name for name in unread_fields(first.fields) if name != names.problem]
    if unread or names.answer is not None:
        there = ", ".join(map(str, first.fields))
        raise InputError(
            f"{first.where}: no answer (looked for {', '.join(known)}; there are {there}); name "
            f"its field with --answer-field, or --answer-field {NO_ANSWERS} to go without accuracy"
        )


def _with_unique_ids(problems: list[Problem]) -> list[Problem]:
    """Every problem under an id of its own; the ids in the file go before made-up ones.

    The second problem under one id becomes `ID#INDEX`; without an id, the index is the id.
    """
    taken: set[str] = set()
    first_with_id: set[int] = set()
    for problem in problems:
        if problem.unique_id and problem.unique_id not in taken:
            taken.add(problem.unique_id)
            first_with_id.add(problem.index)
    unique = []
    for problem in problems:
        if problem.index not in first_with_id:
            name = f"{problem.unique_id}#{problem.index}" if problem.unique_id else ""
            name = name or str(problem.index)
            while name in taken:
                name += "'"
            taken.add(name)
            problem = replace(problem, unique_id=name)  # noqa: PLW2901
        unique.append(problem)
    return unique
