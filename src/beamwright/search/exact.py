r"""Exact rational arithmetic as answers write it: `\frac{3}{4}`, `2^{-99}`, `1.5\times10^3`, `5!`.

Letters, roots and functions have no value here. Work is bounded: no answer takes long.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

_LONGEST = 400  # characters
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
    if not 0 < len(text) <= _LONGEST or sum(map(text.count, "({")) > _MOST_GROUPS:
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
    return str(number) if max(abs(above), below) < 10**_LONGEST else f"{above:#x}/{below:#x}"


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
