r"""Normalise answers, so that equal answers become equal texts and can be counted in a vote.

The functions compare texts and exact numbers, without algebra. Order does not matter in a list or a
set; it matters in a tuple. The options of a multiple-choice problem, with letters A to J, are
read from the problem's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from beamwright.search.quantity import (
    LONGEST,
    normalise_layout,
    read_number,
    read_quantity,
    write_number,
)

LETTERS = "ABCDEFGHIJ"

_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~")
_SIZES = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\!")
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_BETWEEN = re.compile(r"(?<!\\)[,;](?![^(\[{]*[)\]}])")  # a separator outside of brackets
_ENCLOSED = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_NAME = re.compile(
    r"\s*((?:[A-Za-z]|\\[a-z]+)(?:'|_\{?\w+\}?|\([a-z]\))?|\([a-z](?:,\s*[a-z])*\))\s*=\s*(?!=)(.+)",
    re.DOTALL,
)


_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
# The letter that begins an option: "A) ..", "A. ..", "**A:** .." at a line's start; "(A)" anywhere.
_MARK = re.compile(r"(?:^[ \t>*_-]*([A-J])[).:]|(?<![A-Za-z0-9])\(([A-J])\)\}?)[*_]*", re.MULTILINE)
_NAMED = re.compile(
    r"(?P<word>(?i:the\s+)?(?i:correct\s+)?(?i:option|choice|answer|letter)(?:\s+is)?\s*:?\s*)?"
    r"(?:\((?P<enclosed>[A-J])\)|(?P<bare>[A-J]))"
    r"(?:$|(?P<mark>[).:](?=[\s\\]|$)|\)(?=\S)|\s(?=\s*(?:because|since)\b))?"
    r"(?:\\[ ,;]|\s)*(?P<text>.*))",
    re.DOTALL,
)
_AROUND = re.compile(r"^(?:\\[ ,;]|[\s$~])+|(?:\\q?quad|\\text(?:bf)?\s*\{\s*\}?|[\s$~;,]|\\ )+$")
_DASH = re.compile(r"[-\u2013\u2014]\s+(?=[A-Za-z]{3}|[A-Za-z]+ [A-Za-z])")


def split_list(text: str) -> tuple[str, list[str]]:
    """Split a list, set or tuple into its brackets ("" for none) and its items.

    A text that is not a list is returned as one item. `1 and 2` is a list, and so is `\\pm 3`.
    """
    text = _SPACES.sub(" ", _SIZES.sub("", text)).strip()
    if re.search(r"\d|\\", text) and not re.search(r"[<>]|\\[lg]eq?(?![a-z])", text):
        text = _AND.sub(", ", text)
    if re.search(r",\s", text):
        # A comma without a space after it separates thousands, not items.
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    enclosed, brackets = _ENCLOSED.fullmatch(text), ""
    if enclosed and not re.match(r"[^(\[{]*[)\]}]", enclosed[2]):
        text, brackets = enclosed[2], enclosed[1] + enclosed[3]
    items = _BETWEEN.split(text)
    if len(items) == 1 and text.count("\\pm") == 1:
        items = [text.replace("\\pm", "+"), text.replace("\\pm", "-")]
    return brackets, items


def _split_names(items: Sequence[str]) -> list[tuple[str, str]]:
    """Split each item into a variable's name and a value, such as `x` and `1` for `x=1`.

    All names are "" if they begin with the same letter, because `x=1, x=2` and `x_1=1, x_2=2` both
    mean `1, 2`.
    """
    named = [
        (match[1], match[2]) if (match := _NAME.fullmatch(item)) else ("", item) for item in items
    ]
    several = len({name[:1] for name, _ in named if name}) > 1
    return [(name * several, value) for name, value in named]


@lru_cache(maxsize=4096)  # many candidates of a problem have the same answer
def normalise_answer(answer: str) -> str:
    r"""Return one text for all equal answers, for votes and for evaluation.

    Answers that are equal only by algebra keep different texts. Equal are, for example: `\frac12`,
    `0.5` and `1/2`; `2\sqrt3` and `2\sqrt{3}`; `1, 2` and `\{2,1\}`; `28\%`, `28 percent` and `28`;
    `1.6 miles` and `1.6`; `9 + 8 = 17` and `17`; `Odd` and `odd`.
    """
    if letter := option_letter(answer):
        return letter
    quantity = read_quantity(answer)
    if quantity.is_text:
        return normalise_layout(answer)
    # The words are part of the answer unless its value is a number: "am" in 7:30 am is no unit.
    is_number = read_number(normalise_layout(quantity.value)) is not None
    return " ".join(
        [canonical_value(quantity.value), *([] if is_number else sorted(quantity.words))]
    )


def canonical_value(value: str) -> str:
    """Return one text for all equal values: numbers, lists or formulas without a unit."""
    plain = normalise_layout(value)
    if (number := read_number(plain)) is not None:
        return write_number(number)
    brackets, items = split_list(value) if len(value) <= LONGEST else ("", [value])
    if len(items) > 1 or (brackets and items[0].strip()):
        named = [(name, normalise_answer(item)) for name, item in _split_names(items)]
        keys = [f"{name}={key}".removeprefix("=") for name, key in named]
        if brackets in ("", "\\{\\}"):
            keys, brackets = sorted(set(keys)), "\\{\\}"
        half = len(brackets) // 2
        return keys[0] if len(keys) == 1 else brackets[:half] + ",".join(keys) + brackets[half:]
    *before, last = re.split(r"(?<![<>!=\\])=(?!=)", value)
    if before and (_NAME.fullmatch(value) or read_number(normalise_layout(before[0])) is not None):
        return canonical_value(last)
    return plain.casefold() if re.fullmatch(r"[A-Za-z' -]{2,}", plain) else plain


# --- options ------------------------------------------------------------------------------------


def split_option(answer: str) -> tuple[str, str] | None:
    r"""Split an answer into an option's letter and the text after it; None without a letter.

    Reads `B`, `(B) 12 cm`, `B: 12 cm`, `Option B`, `E - a risk score`, `\textbf{(B)}\ 12`.
    """
    match = _NAMED.fullmatch(_WRAPPED.sub(r"\1", answer).strip(" $*_\n").removesuffix("."))
    if match is None:
        return None
    text, dash = match["text"] or "", _DASH.match(match["text"] or "")
    if text and not (match["enclosed"] or match["mark"] or dash):
        return None
    # A formula or a list of letters, as in "(A)/2" or "(A), (B)", names no single option.
    if match["enclosed"] and text[:1] in tuple("+-*/^=,&<>"):
        return None
    return match["enclosed"] or match["bare"], text[dash.end() :] if dash else text


def option_letter(answer: str) -> str | None:
    """Return the option's letter that an answer states, with or without the option's text.

    None if the answer states no letter.
    """
    option = split_option(answer)
    return option[0] if option else None


def read_options(problem: str) -> dict[str, str]:
    """Return the texts of a multiple-choice problem's options, by letter; empty if it has none."""
    marks = list(_MARK.finditer(problem))
    letters = "".join(mark[1] or mark[2] for mark in marks)
    number = max((n for n in range(2, len(LETTERS) + 1) if LETTERS[:n] in letters), default=0)
    place = letters.find(LETTERS[:number])
    ends = [*(mark.start() for mark in marks), len(problem)]
    texts = [problem[mark.end() : end] for mark, end in zip(marks, ends[1:], strict=True)]
    listed = [_AROUND.sub("", text.strip().partition("\n")[0]) for text in texts[place:]]
    return dict(zip(LETTERS[:number], listed, strict=False))


def chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that an answer states by letter or by text; None if none.

    options: the problem's options (`read_options`).
    """
    key = normalise_answer(answer)
    same = [
        letter
        for letter, text in options.items()
        if key in (letter, letter.lower(), normalise_answer(text))
    ]
    return same[0] if len(same) == 1 else option_letter(answer) if same else None
