"""Problem sets: the bundled ones, local files and folders, and those of the hub.

Knows which kind of source a name means, and the field names that public problem sets use. How files
become rows is in `formats`. Never looks at two problems at once, except to give every problem an
id of its own: equal texts stay different problems.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources

from beamwright.errors import InputError
from beamwright.evaluate.formats import DataRow, DataRows, read_content, read_hub, read_path
from beamwright.search.answers import extract_answer

BUNDLED = ("test", "dev")
NO_ANSWERS = "none"

# In order of priority; the first that is present and not empty counts.
QUESTION_FIELDS = ("problem", "question", "Problem", "Question", "prompt")
ANSWER_FIELDS = (
    "answer", "Answer", "reference_answer", "extracted_groundtruth", "expected_answer",
    "final_answer", "ground_truth", "gold",
)  # fmt: skip
SOLUTION_FIELDS = ("canonical_solution", "solution", "Solution")
_ID_FIELDS = ("unique_id", "id", "ID", "Record ID")
_SUBJECT_FIELDS = ("subject", "type", "Subdomain")
_OTHER_FIELDS = frozenset({*QUESTION_FIELDS, *_ID_FIELDS, *_SUBJECT_FIELDS, "level"})

# Multiple choice (GPQA): options under names of their own, the right one first.
_OPTION_FIELDS = (
    "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3",
)  # fmt: skip
_LETTERS = "ABCD"
_CHOOSE = "Answer with the letter of the correct option."

_GSM8K_MARK = "####"  # a worked solution in an answer field ends with "#### ANSWER"
_ANY_TEXT = ("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair
_LISTED = re.compile(r"""\[\s*(?:"([^"]*)"|'([^']*)')\s*\]""")  # a list of one, as a table holds it
_WHOLE_FLOAT = re.compile(r"([+-]?\d+)\.0+")


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
    the known ones (QUESTION_FIELDS, ANSWER_FIELDS, SOLUTION_FIELDS); the answer field "none" says
    that the right answers are not known.

    Raises:
        InputError: one line that names the file, and the line or row where there is one.
        UnavailableError: if a package is not installed, or the hub cannot be reached.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}")
    data = _read(source, limit)
    questions = QUESTION_FIELDS if problem_field is None else (problem_field,)
    problems = [
        _read_problem(row, index, questions, answer_field) for index, row in enumerate(data.rows)
    ]
    if not problems:
        raise InputError(f"{source}: holds no problems")
    if answer_field != NO_ANSWERS:
        _check_answers(data.rows, problems, problem_field, answer_field)
    unique = _with_unique_ids(problems)
    fields = {"problem": problem_field, "answer": answer_field}
    named = {name: value for name, value in fields.items() if value is not None}
    return ProblemSet(source, tuple(unique[:limit]), data.fingerprint, named)


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
        known = ", ".join(f"bundled:{name}" for name in BUNDLED)
        raise InputError(f"{source}: no such bundled problem set (there are {known})")
    file = resources.files("beamwright").joinpath("bundled", f"{name}.jsonl")
    try:
        return read_content(file.read_bytes(), source)
    except OSError as error:
        raise InputError(f"{source}: missing from this installation") from error


def _check_answers(
    rows: Sequence[DataRow],
    problems: Sequence[Problem],
    problem_field: str | None,
    answer_field: str | None,
) -> None:
    """A hole among the answers is a damaged file: an accuracy would silently leave it out.

    Where no problem has one, a field that nothing reads is likely to be it.
    """
    missing = [problem.index for problem in problems if problem.answer is None]
    if not missing:
        return
    first = rows[missing[0]]
    known = (*ANSWER_FIELDS, *SOLUTION_FIELDS) if answer_field is None else (answer_field,)
    looked = ", ".join(known)
    if len(missing) < len(problems):
        raise InputError(f"{first.where}: no answer, though others have one (looked for {looked})")
    unread = {str(name) for name in first.fields} - _OTHER_FIELDS - {problem_field}
    if unread or answer_field is not None:
        there = ", ".join(map(str, first.fields))
        raise InputError(
            f"{first.where}: no answer (looked for {looked}; there are {there}); name its field "
            f"with --answer-field, or --answer-field {NO_ANSWERS} to go without accuracy"
        )


def _with_unique_ids(problems: Sequence[Problem]) -> list[Problem]:
    """Every problem under an id of its own; the ids in the file go before made-up ones.

    The second problem under one id becomes `ID#INDEX`; without an id, the index is the id.
    """
    owners: dict[str, int] = {}
    for problem in problems:
        if problem.unique_id:
            owners.setdefault(problem.unique_id, problem.index)
    taken, unique = set(owners), []
    for problem in problems:
        name = problem.unique_id
        if owners.get(name) != problem.index:
            name = f"{name}#{problem.index}" if name else str(problem.index)
            while name in taken:
                name += "'"
            taken.add(name)
        unique.append(replace(problem, unique_id=name))
    return unique


# --- from a row to a problem -------------------------------------------------------------------


def _read_problem(
    row: DataRow, index: int, questions: Sequence[str], answer_field: str | None
) -> Problem:
    """The problem in a row; `unique_id` is "" where the row has none.

    Of a multiple choice row (_OPTION_FIELDS) the options become part of the problem, in an
    order drawn from its id and text, and the answer is the letter.
    """
    fields, level = row.fields, row.fields.get("level")
    unique_id = next((str(v) for k in _ID_FIELDS if (v := fields.get(k)) not in (None, "")), "")
    problem, answer = _question(row, questions), None
    if answer_field is None and fields.get(_OPTION_FIELDS[0]) not in (None, ""):
        problem, answer = _multiple_choice(problem, unique_id, row)
    elif answer_field != NO_ANSWERS:
        answer = _answer(row, answer_field)
    return Problem(
        problem=problem,
        answer=answer,
        unique_id=unique_id,
        index=index,
        level=level if isinstance(level, str | int) else None,
        subject=next((v for k in _SUBJECT_FIELDS if isinstance(v := fields.get(k), str)), None),
    )


def _question(row: DataRow, questions: Sequence[str]) -> str:
    present = [name for name in questions if row.fields.get(name) is not None]
    if not present:
        there = ", ".join(map(str, row.fields)) or "no fields"
        raise InputError(
            f"{row.where}: no problem field (looked for {', '.join(questions)}; "
            f"there are {there}); name one with --problem-field"
        )
    for name in present:
        if not isinstance(row.fields[name], str):
            raise InputError(f"{row.where}: field {name!r} is not text")
        if row.fields[name].strip():
            return str(row.fields[name])
    raise InputError(f"{row.where}: the problem is empty")


def _multiple_choice(question: str, unique_id: str, row: DataRow) -> tuple[str, str]:
    """The question with its options A to D, and the right one's letter."""
    options = [_text(row, name) for name in _OPTION_FIELDS]
    for name, option in zip(_OPTION_FIELDS, options, strict=True):
        if not option:
            raise InputError(f"{row.where}: field {name!r} is missing or empty")

    def rank(number: int) -> bytes:
        return hashlib.sha256(f"{number}\0{unique_id}\0{question}".encode(*_ANY_TEXT)).digest()

    order = sorted(range(len(options)), key=rank)
    lines = [f"{letter}) {options[number]}" for letter, number in zip(_LETTERS, order, strict=True)]
    text = "\n".join([question.strip(), "", *lines, "", _CHOOSE])
    return text, _LETTERS[order.index(0)]


def _answer(row: DataRow, answer_field: str | None) -> str | None:
    for name in ANSWER_FIELDS if answer_field is None else (answer_field,):
        text = _text(row, name).rpartition(_GSM8K_MARK)[2].strip()
        if text:
            whole = _WHOLE_FLOAT.fullmatch(text)
            return whole[1] if whole else text
    for name in SOLUTION_FIELDS if answer_field is None else ():
        text = str(row.fields.get(name) or "").strip()
        answer = extract_answer(text)
        # A single line without a marked answer is taken to be the answer itself.
        if answer or (text and "\n" not in text):
            return answer or text
    return None


def _text(row: DataRow, name: str) -> str:
    """A text or number field as text, "" where there is none."""
    value = row.fields.get(name)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and (listed := _LISTED.fullmatch(value.strip())):
        value = listed[1] or listed[2] or ""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise InputError(f"{row.where}: field {name!r} is neither text nor a number")
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables' empty cell
        return ""
    return str(value).strip()
