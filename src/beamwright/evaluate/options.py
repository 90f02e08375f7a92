"""Multiple-choice problems: read the options and the right letter from a row of a data set.

Supported formats: GPQA (one field per option, the right one first), MMLU and MMLU-Pro (a list, and
a letter or a number from 0), ARC (texts and labels), and options by letter in columns or a
dictionary. Letters follow the row's order. GPQA's options are shuffled by a hash, since the right
one always comes first.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from beamwright.errors import InputError
from beamwright.search.answer_keys import LETTERS, option_letter, read_options

_LISTS = ("choices", "options")
_RIGHT = ("answerKey", "answer", "answer_index", "answer_idx", "label", "correct", "gold")
_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_ASKED = "Answer with the letter of the correct option."
# Column names that suggest options in an unknown format, which is an error.
_LOOKS_LIKE = re.compile(
    r"(?:\w+_)?(?:choices?|options?|endings?|distractors?|alternatives)(?:_?(?:[a-j]|\d))?"
    r"|op[a-j]|sol_?\d|answer_?[a-j]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ProblemRow:
    """The fields of one row by name. where: its file and line or row number, for messages."""

    where: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a text or number field as text; "" if it is missing or empty."""
        value = self.fields.get(name)
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal | None):
            raise InputError(f"{self.where}: field {name!r} is neither text nor a number")
        # NaN is an empty cell of a table.
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        return str(value).strip()


def with_answer_options(
    row: ProblemRow, question: str, unique_id: str, answer_field: str | None, *, is_whole: bool
) -> tuple[str, str | None] | None:
    """Return the problem's text with its options, and the right letter; None without options.

    answer_field: the field of the right option, if the user named one.
    is_whole: True if the question text already contains the options.

    Raises:
        InputError: for unreadable options, options in an unknown field, or a right answer that is
            not one of the options.
    """
    if answer_field is None and row.text(_GPQA[0]):
        texts = [row.text(name) for name in _GPQA]
        if not all(texts):
            missing = _GPQA[texts.index("")]
            raise InputError(f"{row.where}: field {missing!r} is missing or empty")

        def rank(number: int) -> bytes:
            drawn = f"{number}\0{unique_id}\0{question}"
            return hashlib.sha256(drawn.encode("utf-8", "surrogatepass")).digest()

        order = sorted(range(len(texts)), key=rank)
        return _listed(question, [texts[n] for n in order]), LETTERS[order.index(0)]
    labels, texts = _options(row)
    given = [str(name) for name, value in row.fields.items() if value not in _NOTHING]
    unknown = [name for name in given if _LOOKS_LIKE.fullmatch(name)]
    if unknown and not texts and not is_whole:
        raise InputError(
            f"{row.where}: field {unknown[0]!r} looks like an answer option, which the model would "
            "not see. Put all options into a list 'choices', or name a field that contains the "
            "whole question with --problem-field"
        )
    if not texts:
        return None
    if not 2 <= len(texts) <= len(LETTERS) or not all(texts):
        raise InputError(f"{row.where}: needs 2 to {len(LETTERS)} options, none empty")
    names = _RIGHT if answer_field is None else (answer_field,)
    found = next((name for name in names if row.fields.get(name) not in _NOTHING), None)
    text = question if is_whole else _listed(question, texts)
    return text, found and _letter(row, found, labels, texts)


def _options(row: ProblemRow) -> tuple[list[str], list[str]]:
    """Return the labels and the texts of the options."""
    name = next((name for name in _LISTS if row.fields.get(name) not in _NOTHING), "")
    if not name and not (row.fields.get("A") and row.fields.get("B")):
        return [], []
    columns = {letter: row.fields[letter] for letter in LETTERS if row.fields.get(letter)}
    listed: Any = row.fields[name] if name else columns
    if isinstance(listed, list | tuple):
        listed = dict(zip([*LETTERS, *range(len(listed))], listed, strict=False))
    elif isinstance(listed, Mapping) and {"label", "text"} <= listed.keys():
        listed = dict(zip(listed["label"], listed["text"], strict=False))
    if not isinstance(listed, Mapping):
        raise InputError(f"{row.where}: field {name!r} is not a list of options")
    return [*map(str, listed)], [
        ProblemRow(row.where, {name: each}).text(name) for each in listed.values()
    ]


def _letter(row: ProblemRow, name: str, labels: Sequence[str], texts: Sequence[str]) -> str:
    """Return the right option's letter, given as its label, its number from 0, or its text."""
    said = row.text(name)
    ways = [labels, texts, [*map(str, range(len(texts)))], [*LETTERS[: len(texts)]]]
    if isinstance(row.fields[name], int):
        ways = [labels, ways[2]]
    found = [way.index(each) for way in ways for each in (said, option_letter(said)) if each in way]
    if not found:
        raise InputError(f"{row.where}: field {name!r} ({said}) is not one of {len(texts)} options")
    return LETTERS[found[0]]


def _listed(question: str, options: Sequence[str]) -> str:
    """Append the options to the question, unless the question lists them already."""
    if len(read_options(question)) == len(options):
        return question
    lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question.strip(), "", *lines, "", _ASKED])
