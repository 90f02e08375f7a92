"""From a row to a problem: the field names that public problem sets use.

Knows names and shapes of fields, one row at a time. Knows no files and does not judge answers.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beamwright.errors import InputError
from beamwright.search.answers import extract_answer

# In order of priority; the first that is present and not empty counts.
QUESTION_FIELDS = ("problem", "question", "Problem", "Question", "prompt")
ANSWER_FIELDS = (
    "answer", "Answer", "reference_answer", "extracted_groundtruth", "expected_answer",
    "final_answer", "ground_truth", "gold",
)  # fmt: skip
SOLUTION_FIELDS = ("canonical_solution", "solution", "Solution")
ID_FIELDS = ("unique_id", "id", "ID", "Record ID")
SUBJECT_FIELDS = ("subject", "type", "Subdomain")

# Multiple choice (GPQA): options under names of their own, the right one first.
OPTION_FIELDS = (
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)
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
class FieldNames:
    """The fields that a user names; None looks for the known ones.

    answer: "none" stands for problems whose right answer is not known.
    """

    problem: str | None = None
    answer: str | None = None

    @property
    def questions(self) -> tuple[str, ...]:
        """Where the problem's text may be."""
        return QUESTION_FIELDS if self.problem is None else (self.problem,)

    @property
    def answers(self) -> tuple[str, ...]:
        """Where the right answer may be, solutions that end with it left out."""
        return ANSWER_FIELDS if self.answer is None else (self.answer,)


def unread_fields(fields: Mapping[str, Any]) -> list[str]:
    """Fields of a row that no problem needs, one of which may hold the right answer."""
    known = {*QUESTION_FIELDS, *ID_FIELDS, *SUBJECT_FIELDS, "level"}
    return [str(name) for name in fields if name not in known]


def read_problem(
    fields: Mapping[str, Any], where: str, index: int, names: FieldNames | None = None
) -> Problem:
    """The problem in a row; `unique_id` is "" where the row has none.

    Of a multiple choice row (OPTION_FIELDS) the options become part of the problem, in an
    order drawn from its id and text, and the answer is the letter.

    Raises:
        InputError: one line that begins with `where`.
    """
    level = fields.get("level")
    unique_id = next((str(v) for k in ID_FIELDS if (v := fields.get(k)) not in (None, "")), "")
    names = names or FieldNames()
    problem = _question(fields, where, names)
    answer: str | None
    if names.answer is None and fields.get(OPTION_FIELDS[0]) not in (None, ""):
        problem, answer = _multiple_choice(problem, unique_id, fields, where)
    else:
        answer = _answer(fields, where, names)
    return Problem(
        problem=problem,
        answer=answer,
        unique_id=unique_id,
        index=index,
        level=level if isinstance(level, str | int) else None,
        subject=next((v for k in SUBJECT_FIELDS if isinstance(v := fields.get(k), str)), None),
    )


def _question(fields: Mapping[str, Any], where: str, names: FieldNames) -> str:
    present = [name for name in names.questions if fields.get(name) is not None]
    if not present:
        there = ", ".join(map(str, fields)) or "no fields"
        raise InputError(
            f"{where}: no problem field (looked for {', '.join(names.questions)}; "
            f"there are {there}); name one with --problem-field"
        )
    for name in present:
        if not isinstance(fields[name], str):
            raise InputError(f"{where}: field {name!r} is not text")
        if fields[name].strip():
            return str(fields[name])
    raise InputError(f"{where}: the problem is empty")


def _multiple_choice(
    question: str, unique_id: str, fields: Mapping[str, Any], where: str
) -> tuple[str, str]:
    """The question with its options A to D, and the right one's letter."""
    options = [_text(fields, name, where) for name in OPTION_FIELDS]
    for name, option in zip(OPTION_FIELDS, options, strict=True):
        if not option:
            raise InputError(f"{where}: field {name!r} is missing or empty")

    def rank(number: int) -> bytes:
        return hashlib.sha256(f"{number}\0{unique_id}\0{question}".encode(*_ANY_TEXT)).digest()

    order = sorted(range(len(options)), key=rank)
    lines = [f"{letter}) {options[number]}" for letter, number in zip(_LETTERS, order, strict=True)]
    text = "\n".join([question.strip(), "", *lines, "", _CHOOSE])
    return text, _LETTERS[order.index(0)]


def _answer(fields: Mapping[str, Any], where: str, names: FieldNames) -> str | None:
    for name in names.answers:
        text = _text(fields, name, where).rpartition(_GSM8K_MARK)[2].strip()
        if text:
            whole = _WHOLE_FLOAT.fullmatch(text)
            return whole[1] if whole else text
    for name in SOLUTION_FIELDS if names.answer is None else ():
        text = str(fields.get(name) or "").strip()
        answer = extract_answer(text)
        # A single line without a marked answer is taken to be the answer itself.
        if answer or (text and "\n" not in text):
            return answer or text
    return None


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """A text or number field as text, "" where there is none."""
    value = fields.get(name)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and (listed := _LISTED.fullmatch(value.strip())):
        value = listed[1] or listed[2] or ""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise InputError(f"{where}: field {name!r} is neither text nor a number")
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables' empty cell
        return ""
    return str(value).strip()
