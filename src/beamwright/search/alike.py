r"""When two answers are one without algebra: lists, options, and the key that votes are counted by.

Pure text and exact numbers. The order of a list or a set is free, that of a tuple is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from beamwright.search.exact import read_number, write_number
from beamwright.search.letters import letter_of
from beamwright.search.quantity import layout, read_quantity

_LONGEST = 400  # characters of an answer that is looked into
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~")
_SIZES = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\!")
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_BETWEEN = re.compile(r"(?<!\\)[,;](?![^(\[{]*[)\]}])")  # outside brackets
_ENCLOSED = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_NAME = re.compile(
    r"\s*((?:[A-Za-z]|\\[a-z]+)(?:'|_\{?\w+\}?|\([a-z]\))?|\([a-z](?:,\s*[a-z])*\))\s*=\s*(?!=)(.+)",
    re.DOTALL,
)


def split_list(text: str) -> tuple[str, list[str]]:
    """The brackets around a list, set or tuple, "" without any, and its items.

    What is no list is a single item. `1 and 2` is a list, and so is `\\pm 3`.
    """
    text = _SPACES.sub(" ", _SIZES.sub("", text)).strip()
    if re.search(r"\d|\\", text) and not re.search(r"[<>]|\\[lg]eq?(?![a-z])", text):
        text = _AND.sub(", ", text)
    if re.search(r",\s", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # thousands in a list
    enclosed, brackets = _ENCLOSED.fullmatch(text), ""
    if enclosed and not re.match(r"[^(\[{]*[)\]}]", enclosed[2]):
        text, brackets = enclosed[2], enclosed[1] + enclosed[3]
    items = _BETWEEN.split(text)
    if len(items) == 1 and text.count("\\pm") == 1:
        items = [text.replace("\\pm", "+"), text.replace("\\pm", "-")]
    return brackets, items


def _named(items: Sequence[str]) -> list[tuple[str, str]]:
    """Name and value of each item: `x=1, x=2` and `x_1=1, x_2=2` say `1, 2`, and name nothing."""
    named = [
        (found[1], found[2]) if (found := _NAME.fullmatch(item)) else ("", item) for item in items
    ]
    several = len({name[:1] for name, _ in named if name}) > 1
    return [(name * several, value) for name, value in named]


@lru_cache(maxsize=4096)  # of one problem's candidates, most say the same, and are asked often
def normalise_answer(answer: str) -> str:
    r"""One text for answers that evaluation calls equal, as far as exact numbers can tell.

    `\frac12`, `0.5` and `1/2` are one, as are `2\sqrt3` and `2\sqrt{3}`; `1, 2` and `\{2,1\}`;
    `28\%`, `28 percent` and `28`; `1.6 miles` and `1.6`; `9 + 8 = 17` and `17`; `Odd` and `odd`.
    """
    if letter := letter_of(answer):
        return letter
    found = read_quantity(answer)
    if found.is_odd:
        return layout(answer)
    # 7:30 am is no number of what is counted.
    is_number = read_number(layout(found.value)) is not None
    return " ".join([key_of(found.value), *([] if is_number else sorted(found.words))])


def key_of(value: str) -> str:
    """The same of a value that stands alone."""
    plain = layout(value)
    if (number := read_number(plain)) is not None:
        return write_number(number)
    brackets, items = split_list(value) if len(value) <= _LONGEST else ("", [value])
    if len(items) > 1 or (brackets and items[0].strip()):
        named = [(name, normalise_answer(item)) for name, item in _named(items)]
        keys = [f"{name}={key}".removeprefix("=") for name, key in named]
        if brackets in ("", "\\{\\}"):
            keys, brackets = sorted(set(keys)), "\\{\\}"
        half = len(brackets) // 2
        return keys[0] if len(keys) == 1 else brackets[:half] + ",".join(keys) + brackets[half:]
    *before, last = re.split(r"(?<![<>!=\\])=(?!=)", value)
    if before and (_NAME.fullmatch(value) or read_number(layout(before[0])) is not None):
        return key_of(last)
    return plain.casefold() if re.fullmatch(r"[A-Za-z' -]{2,}", plain) else plain


def choice_of(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer is, by its letter or by its text alone."""
    key = normalise_answer(answer)
    same = [
        letter
        for letter, text in options.items()
        if key in (letter, letter.lower(), normalise_answer(text))
    ]
    return same[0] if len(same) == 1 else letter_of(answer) if same else None
