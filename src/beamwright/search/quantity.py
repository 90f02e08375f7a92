r"""An answer's layout, its value, and what stands around that: units, what is counted, percents.

One convention for all spellings, in `\text{}` or not: an answer may leave out a unit or what is
counted, and not name another one. Words behind a number are a unit where they are a known one, and
what is counted where they are a plural; words that make another number of it ("half", "squared",
"if n is even") belong to it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from functools import cache, reduce
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from beamwright.io import read_yaml
from beamwright.search.exact import read_number

_LONGEST = 400  # characters of an answer that is looked into
_MOST_LAYERS = 16
_AROUND = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\"(.*)\"|`(.*)`|(.*?)(?<!\.\.)(?<!\\right)\.",
    re.DOTALL,
)
_GAP = r"(?:\\[!,;: ]|\\q?quad(?![a-z])|~|\s)++"
_OPEN = r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{\s*"
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_PARTS = {"<GAP>": _GAP, "<OPEN>": _OPEN, "<TEXT>": _TEXT.pattern}
_THOUSANDS = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?:\.\d+)?"
)  # 1,00,000, too
_WRAPPED = r"\\(?:text|mathrm|mbox|textbf|textrm|operatorname)\s*\{[^{}]*\}"
_RAISED = r"(?:\s*\^\s*\{?-?\d\}?)?"
_WORD = r"[A-Za-z][A-Za-z.'/-]*"
_TAIL = re.compile(
    rf"(?P<value>.+?)(?P<tail>(?>(?:{_GAP})?(?<![_^\\]){_WRAPPED}{_RAISED}"
    rf"|(?<=[\d}})\]!%]){_GAP}{_WORD}{_RAISED}|(?<=\d)[A-Za-z]{{2,}}{_RAISED})"
    rf"(?>(?:{_GAP})?{_WRAPPED}{_RAISED}|{_GAP}[(]?{_WORD}[)]?{_RAISED}|\s*/\s*{_WORD})*+)"
)
_FACTOR = re.compile(r"([A-Za-z]+)(?:\s*\^\s*(\d+))?")


@cache
def _spellings() -> dict[str, Any]:
    """The rules as they are written: read at the first answer, not at import."""
    rules: dict[str, Any] = read_yaml(Path(__file__).with_name("spellings.yaml"), "spellings")
    return rules


@cache
def _rules(name: str) -> list[tuple[re.Pattern[str], str]]:
    rules = []
    for written, replacement, *pairs in _spellings()[name]:
        pattern = reduce(lambda text, part: text.replace(*part), _PARTS.items(), written)
        for key, value in (pairs[0] if pairs else {"": ""}).items():
            compiled = re.compile(pattern.replace("KEY", key))
            rules.append((compiled, replacement.replace("VALUE", str(value))))
    return rules


def _is_one_of(words: str, word: str) -> bool:
    """True for one of the words of this name."""
    return re.fullmatch("|".join(_spellings()[words].split()), word) is not None


@cache
def _units() -> dict[str, tuple[str, int, Fraction]]:
    """What each spelling of a unit measures, its power, and its size."""
    return {
        spelling: (dimension, int(power), Fraction(size))
        for dimension, power, size, *spellings in map(str.split, _spellings()["units"])
        for spelling in spellings
    }


class Unit(NamedTuple):
    """What a unit measures, as sorted (dimension, power) pairs, and its size in base units."""

    dimension: tuple[tuple[str, int], ...]
    factor: Fraction


class Quantity(NamedTuple):
    """An answer without what stands behind its value.

    words: what is counted, and what qualifies a unit, in stems. in_percent: of a hundred.
    is_odd: words follow that nobody can drop, so that it is compared as text alone; value is then
    all of it.
    """

    value: str
    unit: Unit | None = None
    words: frozenset[str] = frozenset()
    in_percent: bool = False
    is_odd: bool = False


def trim(answer: str) -> str:
    """`answer` without surrounding space, math marks, quotes and a final period."""
    answer = answer.strip()
    for _ in range(_MOST_LAYERS):
        if not (found := _AROUND.fullmatch(answer)):
            break
        answer = found[found.lastindex or 0].strip()
    return answer


def _spelled(text: str, rules: str) -> str:
    """`text` by the rules of this name."""
    for pattern, replacement in _rules(rules):
        text = pattern.sub(replacement, text).strip()
    return text


def _is_long(text: str) -> bool:
    """Whether a text is no value: work on it grows with the square of its length."""
    return len(text) > 2 * _LONGEST


def tidy(answer: str) -> str:
    """The same answer without emphasis, a name and an approximation, in one spelling of signs."""
    text = trim(trim(answer).strip("*,"))
    if _is_long(text):
        return text
    text = _spelled(text, "folded")
    whole = _TEXT.fullmatch(text)
    return trim(whole[1] if whole and re.search(r"\d", whole[1]) else text)


def layout(answer: str) -> str:
    r"""One spelling for answers that differ in layout only: `$1,000$` is `1000`.

    LaTeX spacing, `\left`, `\right`, `\text{...}`, the `d` of `\dfrac` and marks of thousands go;
    `1 1/2` becomes a mixed fraction. A space behind a comma makes a list of `10, 100`. Two answers
    of one layout are the same answer; the reverse does not hold.
    """
    if _is_long(text := tidy(answer)):
        return " ".join(text.split())
    text = _spelled(text, "layout")
    grouped = re.fullmatch(rf"[+-]?\d{{1,3}}(?:{_GAP}\d{{3}})+(?:\.\d+)?", text) is not None
    spaced = re.sub(r"(?<!\\)\\[!,;: ]|\\q?quad\b|\\(?:left|right)(?![A-Za-z])|~|\s+", " ", text)
    # Words keep one space between them ("two apples"); formulas keep none, but 1 2 is not 12.
    words = re.fullmatch(r"[A-Za-z' -]+", spaced) is not None
    if not words and not grouped:
        spaced = _spelled(spaced, "apart")
    text = " ".join(spaced.split()) if words else _without_spaces(spaced)
    if re.fullmatch(r"\([A-Za-z]\)", text):  # a multiple-choice letter
        return text[1]
    text = text.replace("{,}", ",").replace("{:}", ":")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _without_spaces(text: str) -> str:
    """`text` without spaces, but for the escaped one that keeps two numbers apart."""
    return "\\ ".join("".join(part.split()) for part in re.split(r"(?<!\\)\\ ", text))


# --- what stands behind a value ----------------------------------------------------------------


def read_quantity(answer: str, *, bare: bool = False) -> Quantity:
    r"""An answer's value, and what of it may be left out.

    Reads `5\text{ cm}^2`, `18 inches`, `10 km per hour`, `\$18 in total`, `90^\circ`, `60 eggs`,
    `3 million`, `28\%`. bare: a letter alone (`5 N`) is a unit, too; otherwise it is a variable,
    unless it is inside `\text{}`.
    """
    if _is_long(text := tidy(answer)):
        return Quantity(text, is_odd=True)
    spelled = _spelled(text, "behind") if len(text) <= _LONGEST else text
    match = _TAIL.fullmatch(spelled)
    value, tail = match.groups() if match else (spelled, "")
    first, *others = words = _spelled(tail, "words").split() or [""]
    letter = re.match(r"[A-Za-z](?![A-Za-z.])", first) and "{" not in tail
    is_list = first in ("and", "or") and all(len(word) == 1 for word in others)
    if is_list or (letter and not (bare and not others and _parse_unit(first))):
        return Quantity(text)
    # "60 in all" is not in inches.
    ends = [n for n in range(len(words), 0, -1) if words[n - 1] != "in" or n == len(words)]
    units = ((_parse_unit(" ".join(words[:end])), end) for end in ends)
    unit, end = next((found for found in units if found[0]), (None, 0))
    percent = re.search(r"\s*\\?%\s*$", value)
    value = value[: percent.start()] if percent else value
    rest = re.sub(r"\b(of|in|on|at|per) (?:an?|the)\b", r"\1", " ".join(words[end:]).lower())
    names = re.sub(r"[.,]|\^\d", "", rest).split()
    changed = (
        any(_is_one_of("changes", name) for name in names)
        or names[:1] == ["times"] != names
        or any(_is_one_of("changes_first", name) for name in names[:1])
    )
    if changed or not (unit or percent or _is_counted(value, names)):
        return Quantity(text, is_odd=True)
    stems = frozenset(name.removesuffix("s") for name in names if not _is_one_of("filler", name))
    return Quantity(value, unit, stems, bool(percent))


def _is_counted(value: str, words: list[str]) -> bool:
    """True for a noun in the plural, or of one or less, and for words that add nothing."""
    phrase = list(takewhile(lambda word: not _is_one_of("preposition", word), words))
    noun = [word for word in phrase if not _is_one_of("filler", word)][-1:]
    if not noun or _is_one_of("plural", noun[0]):
        return True
    return value == "1" or re.fullmatch(r"-?(\d+/\d+|0?\.\d+|\\[dt]?frac.*)", value) is not None


def _parse_unit(text: str) -> Unit | None:
    """The unit that `text` spells: factors such as `square feet`, `m^2`, below and above a `/`."""
    text = _spelled(_spellings()["rates"].get(text.strip(" ."), text), "powers")
    above, _, below = text.partition("/")
    sides = [(each, 1) for each in _FACTOR.findall(above)]
    sides += [(each, -1) for each in _FACTOR.findall(below)]
    units = _units()
    factors = [
        (name if name in units or len(name) == 1 else name.lower(), sign * int(power or 1))
        for (name, power), sign in sides
    ]
    if not factors or any(name not in units for name, _ in factors):
        return None
    powers: Counter[str] = Counter()
    for name, by in factors:
        powers[units[name][0]] += by * units[name][1]
    size = math.prod(units[name][2] ** by for name, by in factors)
    return Unit(tuple(sorted(powers.items())), Fraction(size))


def counted_number(answer: str) -> str | None:
    """The number that an answer is, without what it measures or counts; None for anything else."""
    found = read_quantity(answer, bare=True)
    return None if found.is_odd or read_number(layout(found.value)) is None else found.value
