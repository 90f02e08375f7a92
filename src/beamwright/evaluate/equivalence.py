"""Do two answers mean the same? Quick text rules first, then `math-verify` under a deadline.

The mathematics runs in a few processes that are killed when they hang: only the answer that
hung or crashed is lost, and the next one gets a fresh process.

Conventions: an answer may leave out the unit that the problem fixes (`5` for `5 cm`), but not
name another one; `15%` is `0.15`, and `15` where a percentage is asked; an interval may be written
as an inequality; the order of a list of solutions is free, that of a tuple is not.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from beamwright.errors import UnavailableError
from beamwright.search.answers import counted_number, normalise_answer, read_number, split_unit

_WORKER = (sys.executable, "-P", str(Path(__file__).with_name("worker.py")))
_WORDS = re.compile(r"[A-Za-z ]{4,}")  # read as mathematics, east = e*a*s*t = seat
_OPTION = re.compile(r"\(?([A-J])[).:]+\s*\S.*", re.DOTALL)  # "(B) 12 cm"
_IN_BASE = re.compile(r"(\d[\dA-F]*)_\{?(\d+)\}?")  # x_1 is a variable
_LISTED_SET = re.compile(r"\\\{[^|:]*,[^|:]*\\\}")
_TUPLE = re.compile(r"[(\[].*,.*[)\]]")
_START_S = 120.0  # most for a worker to start
_LEAST_S = 1.0  # a plain answer behind one that hung gets its moment
_LONGEST = 4096  # characters; longer answers are runaway text, not mathematics


class AnswerChecker:
    """Compares answers; owns at most `num_workers` processes. A context manager.

    Threads may share one: as many comparisons as there are workers run at once, the others
    wait. A single thread keeps to one process; none starts before it is needed.

    deadline_s: most seconds for one comparison. command: a worker's command
    line (tests put a misbehaving one here).
    """

    def __init__(
        self, deadline_s: float = 10.0, command: Sequence[str] = _WORKER, num_workers: int = 2
    ) -> None:
        self._deadline_s = deadline_s
        self._command = tuple(command)
        self._num_workers = num_workers
        # The last process used is the next one used: idle places stay empty.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the worker processes, once their comparisons are done. It can still be used."""
        workers = [self._places.get() for _ in range(self._num_workers)]
        for worker in workers:
            if worker is not None:
                worker.kill()
            self._places.put(None)

    def compare(self, gold: str, answer: str, until_s: float = math.inf) -> bool | None:
        """Whether one answer means the other, None if its process hung or died. Thread-safe.

        until_s: on the monotonic clock, when it has to be there.

        Raises:
            UnavailableError: if a worker process cannot be started at all.
        """
        decided = _decide(gold, answer)
        if isinstance(decided, bool):
            return decided
        return self._ask(*decided, until_s) if time.monotonic() < until_s else None

    def judge(
        self, gold: str | None, answers: Sequence[str | None], budget_s: float = 20.0
    ) -> dict[str | None, bool | None]:
        """Which answers mean `gold`, by answer, all of them None where nobody knows what is right.

        Each spelling is asked about once. What is not decided in `budget_s` seconds in all is
        wrong: on all workers at once, a problem whose answers all hang costs no more than that.

        Raises:
            UnavailableError: if a worker process cannot be started at all.
        """
        if gold is None:
            return dict.fromkeys([*answers, None])
        spelled: dict[str, list[str]] = {}
        for answer in answers:
            if answer is not None:
                spelled.setdefault(normalise_answer(answer), []).append(answer)
        until_s = time.monotonic() + budget_s
        with ThreadPoolExecutor(self._num_workers) as threads:
            asked = [same[0] for same in spelled.values()]
            found = threads.map(lambda answer: self.compare(gold, answer, until_s), asked)
        verdicts: dict[str | None, bool | None] = {None: False}
        for same, equal in zip(spelled.values(), found, strict=True):
            verdicts |= dict.fromkeys(same, equal is True)
        return verdicts

    def _ask(self, gold: str, answer: str, until_s: float) -> bool | None:
        worker = self._places.get()
        equal: bool | None = None
        try:
            if worker is None:  # its start is nobody's time
                worker = _Worker(self._command)
                if worker.read(_START_S) is None:
                    raise UnavailableError(
                        "the answer checker's process (math-verify) does not start"
                    )
            deadline_s = max(_LEAST_S, min(self._deadline_s, until_s - time.monotonic()))
            equal = worker.ask({"gold": gold, "answer": answer, "deadline_s": deadline_s})
        finally:
            # Whatever ended the wait, a process that still owes a reply is never asked again.
            if worker is not None and equal is None:
                worker.kill()
                worker = None
            self._places.put(worker)
        return equal


class _Worker:
    """One process that answers JSON lines; any missed deadline ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            command, **pipes, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        )

    def ask(self, question: dict[str, Any]) -> bool | None:
        """Its verdict, or None if the process hung (and was killed) or died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        equal = (self.read(question["deadline_s"]) or {}).get("equal")
        return equal if isinstance(equal, bool) else None

    def read(self, deadline_s: float) -> dict[str, Any] | None:
        """The next line; a timer kills a process that is late, which ends the wait."""
        assert self._process.stdout is not None
        timer = threading.Timer(deadline_s, self._process.kill)
        timer.daemon = True
        until_s = time.monotonic() + deadline_s
        timer.start()
        try:
            reply = json.loads(self._process.stdout.readline())
        except ValueError:
            return None
        finally:
            timer.cancel()
            timer.join()
        # A reply that came as the timer fired is dropped too: the process is gone either way.
        return reply if isinstance(reply, dict) and time.monotonic() < until_s else None

    def kill(self) -> None:
        """End the process and close its pipes."""
        # What cannot be closed is unsent input of a process that has died.
        with contextlib.suppress(OSError), self._process:
            self._process.kill()


def _decide(gold: str, answer: str) -> bool | tuple[str, str]:
    """The verdict where text and plain numbers decide it, else the pair for mathematics."""
    if max(len(gold), len(answer)) > _LONGEST:
        return normalise_answer(gold) == normalise_answer(answer)
    gold_value, gold_unit = split_unit(gold)
    value, unit = split_unit(answer)
    scale = Fraction(1)
    if gold_unit is not None and unit is not None:
        if gold_unit.dimension != unit.dimension:
            return False
        scale = gold_unit.factor / unit.factor
    left, right = normalise_answer(gold_value), normalise_answer(value)
    left_number, right_number = read_number(left), read_number(right)
    if gold_unit is None and unit is None:
        left_number = left_number if left_number is not None else _counted(gold, right_number)
        right_number = right_number if right_number is not None else _counted(answer, left_number)
    if left_number is not None and right_number is not None:
        return left_number * scale == right_number
    if scale != 1:
        return f"({gold_value})\\cdot\\frac{{{scale.numerator}}}{{{scale.denominator}}}", value
    equal = _decide_text(left, right)
    return (gold_value, value) if equal is None else equal


def _counted(answer: str, other: Fraction | None) -> Fraction | None:
    """The number of `60 eggs`, which is to be compared with a plain number."""
    number = counted_number(answer) if other is not None else None
    return None if number is None else read_number(normalise_answer(number))


def _decide_text(left: str, right: str) -> bool | None:
    """The verdict on two normalised answers without units, or None."""
    if left == right or not left or not right:
        return left == right != ""
    if re.fullmatch("[A-J]", left) and (option := _OPTION.fullmatch(right)):
        return option[1] == left
    if _WORDS.fullmatch(left) and _WORDS.fullmatch(right):
        return left.casefold() == right.casefold()
    left_base, right_base = _IN_BASE.fullmatch(left), _IN_BASE.fullmatch(right)
    if left_base and right_base:
        return left_base.groups() == right_base.groups()
    for one, other in ((left, right), (right, left)):
        if _LISTED_SET.fullmatch(one) and _TUPLE.fullmatch(other):
            return False
    return None
