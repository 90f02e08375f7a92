"""Do two answers mean the same? Quick text rules first, then `math-verify` under a deadline.

The mathematics runs in a few processes that are killed when they hang: only the answer that
hung or crashed is lost, marked as such, and the next one gets a fresh process.

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
from typing import Any, Literal, Self

from beamwright.errors import InputError, UnavailableError
from beamwright.search.answers import counted_number, normalise_answer, read_number, split_unit

Verdict = Literal["equal", "different", "timeout", "crash"]

_WORKER = (sys.executable, "-P", str(Path(__file__).with_name("worker.py")))
_WORDS = re.compile(r"[A-Za-z ]{4,}")  # read as mathematics, east = e*a*s*t = seat
_OPTION = re.compile(r"\(?([A-J])[).:]+\s*\S.*", re.DOTALL)  # "(B) 12 cm"
_IN_BASE = re.compile(r"(\d[\dA-F]*)_\{?(\d+)\}?")  # x_1 is a variable
_LISTED_SET = re.compile(r"\\\{[^|:]*,[^|:]*\\\}")
_TUPLE = re.compile(r"[(\[].*,.*[)\]]")
_LEAST_S = 1.0  # a plain answer behind one that hung gets its moment
_LONGEST = 4096  # characters; longer answers are runaway text, not mathematics


class AnswerChecker:
    """Compares answers; owns at most `num_workers` processes. A context manager.

    Threads may share one: as many comparisons as there are workers run at once, the others
    wait. A single thread keeps to one process; none starts before it is needed.

    deadline_s: most seconds for one comparison. start_s: most seconds for a worker to start.
    command: a worker's command line (tests put a misbehaving one here).

    Raises:
        InputError: if `num_workers` is below 1.
    """

    def __init__(
        self,
        deadline_s: float = 10.0,
        start_s: float = 120.0,
        command: Sequence[str] = _WORKER,
        num_workers: int = 2,
    ) -> None:
        if num_workers < 1:
            raise InputError(f"num_workers must be at least 1, got {num_workers}")
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._command = tuple(command)
        self._num_workers = num_workers
        # The last process used is the next one used: idle places stay empty.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)
        self._known: dict[tuple[str, str], Verdict] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, once their comparisons are done. It can still be used."""
        workers = [self._places.get() for _ in range(self._num_workers)]
        for worker in workers:
            if worker is not None:
                worker.kill()
            self._places.put(None)

    def is_correct(self, gold: str | None, answer: str | None) -> bool | None:
        """Whether `answer` means `gold`; None when nobody knows what is right."""
        if gold is None:
            return None
        return answer is not None and self.compare(gold, answer) == "equal"

    def compare(self, gold: str, answer: str, until_s: float | None = None) -> Verdict:
        """The verdict on one pair; asked again, the same pair costs nothing. Thread-safe.

        until_s: on the monotonic clock, when it has to be there; what is not is a timeout.

        Raises:
            UnavailableError: if a worker process cannot be started at all.
        """
        decided = _decide(gold, answer)
        if isinstance(decided, str):
            return decided
        if decided in self._known:
            return self._known[decided]
        left_s = math.inf if until_s is None else until_s - time.monotonic()
        verdict = self._ask(*decided, until_s) if left_s > 0 else "timeout"
        if verdict != "timeout" or left_s >= self._deadline_s:  # with more time it may be another
            self._known[decided] = verdict
        return verdict

    def judge(self, gold: str, answers: Sequence[str], budget_s: float = 20.0) -> list[bool]:
        """Which answers mean `gold`; what is not decided in `budget_s` seconds in all does not.

        On all workers at once, so that a problem whose answers all hang costs no more than that.

        Raises:
            UnavailableError: if a worker process cannot be started at all.
        """
        until_s = time.monotonic() + budget_s
        with ThreadPoolExecutor(self._num_workers) as threads:
            verdicts = threads.map(lambda answer: self.compare(gold, answer, until_s), answers)
            return [verdict == "equal" for verdict in verdicts]

    def _ask(self, gold: str, answer: str, until_s: float | None = None) -> Verdict:
        worker = self._places.get()
        keep: _Worker | None = None
        try:
            worker = worker or self._start()  # its start is nobody's time
            deadline_s = self._deadline_s
            if until_s is not None:
                deadline_s = max(_LEAST_S, min(deadline_s, until_s - time.monotonic()))
            question = {"gold": gold, "answer": answer, "deadline_s": deadline_s}
            reply = worker.ask(question, deadline_s)
            if reply is not None and "equal" in reply:
                keep = worker
                return "equal" if reply["equal"] else "different"
            return "timeout" if worker.timed_out else "crash"
        finally:
            # Whatever ended the wait, a process that still owes a reply is never asked again.
            if worker is not None and keep is None:
                worker.kill()
            self._places.put(keep)

    def _start(self) -> _Worker:
        worker = _Worker(self._command)
        if worker.read(self._start_s) is None:
            worker.kill()
            raise UnavailableError("the answer checker's process (math-verify) does not start")
        return worker


class _Worker:
    """One process that answers JSON lines; any missed deadline ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.timed_out = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def ask(self, question: dict[str, Any], deadline_s: float) -> dict[str, Any] | None:
        """The reply, or None if the process hung (and was killed) or died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self.read(deadline_s)

    def read(self, deadline_s: float) -> dict[str, Any] | None:
        """The next line; a timer kills a process that is late, which ends the wait."""
        assert self._process.stdout is not None
        timer = threading.Timer(deadline_s, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()
        # A reply that came as the timer fired is dropped too: the process is gone either way.
        if self.timed_out or not line.endswith("\n"):
            return None
        try:
            reply = json.loads(line)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None

    def _give_up(self) -> None:
        self.timed_out = True
        self._process.kill()

    def kill(self) -> None:
        """End the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent input of a process that has died
                    pipe.close()


def _decide(gold: str, answer: str) -> Verdict | tuple[str, str]:
    """The verdict where text and plain numbers decide it, else the pair for mathematics."""
    if max(len(gold), len(answer)) > _LONGEST:
        return _verdict(normalise_answer(gold) == normalise_answer(answer))
    gold_value, gold_unit = split_unit(gold)
    value, unit = split_unit(answer)
    scale = Fraction(1)
    if gold_unit is not None and unit is not None:
        if gold_unit.dimension != unit.dimension:
            return "different"
        scale = gold_unit.factor / unit.factor
    left, right = normalise_answer(gold_value), normalise_answer(value)
    left_number, right_number = read_number(left), read_number(right)
    if left_number is not None and right_number is not None:
        return _verdict(left_number * scale == right_number)
    if gold_unit is None and unit is None:
        left_number = left_number if left_number is not None else _counted(gold, right_number)
        right_number = right_number if right_number is not None else _counted(answer, left_number)
        if left_number is not None and right_number is not None:
            return _verdict(left_number == right_number)
    if scale != 1:
        return f"({gold_value})\\cdot\\frac{{{scale.numerator}}}{{{scale.denominator}}}", value
    return _decide_text(left, right) or (gold_value, value)


def _counted(answer: str, other: Fraction | None) -> Fraction | None:
    """The number of `60 eggs`, which is to be compared with a plain number."""
    number = counted_number(answer) if other is not None else None
    return None if number is None else read_number(normalise_answer(number))


def _decide_text(left: str, right: str) -> Verdict | None:
    """The verdict on two normalised answers without units, or None."""
    if left == right or not left or not right:
        return _verdict(left == right != "")
    if re.fullmatch("[A-J]", left) and (option := _OPTION.fullmatch(right)):
        return _verdict(option[1] == left)
    if _WORDS.fullmatch(left) and _WORDS.fullmatch(right):
        return _verdict(left.casefold() == right.casefold())
    left_base, right_base = _IN_BASE.fullmatch(left), _IN_BASE.fullmatch(right)
    if left_base and right_base:
        return _verdict(left_base.groups() == right_base.groups())
    for one, other in ((left, right), (right, left)):
        if _LISTED_SET.fullmatch(one) and _TUPLE.fullmatch(other):
            return "different"
    return None


def _verdict(equal: bool) -> Verdict:
    return "equal" if equal else "different"
