"""The answer checker's worker process: reads and writes one JSON line per comparison.

It runs as a script and depends only on `math-verify`. The parent kills it at the deadline, because
a library's signal-based timeouts fail outside of the main thread. An alarm ends the process if the
parent was killed itself.
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
_GRACE_S = 5  # the alarm rings this long after the parent's deadline
_DIGITS = 200  # digits to which exact values are compared; differences below 10^-15 still count

# Spellings that the parser misreads. The parent has already unified the spelling of symbols.
_DEGREES = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\(?)(\d+)\s*\^\s*\{?\\circ\}?")
_SET_OF = re.compile(  # {x : x > 2} is read as x > 2
    r"^\s*(?:\\left)?\\\{\s*[a-z]\s*(?:\\mid|\||:)([^|]*?)(?:\\right)?\\\}\s*$"
)


def main() -> None:
    """Answer `{"gold", "answer", "deadline_s"}` lines with `{"equal"}` lines until input ends."""
    # Replies use their own file descriptor, so that output of libraries cannot mix with them.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if sys.platform != "win32":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        # Limits memory, since evaluating a tower of powers could exhaust the machine's.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from math_verify import verify  # noqa: PLC0415 - slow, and only this process needs it

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        pair = json.loads(line)
        if sys.platform != "win32":
            signal.alarm(math.ceil(pair["deadline_s"]) + _GRACE_S)
        gold, answer = _parse(pair["gold"]), _parse(pair["answer"])
        decimals = [len(found) for found in re.findall(r"\.(\d+)", pair["gold"] + pair["answer"])]
        how: dict[str, Any] = {
            "float_rounding": max([6, *decimals]),
            "numeric_precision": 15 if decimals else _DIGITS,
            "timeout_seconds": None,
        }
        equal = bool(verify(gold, answer, allow_set_relation_comp=True, **how))
        letters = [str(s) for each in gold + answer for s in getattr(each, "free_symbols", ())]
        if not equal and "i" in letters:
            equal = bool(verify(_imaginary(gold), _imaginary(answer), **how))
        if sys.platform != "win32":
            signal.alarm(0)
        print(json.dumps({"equal": equal}), file=replies, flush=True)


def _parse(answer: str) -> list[Any]:
    from math_verify import parse  # noqa: PLC0415

    answer = _SET_OF.sub(r"\1", _DEGREES.sub(r"\1{\2\\frac{\\pi}{180}}", answer))
    parsed = list(parse("\\boxed{" + answer + "}", parsing_timeout=None))
    return [_union(parsed[0]), *parsed[1:]] if re.search(r"\bor\b", answer) else parsed


def _union(alternatives: Any) -> Any:
    """Turn a set of inequalities, parsed from `x < 2 or x > 3`, into one set of numbers."""
    sympy = import_module("sympy")
    inequalities = getattr(alternatives, "args", ())
    if len(inequalities) < 2 or len(alternatives.free_symbols) != 1:
        return alternatives
    kinds = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
    if not all(isinstance(each, (*kinds, sympy.And)) for each in inequalities):
        return alternatives
    return sympy.Or(*inequalities).as_set()


def _imaginary(parsed: list[Any]) -> list[Any]:
    """Return the expressions with the letter i replaced by the imaginary unit.

    The parser's assumptions about other letters depend on whether i occurs, so equal letters of two
    answers could differ. They are replaced by plain symbols.
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
