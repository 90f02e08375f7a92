"""Problem sets: the bundled ones and JSONL files with the field names people use.

Knows files and field names. Does not judge answers and never looks at two problems at once,
except to give every problem an id of its own: equal texts stay different problems.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.search.answers import extract_answer

# In order of priority; the first that is present and not empty counts.
QUESTION_FIELDS = ("problem", "question", "Problem", "prompt")
ANSWER_FIELDS = ("answer", "Answer", "reference_answer", "extracted_groundtruth")
SOLUTION_FIELDS = ("canonical_solution", "solution", "Solution")
ID_FIELDS = ("unique_id", "id")

BUNDLED = ("test", "dev")
_GSM8K_MARK = "####"  # a worked solution in an answer field ends with "#### ANSWER"


@dataclass(frozen=True)
class Problem:
    """One problem. `answer` is None where the file does not say what is right.

    unique_id: unique within its problem set. index: place in the file, from 0.
    """

    problem: str
    answer: str | None
    unique_id: str
    index: int
    level: str | int | None = None
    subject: str | None = None


@dataclass(frozen=True)
class ProblemSet:
    """Problems in file order, under the name that they were asked for by.

    fingerprint: SHA-256 of the whole file, whatever the limit.
    """

    name: str
    problems: tuple[Problem, ...]
    fingerprint: str


def load_problems(source: str, limit: int | None = None) -> ProblemSet:
    """The first `limit` problems of `bundled:test`, `bundled:dev` or a JSONL file.

    The whole file is read and checked even when `limit` is smaller.

    Raises:
        InputError: one line that names the file, and the line where there is one.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}")
    content = _read(source)
    problems: list[Problem] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            problems.append(_parse_line(line, f"{source}, line {number}", len(problems)))
    if not problems:
        raise InputError(f"{source}: holds no problems")
    unique = _with_unique_ids(problems)
    return ProblemSet(source, tuple(unique[:limit]), hashlib.sha256(content).hexdigest())


def _read(source: str) -> bytes:
    if source.startswith("bundled:"):
        name = source.removeprefix("bundled:")
        if name not in BUNDLED:
            known = ", ".join(f"bundled:{each}" for each in BUNDLED)
            raise InputError(f"{source}: no such bundled problem set (there are {known})")
        file = resources.files("beamwright").joinpath("bundled", f"{name}.jsonl")
        try:
            return file.read_bytes()
        except OSError as error:
            raise InputError(f"{source}: missing from this installation") from error
    try:
        return Path(source).read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{source}: no such file") from error
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror})") from error


def _parse_line(line: bytes, where: str, index: int) -> Problem:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InputError(f"{where}: not JSON ({reason})") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: not a JSON object")
    level = fields.get("level")
    subject = fields.get("subject")
    return Problem(
        problem=_question(fields, where),
        answer=_answer(fields, where),
        unique_id=next((str(v) for k in ID_FIELDS if (v := fields.get(k)) not in (None, "")), ""),
        index=index,
        level=level if isinstance(level, str | int) else None,
        subject=subject if isinstance(subject, str) else None,
    )


def _question(fields: dict[str, Any], where: str) -> str:
    present = [name for name in QUESTION_FIELDS if fields.get(name) is not None]
    if not present:
        raise InputError(f"{where}: no problem field (looked for {', '.join(QUESTION_FIELDS)})")
    for name in present:
        if not isinstance(fields[name], str):
            raise InputError(f"{where}: field {name!r} is not text")
        if fields[name].strip():
            return str(fields[name])
    raise InputError(f"{where}: the problem is empty")


def _answer(fields: dict[str, Any], where: str) -> str | None:
    for name in ANSWER_FIELDS:
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise InputError(f"{where}: field {name!r} is neither text nor a number")
        text = "" if value is None else str(value).rpartition(_GSM8K_MARK)[2].strip()
        if text:
            return text
    for name in SOLUTION_FIELDS:
        text = str(fields.get(name) or "").strip()
        answer = extract_answer(text)
        # A single line without a marked answer is taken to be the answer itself.
        if answer or (text and "\n" not in text):
            return answer or text
    return None


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
