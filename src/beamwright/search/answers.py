r"""Final answers in a path's text: where they are and when two are written alike.

Pure text, exact numbers and units: no models and no algebra. Two answers that mean the same but are
written differently (`1/2`, `0.5`) stay different here; `evaluate` decides about those.
"""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_PHRASE = re.compile(
    r"\b(?:answer\s+is|answer(?:\*\*)?\s*:|correct\s+(?:option|choice)\s+is)[:\s*]*", re.IGNORECASE
)
# "#### 60" as GSM8K ends its solutions; a Markdown heading of that level holds words.
_HASHES = re.compile(
    r"^[ \t]*####[ \t]*"
    r"(\$[^$\n]+\$|[-+\u2212]?[$\u20ac\u00a3]?\d[\d,]*(?:\.\d+)?(?:/\d+)?[ \t]*\\?%?)"
    r"[ \t]*\.?[ \t]*$",
    re.MULTILINE,
)
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.IGNORECASE | re.DOTALL)
_SENTENCE_END = re.compile(r"\.(?=\s|$|\*)|\n")
# "(B)", "B)" or "B." before the option's text, or a letter that stands alone.
_LETTER = re.compile(r"\**(?:\(([A-J])\)|([A-J])(?:[).:]|\**$))(?=[\s.,:;*]|$)")
_LETTER_LINE = re.compile(r"[\s*$]*\(([A-J])\)[\s*$.]*")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?")
_SPACING = re.compile(r"(?<!\\)\\[!,;: ]|\\q?quad\b|\\(?:left|right)(?![A-Za-z])|~|\s+")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_MATH_MARKS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_GAP = r"(?:\\[!,;: ]|~|\s)+"  # a space inside a number
_GROUPED = re.compile(rf"[+-]?\d{{1,3}}(?:{_GAP}\d{{3}})+(?:\.\d+)?")
_MIXED = re.compile(rf"(?<![\d/.])((?:[+-]\s*)?\d+)(?:{_GAP}|{_GAP}and{_GAP})(\d+)\s*/\s*(\d+)")
_DIGITS_APART = re.compile(rf"(?<=\d)(?:{_GAP})(?=\d)")
_ESCAPED_SPACE = re.compile(r"(?<!\\)\\ ")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)")
_SCIENTIFIC = re.compile(
    r"([+-]?\d*\.?\d+)(?:(?:\\times|\\cdot|\*)10\^(?:\{([+-]?\d+)\}|(\d))|[eE]([+-]?\d+))"
)
_FRACTION = re.compile(r"([+-]?)(\d+)?\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/([+-]?\d+)")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?")
_WRAPPED_UNIT = re.compile(
    rf"(.+?)(?<![_^\\])(?:{_GAP})?\\(?:text|mathrm|mbox|textbf)\s*\{{\s*([^{{}}]+?)\s*\}}\s*(\^\{{?\d\}}?)?"
)
_PLAIN_UNIT = re.compile(rf"(.*[\d}}]){_GAP}([A-Za-z][A-Za-z /.]+)(\^\{{?\d\}}?)?")
_DEGREES = re.compile(r"(.+?)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0)")
_DOLLARS = re.compile(r"-?\s*\\?\$\s*([^$]+)")
_COUNTED = re.compile(r"([+-]?\$?\d[\d,]*(?:\.\d+)?)((?: +[A-Za-z][a-z'-]{2,}){1,4})")
# Words after a number that make another number of it, or a statement.
_NOT_COUNTED = re.compile(
    r"\b(?:and|are|base|billion|choose|cubed|divided|dozen|dozens|eighth|eighths|equals|"
    r"factorial|fifth|fifths|for|from|greater|half|halves|hundred|hundreds|less|"
    r"log|million|minus|mod|modulo|more|most|not|over|pair|pairs|per|percent|"
    r"plus|quarter|quarters|root|score|sixth|sixths|squared|tenth|tenths|than|"
    r"the|third|thirds|thousand|thousands|times|trillion|with)\b",
    re.IGNORECASE,
)
_LONGEST_NUMBER = 400  # characters, and the largest exponent: no number takes long to compare

# What a unit measures, its power, its size, and its spellings.
_UNIT_ROWS = (
    "length 1 1/1000 mm millimeter millimeters millimetre millimetres",
    "length 1 1/100 cm centimeter centimeters centimetre centimetres",
    "length 1 1 m meter meters metre metres", "length 1 1609.344 mi mile miles",
    "length 1 1000 km kilometer kilometers kilometre kilometres",
    "length 1 0.0254 in inch inches", "length 1 0.3048 ft foot feet",
    "length 1 0.9144 yd yard yards", "money 1 1 dollar dollars USD", "money 1 1/100 cent cents",
    "length 3 1/1000 L l liter liters litre litres",
    "length 3 1/1000000 mL ml milliliter milliliters millilitre millilitres",
    "mass 1 1/1000000 mg milligram milligrams", "mass 1 1/1000 g gram grams",
    "mass 1 1 kg kilogram kilograms", "mass 1 0.45359237 lb lbs pound pounds",
    "mass 1 0.028349523125 oz ounce ounces", "time 1 1/1000 ms millisecond milliseconds",
    "time 1 1 s sec second seconds", "time 1 60 min mins minute minutes",
    "time 1 3600 h hr hrs hour hours", "time 1 86400 day days", "time 1 604800 week weeks",
    "calendar 1 1 month months", "calendar 1 12 year years yr yrs",
    "angle 1 1 degree degrees deg", "radians 1 1 radian radians rad",
)  # fmt: skip
_UNITS = {
    spelling: (dimension, int(power), Fraction(size))
    for dimension, power, size, *spellings in map(str.split, _UNIT_ROWS)
    for spelling in spellings
}
_RATES = {"mph": "miles/hour", "kph": "km/h"}
_POWERS = ((r"\b(?:square|sq)\b\.?\s*([A-Za-z]+)", r"\1^2"), (r"\bcubic\s+([A-Za-z]+)", r"\1^3"))


class Unit(NamedTuple):
    """What a unit measures, as sorted (dimension, power) pairs, and its size in base units."""

    dimension: tuple[tuple[str, int], ...]
    factor: Fraction


def extract_answer(text: str) -> str | None:
    r"""The final answer that `text` states, or None.

    The last balanced, non-empty `\boxed{...}` or `\fbox{...}` wins; without one, the last
    `<answer>...</answer>`; without that, the last of what follows "The answer is", "Answer:" or
    "The correct option is", and of lines such as `#### 60`; without any, a multiple choice letter
    that is the whole last line ("(B)"). Of an option stated with its text, "(B) 12 cm", the
    letter is the answer. Surrounding `$`, emphasis and a final period do not belong to it.
    """
    closing = _closing_braces(text)
    for match in reversed(list(_BOX.finditer(text))):
        answer = _trim(text[match.end() + 1 : closing.get(match.end(), 0)])
        if answer:
            return answer
    for match in reversed(list(_TAG.finditer(text))):
        answer = _stated(match[1].strip()) if "\n" not in match[1].strip() else _trim(match[1])
        if answer:
            return answer
    found = [*_PHRASE.finditer(text), *_HASHES.finditer(text)]
    for match in sorted(found, key=lambda each: each.start(), reverse=True):
        answer = _trim(match[1]) if match.re is _HASHES else _stated(text[match.end() :])
        if answer:
            return answer
    alone = _LETTER_LINE.fullmatch(text.rstrip().rpartition("\n")[2])
    return alone[1] if alone else None


def _stated(text: str) -> str:
    """The answer at the beginning of `text`: an option's letter, or the rest of the sentence."""
    letter = _LETTER.match(text.partition("\n")[0].rstrip())
    if letter:
        return letter[1] or letter[2]
    return _trim(_SENTENCE_END.split(text, maxsplit=1)[0].rstrip("* "))


@lru_cache(maxsize=4096)  # of one problem's candidates, most say the same, and are asked often
def normalise_answer(answer: str) -> str:
    r"""One spelling for answers that differ in layout only: `27.0` is `27`, `$1,000$` is `1000`.

    LaTeX spacing, `\left`, `\right`, `\text{...}` and the `d` of `\dfrac` go; a plain number
    loses its thousands marks, plus sign and idle zeros; `1 1/2` becomes a mixed fraction. Two
    answers that normalise to the same text are the same answer; the reverse does not hold.
    """
    text = _trim(answer).replace("\u2212", "-").replace("\\%", "%").replace("\\$", "$")
    text = text.removeprefix("$").strip()
    text = _TEXT.sub(r"\1", text)
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = text.replace("^{\\circ}", "^\\circ").replace("\u00b0", "^\\circ")
    text = re.sub(r"\\[cdt]frac", r"\\frac", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    grouped = _GROUPED.fullmatch(text) is not None
    spaced = _SPACING.sub(" ", text)
    # Words keep one space between them ("two apples"); formulas keep none, but 1 2 is not 12.
    words = re.fullmatch(r"[A-Za-z' -]+", spaced) is not None
    if not words and not grouped:
        spaced = _DIGITS_APART.sub(r"\\ ", spaced)
    text = " ".join(spaced.split()) if words else _without_spaces(spaced)
    if re.fullmatch(r"\([A-Za-z]\)", text):  # a multiple-choice letter
        return text[1]
    text = text.replace("{,}", ",").replace("{:}", ":")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return _plain_number(text) or text


def read_number(normalised: str) -> Fraction | None:
    r"""The exact value of a number as `normalise_answer` writes it; None if it is anything else.

    Reads decimals, `3/4`, `\frac{3}{4}`, `2\frac{1}{2}`, `1.5\times10^{-3}`, `6.02e23` and
    repeating decimals (`0.1\overline{6}`).
    """
    if not normalised or len(normalised) > _LONGEST_NUMBER:
        return None
    text = _plain_number(normalised)
    if text is not None:
        return Fraction(Decimal(text))
    if match := _SCIENTIFIC.fullmatch(normalised):
        exponent = int(match[2] or match[3] or match[4])
        if abs(exponent) > _LONGEST_NUMBER:
            return None
        return Fraction(match[1]) * Fraction(10) ** exponent
    if match := _REPEATING.fullmatch(normalised):
        sign, whole, fixed, cycle = match.groups()
        before = int(whole + fixed or "0")
        nines = 10 ** len(fixed) * (10 ** len(cycle) - 1)
        value = Fraction(int(f"{before}{cycle}") - before, nines)
        return -value if sign == "-" else value
    return _read_fraction(normalised)


def _read_fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, above, below, left, right = match.groups()
    if int(below or right) == 0:
        return None
    if left:
        return Fraction(int(left), int(right))
    value = int(whole or 0) + Fraction(int(above), int(below))
    return -value if sign == "-" else value


def split_unit(answer: str) -> tuple[str, Unit | None]:
    r"""An answer's value and its unit; all of it and None where no known unit is named.

    Reads `5\text{ cm}^2`, `18 inches`, `10 km per hour`, `\$18`, `90^\circ`. A bare letter counts
    as a unit only inside `\text{}` or `\mathrm{}`: otherwise it is a variable.
    """
    text = _trim(answer)
    if len(text) > _LONGEST_NUMBER:
        return text, None
    if match := _DEGREES.fullmatch(text):
        return match[1], _parse_unit("degree")
    if match := _DOLLARS.fullmatch(text):
        return ("-" if text.startswith("-") else "") + match[1], _parse_unit("dollar")
    for pattern in (_WRAPPED_UNIT, _PLAIN_UNIT):
        if match := pattern.fullmatch(text):
            unit = _parse_unit(match[2] + (match[3] or ""))
            if unit is not None:
                return match[1], unit
    return text, None


def counted_number(answer: str) -> str | None:
    """The number of `60 eggs` or `$1,200 in all`; None where the words may change what it is.

    Words of a known unit are `split_unit`'s.
    """
    text = _trim(answer)
    match = _COUNTED.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None or _NOT_COUNTED.search(match[2]):
        return None
    return match[1]


def _parse_unit(text: str) -> Unit | None:
    """The unit that `text` spells: factors such as `square feet`, `m^2`, below and above a `/`."""
    text = re.sub(r"\bper\b", "/", _RATES.get(text.strip(" ."), text))
    for pattern, power_of in _POWERS:
        text = re.sub(pattern, power_of, text)
    parts = re.findall(r"[A-Za-z]+|[/^]|\d+", text)
    powers: Counter[str] = Counter()
    factor, sign = Fraction(1), 1
    for place, part in enumerate(parts):
        sign = -1 if part == "/" else sign
        if part.isalpha() and part not in _UNITS:
            return None
        if part.isalpha():
            dimension, power, size = _UNITS[part]
            raised = re.fullmatch(r"\^(\d+)", "".join(parts[place + 1 : place + 3]))
            exponent = sign * (int(raised[1]) if raised else 1)
            powers[dimension] += power * exponent
            factor *= size**exponent
    return Unit(tuple(sorted(powers.items())), factor) if powers else None


def _without_spaces(text: str) -> str:
    """`text` without spaces, but for the escaped one that keeps two numbers apart."""
    return "\\ ".join("".join(part.split()) for part in _ESCAPED_SPACE.split(text))


def _plain_number(text: str) -> str | None:
    """`text` without idle signs and zeros if it is a decimal number, else None."""
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    whole = match[2].lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number


def _closing_braces(text: str) -> dict[int, int]:
    """Where the group that each brace opens is closed, for those that are."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    # An escaped brace does not open or close a group.
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _trim(answer: str) -> str:
    """`answer` without surrounding space, math marks and a final period."""
    previous = None
    while answer != previous:
        previous = answer
        answer = answer.strip()
        if answer.endswith(".") and not answer.endswith(("...", "\\right.")):
            answer = answer[:-1]
        for opening, closing in _MATH_MARKS:
            inside = len(answer) >= len(opening) + len(closing)
            if inside and answer.startswith(opening) and answer.endswith(closing):
                answer = answer[len(opening) : -len(closing)]
    return answer
