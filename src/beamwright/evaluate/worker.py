"""The answer checker's process: one JSON line in, one JSON line out. Nothing else imports it.

Run as a script, so it depends on `math-verify` alone. The parent kills it when it takes too long
(a library's signal-based limits fail off the main thread); an alarm whose default action ends
the process is the backstop, for a parent that was itself killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from importlib import import_module
from typing import Any

if sys.platform != "win32":
    import resource

_MEMORY_BYTES = 4 * 1024**3
_GRACE_S = 5  # the parent's deadline comes first
_FUNCTION = r"(?<![A-Za-z\\])"

# Spellings that the parser misreads, and what it reads as meant.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}|\u2205", r"\\emptyset"),
        (r"\\(?:mathrm|text|mathit)\s*\{\s*i\s*\}", "i"),
        (r"\\(?:operatorname|mathop)\s*\{\s*([a-z]+)\s*\}", r"\\\1"),
        (_FUNCTION + r"sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (_FUNCTION + r"sqrt\s*(\d)", r"\\sqrt{\1}"),
        (_FUNCTION + r"(?:infinity|infty|inf|oo)(?![A-Za-z])|\u221e", r"\\infty "),
        (_FUNCTION + r"pi(?![A-Za-z])|\u03c0", r"\\pi "),
        (r"\u221a\s*(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2}"),
        (r"\u00d7|\u00b7|\u22c5", r"\\cdot "),
        (r"\u2264", r"\\le "),
        (r"\u2265", r"\\ge "),
        (r"\u2260", r"\\neq "),
        (r"\u222a", r"\\cup "),
        (r"\u2212", "-"),
        (r"\u00b0", r"^\\circ"),
        (r"\s+percent\b", r"\\%"),
        # {x : x > 2} is what x > 2 says.
        (r"^\s*(?:\\left)?\\\{\s*[a-z]\s*(?:\\mid|\||:)([^|]*?)(?:\\right)?\\\}\s*$", r"\1"),
    )
)


def rewrite(answer: str) -> str:
    """The same answer in spellings that the parser reads as meant."""
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    return answer


def main() -> None:
    """Answer `{"gold", "answer", "deadline_s"}` lines with `{"equal"}` lines until input ends."""
    # Replies get a descriptor of their own: whatever a library prints must not mix with them.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if sys.platform != "win32":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        # A tower of powers must end here, not take the machine with it.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from math_verify import verify  # noqa: PLC0415 - slow, and only this process needs it

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        pair = json.loads(line)
        if sys.platform != "win32":
            signal.alarm(math.ceil(pair["deadline_s"]) + _GRACE_S)
        gold, answer = _parse(pair["gold"]), _parse(pair["answer"])
        equal = bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))
        letters = [str(s) for each in gold + answer for s in getattr(each, "free_symbols", ())]
        if not equal and "i" in letters:
            equal = bool(verify(_imaginary(gold), _imaginary(answer), timeout_seconds=None))
        if sys.platform != "win32":
            signal.alarm(0)
        print(json.dumps({"equal": equal}), file=replies, flush=True)


def _parse(answer: str) -> list[Any]:
    from math_verify import parse  # noqa: PLC0415

    parsed = list(parse("\\boxed{" + rewrite(answer) + "}", parsing_timeout=None))
    return [_union(parsed[0]), *parsed[1:]] if re.search(r"\bor\b", answer) else parsed


def _union(alternatives: Any) -> Any:
    """`x < 2 or x > 3`, which is read as a set of two inequalities, as one set of numbers."""
    sympy = import_module("sympy")
    inequalities = getattr(alternatives, "args", ())
    if len(inequalities) < 2 or len(alternatives.free_symbols) != 1:
        return alternatives
    kinds = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
    if not all(isinstance(each, (*kinds, sympy.And)) for each in inequalities):
        return alternatives
    return sympy.Or(*inequalities).as_set()


def _imaginary(parsed: list[Any]) -> list[Any]:
    """Only the expressions, with the letter i read as the imaginary unit.

    The parser gives the other letters assumptions that depend on whether i occurs, so that the
    same letter would differ from one answer to the other; here they lose them.
    """
    sympy = import_module("sympy")

    def plain(symbol: Any) -> Any:
        return sympy.I if str(symbol) == "i" else sympy.Symbol(str(symbol))

    return [
        each.subs({symbol: plain(symbol) for symbol in each.free_symbols})
        for each in parsed
        if hasattr(each, "free_symbols")
    ]


if __name__ == "__main__":
    main()
