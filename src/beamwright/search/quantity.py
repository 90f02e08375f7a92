r"""An answer's layout, its exact value, and what stands around that: units, what is counted.

One convention for all spellings, in `\text{}` or not: an answer may leave out a unit or what is
counted, and not name another one. Words behind a number are a unit where they are a known one, and
what is counted where they are a plural; words that make another number of it ("half", "squared",
"if n is even") belong to it. Exact are numbers and arithmetic as answers write it: `\frac{3}{4}`,
`2^{-99}`, `1.5\times10^3`, `5!`; letters, roots and functions have no value here. Work is bounded.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache, reduce
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from beamwright.io import read_yaml

LONGEST = 400  # characters of an answer that is looked into
_MOST = 2 * LONGEST  # of any text: work on it grows with the square of its length
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


def tidy(answer: str) -> str:
    """The same answer without emphasis, a name and an approximation, in one spelling of signs."""
    text = trim(trim(answer).strip("*,"))
    if len(text) > _MOST:
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
    if len(text := tidy(answer)) > _MOST:
        return " ".join(text.split())
    text = _spelled(text, "layout")
    grouped = re.fullmatch(rf"[+-]?\d{{1,3}}(?:{_GAP}\d{{3}})+(?:\.\d+)?", text) is not None
    spaced = re.sub(r"(?<!\\)\\[!,;: ]|\\q?quad\b|\\(?:left|right)(?![A-Za-z])|~|\s+", " ", text)
    # Words keep one space between them ("two apples"); formulas keep none, but 1 2 is not 12.
    words = re.fullmatch(r"[A-Za-z' -]+", spaced) is not None
    if not words and not grouped:
        spaced = _spelled(spaced, "apart")
    text = " ".join(spaced.split())
    if not words:  # but for the escaped space that keeps two numbers apart
        text = re.sub(r"(?<!\\)(\\ )|\s+", r"\1", spaced)
    if re.fullmatch(r"\([A-Za-z]\)", text):  # a multiple-choice letter
        return text[1]
    text = text.replace("{,}", ",").replace("{:}", ":")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


# --- what stands behind a value ----------------------------------------------------------------


def read_quantity(answer: str, *, bare: bool = False) -> Quantity:
    r"""An answer's value, and what of it may be left out.

    Reads `5\text{ cm}^2`, `18 inches`, `10 km per hour`, `\$18 in total`, `90^\circ`, `60 eggs`,
    `3 million`, `28\%`. bare: a letter alone (`5 N`) is a unit, too; otherwise it is a variable,
    unless it is inside `\text{}`.
    """
    if len(text := tidy(answer)) > _MOST:
        return Quantity(text, is_odd=True)
    spelled = _spelled(text, "behind") if len(text) <= LONGEST else text
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


# --- exact arithmetic --------------------------------------------------------------------------

_MOST_BITS = 1 << 16  # of a power
_MOST_FACTORIAL = 2500
_MOST_GROUPS = 40
_DEEPEST = 8  # groups in groups
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
_GROUP = r"\s*(?:\{([^{}]*)\}|(\d))"  # a digit needs no braces
# To Python's arithmetic, group by group from the inside out.
_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:times|cdot)(?![a-z])", "*"),
        (r"\\div(?![a-z])", "/"),
        # 2 1/2 is 5/2, not 2 * 1/2.
        (r"(?<![\d.)^])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\2/\3)"),
        # 0.1666... is a sum, of which a cycle's digits are divided by as many nines.
        (
            r"(\d*\.(\d*))\\(?:overline|bar)\{?(\d+)\}?",
            lambda found: f"(0{found[1]}0+{found[3]}/{'9' * len(found[3])}{'0' * len(found[2])})",
        ),
        (rf"\\[dt]?frac{_GROUP}{_GROUP}", r"((\1\2)/(\3\4))"),
        (rf"\\binom{_GROUP}{_GROUP}", r"binom(\1\2,\3\4)"),
        (rf"\^{_GROUP}", r"**(\1\2)"),
        (r"\^(?=[(-])", "**"),
        (r"(\d+|\(\d+\))!(?!!)", r"factorial(\1)"),
    )
)
_IMPLICIT = re.compile(r"(?<=[\d)])(?=[a-z(])(?!e[+-]?\d)")
_ARITHMETIC = re.compile(rf"(?:[-+*/(),]|binom|factorial|{_NUMBER})++")  # in linear time


@lru_cache(maxsize=4096)
def read_number(text: str) -> Fraction | None:
    r"""The exact value of a number or of arithmetic, without spaces; None for other texts.

    A whole number before a fraction is a mixed number: `2\frac{1}{2}` is 5/2.
    """
    if not 0 < len(text) <= LONGEST or sum(map(text.count, "({")) > _MOST_GROUPS:
        return None
    for pattern, replacement in _SPELLINGS * _DEEPEST:
        text = pattern.sub(replacement, text)
    text = _IMPLICIT.sub("*", text.replace("{", "(").replace("}", ")"))
    if not _ARITHMETIC.fullmatch(text):
        return None
    try:
        # Quoted, a number is not read as a float.
        return _value(ast.parse(re.sub(_NUMBER, r"'\g<0>'", text), mode="eval").body)
    except (ArithmeticError, SyntaxError, ValueError):
        return None


def write_number(number: Fraction) -> str:
    """Decimal, but for numbers of which Python writes no decimals."""
    above, below = number.as_integer_ratio()
    return str(number) if max(abs(above), below) < 10**LONGEST else f"{above:#x}/{below:#x}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(str(digits)):
            return Fraction(digits)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.Call(ast.Name(name), [*arguments]) if name in _FUNCTIONS:
            whole = [_value(each) for each in arguments]
            if all(each.denominator == 1 and each <= _MOST_FACTORIAL for each in whole):
                return Fraction(_FUNCTIONS[name](*map(int, whole)))
    raise ValueError


def _power(base: Fraction, by: Fraction) -> Fraction:
    bits = max(map(int.bit_length, base.as_integer_ratio()))
    if by.denominator > 1 or abs(by) * bits > _MOST_BITS:
        raise ValueError
    return Fraction(base ** int(by))


_FUNCTIONS: dict[str, Callable[..., int]] = {"factorial": math.factorial, "binom": math.comb}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}
