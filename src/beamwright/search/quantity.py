r"""An answer's layout, its value, and what stands around that: units, what is counted, percents.

One convention for all spellings, in `\text{}` or not: an answer may leave out a unit or what is
counted, and not name another one. Words behind a number are a unit where they are a known one, and
what is counted where they are a plural; words that make another number of it ("half", "squared",
"if n is even") belong to it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from fractions import Fraction
from itertools import takewhile
from typing import NamedTuple

from beamwright.search.exact import read_number

_LONGEST = 400  # characters of an answer that is looked into
_MOST_LAYERS = 16
_AROUND = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\"(.*)\"|`(.*)`|(.*?)(?<!\.\.)(?<!\\right)\.",
    re.DOTALL,
)
_GAP = r"(?:\\[!,;: ]|\\q?quad(?![a-z])|~|\s)++"
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_FUNCTION = r"(?<![A-Za-z\\])"


def _table(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rows)


# Spellings of one thing.
_FOLDED = _table(
    (r"\\+$", ""),
    (r"\\[lcv]?dots[bc]?(?![a-z])|\.\.\.|\u2026", r"\\ldots "),
    (r"[\u2212\u2012\u2013\u2014]", "-"),
    *(
        (sign, f"^{digit}")
        for digit, sign in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
    ),
    *(
        (sign, f" {unicodedata.normalize('NFKC', sign)}")
        for sign in "\u00bd\u2153\u2154\u00bc\u00be\u2155\u215b"
    ),
    (r"\u2044", "/"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\u00d7|\u00b7|\u22c5", r"\\cdot "),
    (rf"(?<=\d)({_GAP})?[xX]({_GAP})?(?=10\s*\^)|(?<=\d)\s+[xX]\s+(?=\d)", r"\\cdot "),
    (r"\u2264", r"\\le "),
    (r"\u2265", r"\\ge "),
    (r"\u2260", r"\\neq "),
    (r"\u222a", r"\\cup "),
    (r"\u2205|\\varnothing(?![A-Za-z])", r"\\emptyset "),
    (r"\u2126|\u03a9", r"\\Omega "),
    (r"\u00b0", r"^\\circ "),
    (r"\u221a\s*(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2}"),
    (_FUNCTION + r"sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (_FUNCTION + r"sqrt\s*(\d)", r"\\sqrt{\1}"),
    (_FUNCTION + r"pi(?![A-Za-z])|\u03c0", r"\\pi "),
    (
        rf"\\text\s*\{{\s*infinity\s*\}}|{_FUNCTION}(?:infinity|infty|inf|oo)(?![A-Za-z])|\u221e",
        r"\\infty ",
    ),
    *(
        (rf"^(?:\\text\s*\{{)?\s*(?i:{word})\s*\}}?$", str(number))
        for number, word in enumerate(_NUMBER_WORDS.split())
    ),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (
        r"^(?:\\approx(?![a-z])|\u2248|~"
        r"|(?:\\text\s*\{\s*)?(?:approximately|about|roughly|around)(?:\s*\}|\s))\s*",
        "",
    ),
    (r"(?<=.)\s*(?:\\approx(?![a-z])|\u2248).*", ""),  # the exact value stands before it
    # A name of the value: \text{Area: } 24
    (
        r"^(?:\\text\s*\{\s*)?[A-Za-z][A-Za-z ]{2,}(?:\}\s*=|(?:[:=]|\bis)\s*\}?)\s*(?=[-\d$(\\.])",
        "",
    ),
    # c e^x for any constant c; a condition on the value's sign or kind is another answer.
    (
        r"(?<=\S)[,;]?\s*(?:\\text\s*\{\s*)?[,;]?\s*\b(?:for|where|with)\b"
        r"(?!.*(?:\b(?:even|odd|positive|negative|nonzero|prime)\b|[<>=]|\\[lg]eq?|\\neq?))"
        r"(?=.*(?:\b(?:any|all|every|arbitrary|some|constant|integers?)\b|\\in(?![a-z]))).*",
        "",
    ),
)
_THOUSANDS = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?:\.\d+)?"
)  # 1,00,000, too
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_LAYOUT = _table(
    (r"\\!|^\\?\$", ""),
    (r"\\([%$])", r"\1"),
    (_TEXT.pattern, r"\1"),
    (r"\^\{\\circ\}", r"^\\circ"),
    (r"\\[cdt]frac", r"\\frac"),
    (
        rf"(?<![\d/.])((?:[+-]\s*)?\d+)(?:{_GAP}|{_GAP}and{_GAP})(\d+)\s*/\s*(\d+)",
        r"\1\\frac{\2}{\3}",
    ),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"^\+\s*(?=\d)", ""),
)

_APART = _table(
    (r"(?<=\d)(?:\s+,\s*|,\s+)(?=\d{3}(?!\d))", r",\\ "),  # 10, 100 are no thousands
    (rf"(?<=\d)(?:{_GAP})(?=\d)", r"\\ "),
)

# --- what a number measures or counts ----------------------------------------------------------

_WRAPPED = r"\\(?:text|mathrm|mbox|textbf|textrm|operatorname)\s*\{[^{}]*\}"
_RAISED = r"(?:\s*\^\s*\{?-?\d\}?)?"
_WORD = r"[A-Za-z][A-Za-z.'/-]*"
_TAIL = re.compile(
    rf"(?P<value>.+?)(?P<tail>(?>(?:{_GAP})?(?<![_^\\]){_WRAPPED}{_RAISED}"
    rf"|(?<=[\d}})\]!%]){_GAP}{_WORD}{_RAISED}|(?<=\d)[A-Za-z]{{2,}}{_RAISED})"
    rf"(?>(?:{_GAP})?{_WRAPPED}{_RAISED}|{_GAP}[(]?{_WORD}[)]?{_RAISED}|\s*/\s*{_WORD})*+)"
)
_MULTIPLES = {"dozen": "12", "hundred": "100", "thousand": "10^3"} | {
    "million": "10^6", "billion": "10^9", "trillion": "10^{12}",
}  # fmt: skip
_MONEY = {
    r"\\?\$": "dollars",
    "\u20ac": "euros",
    "\u00a3": "GBP",
    "\u00a5": "yen",
    "\u20b9": "rupees",
}
_OPEN = r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{\s*"
# Words and signs behind a number, in one spelling.
_BEHIND = _table(
    # 72 (clips), 42 (forty-two)
    (
        rf"(?<=[\d}}])\s*(?:{_OPEN})?[(](?!(?:{'|'.join(_MULTIPLES)}|mod|base|if)\b)"
        r"[A-Za-z][A-Za-z .-]+[)]\s*\}?$",
        "",
    ),
    *(
        (rf"^(-?)\s*(?:US)?{sign}(?!.*\$)\s*(-?(?:[\d.,]|\{{,\}})+)", rf"\1\2\\text{{ {name} }}")
        for sign, name in _MONEY.items()
    ),
    *((rf"(?<=\d)\s*{sign}$", rf"\\text{{ {name} }}") for sign, name in _MONEY.items()),
    (r"(?<=\d)\s*\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?$", r" \1"),
    (rf"{_OPEN}\^\\circ\s*([CF]?)\s*\}}", r"^\\circ \1"),
    (
        r"^(?!\\[a-z]+ *\(?\d)(.*?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*"
        r"(?=$|[CF]$|\\(?:text|mathrm)\s*\{)",
        r"\1\\text{ degrees } ",
    ),
    (r"(?<=[\d\s~,}])\\Omega\s*$", r"\\text{ ohms }"),
    (rf"{_OPEN}(?:percent|pct|percentage)\s*\}}|\s(?:percent|pct|percentage)\b", r"\\%"),
    *(
        (
            rf"(?<=\d)(?:{_GAP})?(?:{_OPEN}{word}\s*\}}|({_OPEN}){word}\b|{word}\b)",
            rf"\\cdot {by} \1",
        )
        for word, by in _MULTIPLES.items()
    ),
)

# `\text{ km/h}^2` is one word.
_WORDS = _table(
    (_TEXT.pattern, r" \1"),
    (rf"{_GAP}|[()]", " "),
    (r"\s*\^\s*\{?(-?\d)\}?", r"^\1"),
    (r"\s*/\s*", "/"),
)

# What a unit measures, its power, its size, and its spellings.
_UNIT_ROWS = (
    "length 1 1/1000 mm millimeter millimeters millimetre millimetres",
    "length 1 1/100 cm centimeter centimeters centimetre centimetres",
    "length 1 1 m meter meters metre metres", "length 1 1609.344 mi mile miles",
    "length 1 1000 km kilometer kilometers kilometre kilometres",
    "length 1 0.0254 in inch inches", "length 1 0.3048 ft foot feet",
    "length 1 0.9144 yd yard yards", "money 1 1 dollar dollars USD", "money 1 1/100 cent cents",
    "euros 1 1 euro euros EUR", "sterling 1 1 GBP", "yen 1 1 yen JPY",
    "rupees 1 1 rupee rupees Rs INR",
    "length 3 0.003785411784 gal gallon gallons", "length 3 0.000946352946 qt quart quarts",
    "length 3 0.0002365882365 cup cups", "length 2 4046.8564224 acre acres",
    "tons 1 1 ton tons tonne tonnes", "speed 1 1 rpm", "beats 1 1 bpm", "sound 1 1 dB",
    "bytes 1 1 B byte bytes", "bytes 1 1000 kB KB", "bytes 1 1000000 MB", "bytes 1 1000000000 GB",
    "charge 1 1 coulomb coulombs", "gas 1 1 atm", "field 1 1 tesla teslas", "molar 1 1 molar",
    "spoons 1 1 tsp teaspoon teaspoons", "spoons 1 3 tbsp tablespoon tablespoons",
    "length 3 1/1000 L l liter liters litre litres",
    "length 3 1/1000000 mL ml milliliter milliliters millilitre millilitres",
    "mass 1 1/1000000 mg milligram milligrams", "mass 1 1/1000 g gram grams",
    "mass 1 1 kg kilogram kilograms", "mass 1 0.45359237 lb lbs pound pounds",
    "mass 1 0.028349523125 oz ounce ounces", "time 1 1/1000 ms millisecond milliseconds",
    "time 1 1 s sec second seconds", "time 1 60 min mins minute minutes",
    "time 1 3600 h hr hrs hour hours", "time 1 86400 day days", "time 1 604800 week weeks",
    "calendar 1 1 month months", "calendar 1 12 year years yr yrs",
    "angle 1 1 degree degrees deg", "radians 1 1 radian radians rad",
    "force 1 1 N newton newtons", "force 1 1000 kN", "energy 1 1 J joule joules",
    "energy 1 1000 kJ kilojoule kilojoules", "electronvolt 1 1 eV", "heat 1 1 cal calorie calories",
    "heat 1 1000 kcal", "power 1 1 W watt watts", "power 1 1000 kW kilowatt kilowatts",
    "voltage 1 1 V volt volts", "current 1 1 A amp amps ampere amperes",
    "current 1 1/1000 mA", "resistance 1 1 ohm ohms", "frequency 1 1 Hz hertz",
    "frequency 1 1000 kHz", "frequency 1 1000000 MHz", "pressure 1 1 Pa pascal pascals",
    "pressure 1 1000 kPa", "kelvin 1 1 K kelvin kelvins", "amount 1 1 mol mole moles",
)  # fmt: skip
_UNITS = {
    spelling: (dimension, int(power), Fraction(size))
    for dimension, power, size, *spellings in map(str.split, _UNIT_ROWS)
    for spelling in spellings
}
_RATES = {"mph": "miles/hour", "kph": "km/h", "kmh": "km/h"}
_FACTOR = re.compile(r"([A-Za-z]+)(?:\s*\^\s*(\d+))?")
_POWERS = _table(
    (r"\bper\b", "/"),
    (r"\b(?:square|sq)\b\.?\s*([A-Za-z]+)", r"\1^2"),
    (r"\bcubic\s+([A-Za-z]+)", r"\1^3"),
)
# Words that add nothing, and nouns of more than one without an s.
_FILLER = re.compile(
    "in|total|all|altogether|overall|left|remaining|each|apiece|old|long|tall|wide|high|of|whole|"
    "exactly|only|now|st|nd|rd|th"
)
_PREPOSITION = re.compile("of|in|per|on|at|to|for|from|with|that|who|which|by|after")
_PLURAL = re.compile(
    r"people|men|women|children|feet|teeth|mice|geese|fish|sheep|deer|pence|[ap]m|.+[^s]s"
)
# Words after a number that make another number of it, or a statement.
_CHANGES = re.compile(
    r"(?:and|or|but|choose|cubed|divided|equals?|either|except|factorial|fewer|greater|gross|half|"
    r"halves|hundreds?|if|lakhs?|crores?|less|log|minus|mod|modulo|more|most|least|negative|not|"
    r"otherwise|out|over|pairs?|plus|quarters?|root|score|squared|than|thousands?|millions?|"
    r"billions?|trillions?|dozens?|tens|third|thirds|twice|unless|until|when|"
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million)ths?)"
)
# Right behind the number: "5 to one", "n^2 for odd n".
_CHANGES_FIRST = re.compile("a|an|the|is|are|was|as|base|by|for|from|this|to|with|without")


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


def _spelled(text: str, table: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in table:
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
    text = _spelled(text, _FOLDED)
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
    text = _spelled(text, _LAYOUT)
    grouped = re.fullmatch(rf"[+-]?\d{{1,3}}(?:{_GAP}\d{{3}})+(?:\.\d+)?", text) is not None
    spaced = re.sub(r"(?<!\\)\\[!,;: ]|\\q?quad\b|\\(?:left|right)(?![A-Za-z])|~|\s+", " ", text)
    # Words keep one space between them ("two apples"); formulas keep none, but 1 2 is not 12.
    words = re.fullmatch(r"[A-Za-z' -]+", spaced) is not None
    if not words and not grouped:
        spaced = _spelled(spaced, _APART)
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
    spelled = _spelled(text, _BEHIND) if len(text) <= _LONGEST else text
    match = _TAIL.fullmatch(spelled)
    value, tail = match.groups() if match else (spelled, "")
    first, *others = words = _spelled(tail, _WORDS).split() or [""]
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
        any(map(_CHANGES.fullmatch, names))
        or names[:1] == ["times"] != names
        or _CHANGES_FIRST.fullmatch(" ".join(names[:1]))
    )
    if changed or not (unit or percent or _is_counted(value, names)):
        return Quantity(text, is_odd=True)
    stems = frozenset(name.removesuffix("s") for name in names if not _FILLER.fullmatch(name))
    return Quantity(value, unit, stems, bool(percent))


def _is_counted(value: str, words: list[str]) -> bool:
    """True for a noun in the plural, or of one or less, and for words that add nothing."""
    phrase = list(takewhile(lambda word: not _PREPOSITION.fullmatch(word), words))
    noun = [word for word in phrase if not _FILLER.fullmatch(word)][-1:]
    if not noun or _PLURAL.fullmatch(noun[0]):
        return True
    return value == "1" or re.fullmatch(r"-?(\d+/\d+|0?\.\d+|\\[dt]?frac.*)", value) is not None


def _parse_unit(text: str) -> Unit | None:
    """The unit that `text` spells: factors such as `square feet`, `m^2`, below and above a `/`."""
    text = _spelled(_RATES.get(text.strip(" ."), text), _POWERS)
    above, _, below = text.partition("/")
    sides = [(each, 1) for each in _FACTOR.findall(above)]
    sides += [(each, -1) for each in _FACTOR.findall(below)]
    factors = [
        (name if name in _UNITS or len(name) == 1 else name.lower(), sign * int(power or 1))
        for (name, power), sign in sides
    ]
    if not factors or any(name not in _UNITS for name, _ in factors):
        return None
    powers: Counter[str] = Counter()
    for name, by in factors:
        powers[_UNITS[name][0]] += by * _UNITS[name][1]
    size = math.prod(_UNITS[name][2] ** by for name, by in factors)
    return Unit(tuple(sorted(powers.items())), Fraction(size))


def counted_number(answer: str) -> str | None:
    """The number that an answer is, without what it measures or counts; None for anything else."""
    found = read_quantity(answer, bare=True)
    return None if found.is_odd or read_number(layout(found.value)) is None else found.value
