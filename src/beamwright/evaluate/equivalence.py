"""Answer equivalence: text rules first, then `math-verify` in worker processes with a timeout.

The mathematics runs in a few worker processes. A worker that hangs is killed, so only the answer
that hung or crashed its worker is lost, and the next answer gets a new process.

Conventions: an answer may omit the unit that the problem fixes (`5` for `5 cm`) or the thing that
is counted, but may not name a different one (`search.quantity`). `15%` equals `0.15`, and `15` if
the problem asks for a percentage. Exact values are compared exactly. A decimal with six digits
(`0.333333`, `1.41421`) equals the exact value it rounds. An interval may be written as an
inequality. The order of a list of solutions is free, the order of a tuple is not. A sequence with
dots equals the values that it lists.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from beamwright.errors import UnavailableError
from beamwright.search.answer_keys import (
    canonical_value,
    chosen_option,
    normalise_answer,
    split_list,
    split_option,
)
from beamwright.search.quantity import Quantity, normalise_layout, read_number, read_quantity

_WORKER = (sys.executable, "-P", str(Path(__file__).with_name("worker.py")))
_WORDS = re.compile(r"[A-Za-z ]{4,}")  # parsed as products of letters, "east" would equal "seat"
_IN_BASE = re.compile(r"(\d[\dA-F]*)_\{?(\d+)\}?")  # a number in a base; x_1 is a variable
_LISTED_SET = re.compile(r"\\\{[^|:]*,[^|:]*\\\}")
_TUPLE = re.compile(r"[(\[].*,.*[)\]]")
_DECIMAL = re.compile(r"-?\d*\.?\d*")
_SIX_DIGITS = re.compile(r"-?(?=[\d.]*\.)[0.]*[1-9](?:\.?\d){5,}")
_ANY_UNIT = frozenset(("unit", "square", "sq", "cubic"))
_START_S = 120.0  # timeout for the start of a worker
_LONGEST = 4096  # characters of both answers; longer ones are runaway text, not mathematics


class AnswerChecker:
    """Checker of answers, with at most `num_workers` processes. A context manager; thread-safe.

    Each worker runs one comparison at a time, and further threads wait. Processes start when they
    are needed; a single thread uses one.

    deadline_s: timeout of one comparison in seconds.
    command: the command line of a worker; tests replace it by a misbehaving one.
    """

    def __init__(
        self, deadline_s: float = 10.0, command: Sequence[str] = _WORKER, num_workers: int = 2
    ) -> None:
        self._deadline_s = deadline_s
        self._command = tuple(command)
        self._num_workers = num_workers
        # Last in, first out: the last process is reused before a new one is started.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for running comparisons and end the processes; later calls start new ones."""
        workers = [self._places.get() for _ in range(self._num_workers)]
        for worker in workers:
            if worker is not None:
                worker.kill()
            self._places.put(None)

    def compare(
        self, gold: str, answer: str, options: Mapping[str, str] | None = None
    ) -> bool | None:
        """Return whether the answers mean the same; None if the process hung or died.

        options: texts of a multiple-choice problem by letter; a letter equals its text.

        Raises:
            UnavailableError: if a worker process cannot be started at all.
        """
        if options and (right := chosen_option(gold, options)):
            if chosen := chosen_option(answer, options):
                return chosen == right
            gold = options[right]
        decided = _decide(gold, answer)
        return decided if isinstance(decided, bool) else self._ask(*decided)

    def judge(
        self,
        gold: str | None,
        answers: Sequence[str | None],
        options: Mapping[str, str] | None = None,
    ) -> dict[str | None, bool | None]:
        """Return for each answer whether it means `gold`; None for all if `gold` is None.

        Equal spellings are compared once. An answer whose comparison timed out maps to None.

        Raises:
            UnavailableError: if a worker process cannot be started at all.
        """
        if gold is None:
            return dict.fromkeys([*answers, None])
        spelled: dict[str, list[str]] = {}
        for answer in answers:
            if answer is not None:
                spelled.setdefault(normalise_layout(answer), []).append(answer)
        with ThreadPoolExecutor(self._num_workers) as threads:
            asked = [same[0] for same in spelled.values()]
            found = threads.map(lambda answer: self.compare(gold, answer, options), asked)
        verdicts: dict[str | None, bool | None] = {None: False}
        for same, equal in zip(spelled.values(), found, strict=True):
            verdicts |= dict.fromkeys(same, equal)
        return verdicts

    def _ask(self, gold: str, answer: str) -> bool | None:
        worker = self._places.get()
        equal: bool | None = None
        try:
            if worker is None:  # starting a process does not count against the deadline
                worker = _Worker(self._command)
                if worker.read(_START_S) is None:
                    raise UnavailableError(
                        "the answer checker's process (math-verify) does not start"
                    )
            question = {"gold": gold, "answer": answer, "deadline_s": self._deadline_s}
            equal = worker.ask(question)
        finally:
            # A process that has not replied in time is killed and never reused.
            if worker is not None and equal is None:
                worker.kill()
                worker = None
            self._places.put(worker)
        return equal


class _Worker:
    """One worker process (`evaluate.worker`). If it does not reply, the caller must kill it."""

    def __init__(self, command: Sequence[str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            command, **pipes, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        )
        self._reader = ThreadPoolExecutor(1)

    def ask(self, question: dict[str, Any]) -> bool | None:
        """Send a comparison, and return the verdict; None if the process hangs or has died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        equal = (self.read(question["deadline_s"]) or {}).get("equal")
        return equal if isinstance(equal, bool) else None

    def read(self, deadline_s: float) -> dict[str, Any] | None:
        """Return the next line of output as JSON; None if none comes within `deadline_s`."""
        assert self._process.stdout is not None
        try:
            line = self._reader.submit(self._process.stdout.readline).result(deadline_s)
            reply = json.loads(line)
        except (TimeoutError, ValueError):
            return None
        return reply if isinstance(reply, dict) else None

    def kill(self) -> None:
        """Kill the process, which also ends the thread that reads from it, and close its pipes."""
        self._process.kill()
        self._reader.shutdown()
        # Closing the pipe of a dead process raises if input was not sent.
        with contextlib.suppress(OSError), self._process:
            pass


def _decide(gold: str, answer: str) -> bool | tuple[str, str]:
    """Return the verdict if text and exact numbers decide; else the texts for `math-verify`."""
    left_text, right_text = normalise_layout(gold), normalise_layout(answer)
    if left_text == right_text or "" in (left_text, right_text) or len(gold + answer) > _LONGEST:
        return left_text == right_text != ""
    chosen = _decide_option(gold, answer)
    if chosen is not None:
        return chosen
    left = read_quantity(gold)
    right = read_quantity(answer, bare=read_number(normalise_layout(left.value)) is not None)
    if left.is_text or right.is_text or not _measure_alike(left, right):
        return left_text.casefold() == right_text.casefold()
    if "\\ldots" in left_text + right_text:  # a sequence with dots equals the values it lists
        return normalise_answer(gold) == normalise_answer(answer)
    scale = left.unit.factor / right.unit.factor if left.unit and right.unit else Fraction(1)
    equal = _decide_exact(left, right, scale)
    if equal is None and scale == 1 and left.in_percent == right.in_percent:
        equal = _decide_text(normalise_layout(left.value), normalise_layout(right.value))
    if equal is not None:
        return equal
    # `math-verify` gets only values, in one unit.
    gold, answer = (each.value + "\\%" * each.in_percent for each in (left, right))
    by = f"\\cdot\\frac{{{scale.numerator}}}{{{scale.denominator}}}" if scale != 1 else ""
    return (f"({gold}){by}" if by else gold), answer


def _decide_option(gold: str, answer: str) -> bool | tuple[str, str] | None:
    """Return the verdict if an answer names an option, such as `(B) 12`; None if none does.

    The letters or the texts may match. If `math-verify` has to compare the texts, return both texts
    instead.
    """
    left, right = split_option(gold), split_option(answer)
    if left and right and (left[0] != right[0] or "" in (left[1], right[1])):
        return left[0] == right[0]
    if left and left[1]:
        return _decide(left[1], right[1] if right else answer)
    return _decide(gold, right[1]) if right and right[1] else None


def _measure_alike(left: Quantity, right: Quantity) -> bool:
    """Return False if both name a unit, or a counted thing, and the two names differ."""
    if left.unit and right.unit and left.unit.dimension != right.unit.dimension:
        return False
    if bool(left.unit) != bool(right.unit):
        return (right.words if left.unit else left.words) <= _ANY_UNIT
    return left.words <= right.words or right.words <= left.words


def _decide_exact(left: Quantity, right: Quantity, scale: Fraction) -> bool | None:
    """Return the verdict on exact numbers, also with names (`x = 3`); None for other answers.

    scale: factor that converts `left` to the unit of `right`.
    """
    texts = normalise_layout(left.value), normalise_layout(right.value)
    gold, answer = map(read_number, texts)
    if gold is None or answer is None:
        first, other = (
            re.findall(r"[{,][^,=]+=([^,]+?)(?=,|\\\})", canonical_value(each.value))
            for each in (left, right)
        )
        if bool(first) == bool(other):
            return None
        # `a=1, b=2` equals `1, 2` only in this order.
        plain = split_list(right.value if first else left.value)[1]
        return (first or other) == [*map(normalise_answer, plain)]
    by = Fraction(100 if right.in_percent else 1, 100 if left.in_percent else 1)
    equal = answer in (gold * scale, gold * scale * by)
    return equal or (None if _may_stand_for(*texts) or _may_stand_for(*texts[::-1]) else False)


def _may_stand_for(decimal: str, exact: str) -> bool:
    """Return True if `decimal` has at least six digits and `exact` is not itself a decimal.

    If so, `math-verify` may compare the two with rounding.
    """
    return bool(_SIX_DIGITS.fullmatch(decimal)) and not _DECIMAL.fullmatch(exact)


def _decide_text(left: str, right: str) -> bool | None:
    """Return the verdict by comparing normalised texts without units; None if undecided."""
    if left == right:
        return True
    if _WORDS.fullmatch(left) and _WORDS.fullmatch(right):
        return left.casefold().removesuffix("s") == right.casefold().removesuffix("s")
    left_base, right_base = _IN_BASE.fullmatch(left), _IN_BASE.fullmatch(right)
    if left_base and right_base:
        return left_base.groups() == right_base.groups()
    for one, other in ((left, right), (right, left)):
        if _LISTED_SET.fullmatch(one) and _TUPLE.fullmatch(other):
            return False
    return None
