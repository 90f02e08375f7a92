r"""Parse a mathematical answer into an exact value and a unit or counted noun ("12 apples").

An answer may omit its unit or the counted noun, but it must not name a different one. Words after a
number are a unit if they are a known unit, and a counted noun if they are a plural. Words that
change the number ("half", "squared", "if n is even") are part of the value. Values are numbers and
exact arithmetic: `\frac{3}{4}`, `2^{-99}`, `1.5\times10^3`, `5!`. Letters, roots and functions have
no value here. Limits on lengths and sizes bound the work for one answer.
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

LONGEST = 400  # characters of the longest answer that is parsed
# Characters of the longest text to which the rules of `spellings.yaml` are applied: their work
# grows with the square of the length.
_LONGEST_TEXT = 2 * LONGEST
_MOST_LAYERS = 16  # nested marks that `trim` removes, such as "$" around quotes
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
)  # also 1,00,000, as written in India
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
    """Return the content of `spellings.yaml`; it is read at the first answer, not at import."""
    rules: dict[str, Any] = read_yaml(Path(__file__).with_name("spellings.yaml"), "spellings")
    return rules


@cache
def _rules(name: str) -> list[tuple[re.Pattern[str], str]]:
    """Return a section of `spellings.yaml` as pairs of a compiled pattern and its replacement."""
    rules = []
    for written, replacement, *pairs in _spellings()[name]:
        pattern = reduce(lambda text, part: text.replace(*part), _PARTS.items(), written)
        for key, value in (pairs[0] if pairs else {"": ""}).items():
            compiled = re.compile(pattern.replace("KEY", key))
            rules.append((compiled, replacement.replace("VALUE", str(value))))
    return rules


def _is_one_of(words: str, word: str) -> bool:
    """Return True if `word` matches an entry of the section `words` of `spellings.yaml`."""
    return re.fullmatch("|".join(_spellings()[words].split()), word) is not None


@cache
def _units() -> dict[str, tuple[str, int, Fraction]]:
    """Return (dimension, power, size in base units) for each spelling of a unit."""
    return {
        spelling: (dimension, int(power), Fraction(size))
        for dimension, power, size, *spellings in map(str.split, _spellings()["units"])
        for spelling in spellings
    }


class Unit(NamedTuple):
    """A unit: the dimension as sorted (name, power) pairs, and the size in base units."""

    dimension: tuple[tuple[str, int], ...]
    factor: Fraction


class Quantity(NamedTuple):
    """An answer, parsed into its value and what may follow it: a unit, a counted noun, "%"."""

    value: str
    unit: Unit | None = None
    words: frozenset[str] = frozenset()  # stems of the counted noun and of words about the unit
    in_percent: bool = False  # the answer has a percent sign, which `value` does not contain
    # Words after the value cannot be omitted, so the answer is compared as text. `value` is then
    # the whole answer.
    is_text: bool = False


def trim(answer: str) -> str:
    """Return `answer` without surrounding spaces, math delimiters, quotes and a final period."""
    answer = answer.strip()
    for _ in range(_MOST_LAYERS):
        if not (match := _AROUND.fullmatch(answer)):
            break
        answer = match[match.lastindex or 0].strip()
    return answer


def _apply_rules(text: str, rules: str) -> str:
    """Return `text` after the rules of one section of `spellings.yaml`."""
    for pattern, replacement in _rules(rules):
        text = pattern.sub(replacement, text).strip()
    return text


def unify_spelling(answer: str) -> str:
    """Return `answer` with each symbol in one spelling, and without text around the value.

    The removed text is emphasis, a name of the value ("Area: "), a leading "about", and an
    approximation after the exact value.
    """
    text = trim(trim(answer).strip("*,"))
    if len(text) > _LONGEST_TEXT:
        return text
    text = _apply_rules(text, "folded")
    whole = _TEXT.fullmatch(text)
    return trim(whole[1] if whole and re.search(r"\d", whole[1]) else text)


def normalise_layout(answer: str) -> str:
    r"""Return one text for answers that differ only in LaTeX and spaces: `$1,000$` gives `1000`.

    LaTeX spacing, `\left`, `\right`, `\text{...}`, the `d` of `\dfrac` and thousands separators are
    removed. `1 1/2` becomes a mixed fraction. `10, 100` with a space after the comma remains a
    list. Answers with the same result are equal, but not all equal answers have the same result.
    """
    if len(text := unify_spelling(answer)) > _LONGEST_TEXT:
        return " ".join(text.split())
    text = _apply_rules(text, "layout")
    grouped = re.fullmatch(rf"[+-]?\d{{1,3}}(?:{_GAP}\d{{3}})+(?:\.\d+)?", text) is not None
    spaced = re.sub(r"(?<!\\)\\[!,;: ]|\\q?quad\b|\\(?:left|right)(?![A-Za-z])|~|\s+", " ", text)
    # Words keep one space between them ("two apples"). Formulas keep no space, except between two
    # numbers: 1 2 is not 12.
    words = re.fullmatch(r"[A-Za-z' -]+", spaced) is not None
    if not words and not grouped:
        spaced = _apply_rules(spaced, "apart")
    text = " ".join(spaced.split())
    if not words:  # keep the escaped space between two numbers, and drop all others
        text = re.sub(r"(?<!\\)(\\ )|\s+", r"\1", spaced)
    if re.fullmatch(r"\([A-Za-z]\)", text):  # a multiple-choice letter
        return text[1]
    text = text.replace("{,}", ",").replace("{:}", ":")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


# --- units and counted nouns after a value ------------------------------------------------------


def read_quantity(answer: str, *, bare: bool = False) -> Quantity:
    r"""Split an answer into its value, and a unit or counted noun that may be omitted.

    Reads `5\text{ cm}^2`, `18 inches`, `10 km per hour`, `\$18 in total`, `90^\circ`, `60 eggs`,
    `3 million`, `28\%`.

    bare: True if a single letter (`5 N`) can be a unit. If False, it is a variable, unless it is
        inside `\text{}`.
    """
    if len(text := unify_spelling(answer)) > _LONGEST_TEXT:
        return Quantity(text, is_text=True)
    spelled = _apply_rules(text, "behind") if len(text) <= LONGEST else text
    match = _TAIL.fullmatch(spelled)
    value, tail = match.groups() if match else (spelled, "")
    first, *rest_words = words = _apply_rules(tail, "words").split() or [""]
    letter = re.match(r"[A-Za-z](?![A-Za-z.])", first) and "{" not in tail
    is_list = first in ("and", "or") and all(len(word) == 1 for word in rest_words)
    if is_list or (letter and not (bare and not rest_words and _parse_unit(first))):
        return Quantity(text)
    # A final "in" can be inches, but "in" before further words is a preposition: "60 in all".
    ends = [n for n in range(len(words), 0, -1) if words[n - 1] != "in" or n == len(words)]
    units = ((_parse_unit(" ".join(words[:end])), end) for end in ends)
    unit, end = next((pair for pair in units if pair[0]), (None, 0))
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
        return Quantity(text, is_text=True)
    stems = frozenset(name.removesuffix("s") for name in names if not _is_one_of("filler", name))
    return Quantity(value, unit, stems, bool(percent))


def _is_counted(value: str, words: list[str]) -> bool:
    """Return True if the words after `value` are a counted noun ("60 eggs") or only filler words.

    The noun must be a plural, unless `value` is 1 or a fraction.
    """
    phrase = list(takewhile(lambda word: not _is_one_of("preposition", word), words))
    noun = [word for word in phrase if not _is_one_of("filler", word)][-1:]
    if not noun or _is_one_of("plural", noun[0]):
        return True
    return value == "1" or re.fullmatch(r"-?(\d+/\d+|0?\.\d+|\\[dt]?frac.*)", value) is not None


def _parse_unit(text: str) -> Unit | None:
    """Return the unit that `text` spells, such as `square feet`, `m^2` or `km/h`, or None."""
    text = _apply_rules(_spellings()["rates"].get(text.strip(" ."), text), "powers")
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
    """Return the number of an answer without its unit or counted noun; None if it is no number."""
    parsed = read_quantity(answer, bare=True)
    return (
        None
        if parsed.is_text or read_number(normalise_layout(parsed.value)) is None
        else parsed.value
    )


# --- exact arithmetic --------------------------------------------------------------------------

_MOST_BITS = 1 << 16  # limit on the bits of a power
_MOST_FACTORIAL = 2500  # largest argument of a factorial or binomial coefficient
_MOST_GROUPS = 40  # limit on the number of opening parentheses and braces
_DEEPEST = 8  # levels of nested groups that are rewritten
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
_GROUP = r"\s*(?:\{([^{}]*)\}|(\d))"  # an argument in braces, or one digit without braces
# Rules that rewrite LaTeX as Python arithmetic. Each pass rewrites the innermost groups.
_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:times|cdot)(?![a-z])", "*"),
        (r"\\div(?![a-z])", "/"),
        # 2 1/2 is 5/2, not 2 * 1/2.
        (r"(?<![\d.)^])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\2/\3)"),
        # A repeating decimal becomes a sum: its repeating digits are divided by 9, 99, 999, ...
        (
            r"(\d*\.(\d*))\\(?:overline|bar)\{?(\d+)\}?",
            lambda match: f"(0{match[1]}0+{match[3]}/{'9' * len(match[3])}{'0' * len(match[2])})",
        ),
        (rf"\\[dt]?frac{_GROUP}{_GROUP}", r"((\1\2)/(\3\4))"),
        (rf"\\binom{_GROUP}{_GROUP}", r"binom(\1\2,\3\4)"),
        (rf"\^{_GROUP}", r"**(\1\2)"),
        (r"\^(?=[(-])", "**"),
        (r"(\d+|\(\d+\))!(?!!)", r"factorial(\1)"),
    )
)
_IMPLICIT = re.compile(r"(?<=[\d)])(?=[a-z(])(?!e[+-]?\d)")
# The quantifier is possessive, so that matching takes linear time.
_ARITHMETIC = re.compile(rf"(?:[-+*/(),]|binom|factorial|{_NUMBER})++")


@lru_cache(maxsize=4096)
def read_number(text: str) -> Fraction | None:
    r"""Return the exact value of a number or an arithmetic expression; None for other texts.

    `text` contains no spaces. A whole number before a fraction forms a mixed number:
    `2\frac{1}{2}` is 5/2.
    """
    if not 0 < len(text) <= LONGEST or sum(map(text.count, "({")) > _MOST_GROUPS:
        return None
    for pattern, replacement in _SPELLINGS * _DEEPEST:
        text = pattern.sub(replacement, text)
    text = _IMPLICIT.sub("*", text.replace("{", "(").replace("}", ")"))
    if not _ARITHMETIC.fullmatch(text):
        return None
    try:
        # Numbers are quoted, so that Python does not parse them as inexact floats.
        return _value(ast.parse(re.sub(_NUMBER, r"'\g<0>'", text), mode="eval").body)
    except (ArithmeticError, SyntaxError, ValueError):
        return None


def write_number(number: Fraction) -> str:
    """Return a number as decimal text; in hexadecimal if it is too long for Python's decimals."""
    above, below = number.as_integer_ratio()
    return str(number) if max(abs(above), below) < 10**LONGEST else f"{above:#x}/{below:#x}"


def _value(node: ast.expr) -> Fraction:
    """Evaluate a parsed arithmetic expression exactly.

    Raises:
        ValueError: for anything except numbers and the known operators and functions.
    """
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
    """Return `base` to the power `by`.

    Raises:
        ValueError: if `by` is no integer, or the result has too many bits.
    """
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
