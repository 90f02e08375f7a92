"""Do two answers mean the same? Quick text rules first, then `math-verify` under a deadline.

The mathematics runs in a process of its own that is killed when it hangs: only the answer that
hung is lost, marked as such, and the next one gets a fresh process.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from beamwright.errors import UnavailableError
from beamwright.search.answers import normalise_answer

Verdict = Literal["equal", "different", "timeout", "crash"]

_WORKER = (sys.executable, "-P", str(Path(__file__).with_name("worker.py")))
_WORDS = re.compile(r"[A-Za-z ]{4,}")  # read as mathematics, east = e*a*s*t = seat
_LONGEST = 4096  # characters; longer answers are runaway text, not mathematics


class AnswerChecker:
    """Compares answers; owns at most one worker process. A context manager.

    deadline_s: most seconds for one comparison. start_s: most seconds for the worker to start.
    command: the worker's command line (tests put a misbehaving one here).
    """

    def __init__(
        self,
        deadline_s: float = 10.0,
        start_s: float = 120.0,
        command: Sequence[str] = _WORKER,
    ) -> None:
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._command = tuple(command)
        self._worker: _Worker | None = None
        self._known: dict[tuple[str, str], Verdict] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker process, if there is one. The checker can still be used."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def is_correct(self, gold: str | None, answer: str | None) -> bool | None:
        """Whether `answer` means `gold`; None when nobody knows what is right."""
        if gold is None:
            return None
        return answer is not None and self.compare(gold, answer) == "equal"

    def compare(self, gold: str, answer: str) -> Verdict:
        """The verdict on one pair; asked again, the same pair costs nothing.

        Raises:
            UnavailableError: if the worker process cannot be started at all.
        """
        quick = _compare_text(gold, answer)
        if quick is not None:
            return quick
        if (gold, answer) not in self._known:
            self._known[gold, answer] = self._ask(gold, answer)
        return self._known[gold, answer]

    def _ask(self, gold: str, answer: str) -> Verdict:
        if self._worker is None:
            self._worker = _Worker(self._command)
            if self._worker.read(self._start_s) is None:
                self.close()
                raise UnavailableError("the answer checker's process (math-verify) does not start")
        reply = self._worker.ask({"gold": gold, "answer": answer}, self._deadline_s)
        if reply is not None:
            return "equal" if reply["equal"] else "different"
        verdict: Verdict = "timeout" if self._worker.timed_out else "crash"
        self.close()
        return verdict


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

    def ask(self, question: dict[str, str], deadline_s: float) -> dict[str, Any] | None:
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


def _compare_text(gold: str, answer: str) -> Verdict | None:
    """The verdict where spelling or plain numbers decide it; None where mathematics must."""
    left, right = normalise_answer(gold), normalise_answer(answer)
    if left == right and left:
        return "equal"
    if not left or not right or len(gold) > _LONGEST or len(answer) > _LONGEST:
        return "different"
    if _WORDS.fullmatch(left) and _WORDS.fullmatch(right):
        return "equal" if left.casefold() == right.casefold() else "different"
    numbers = [_decimal(text) for text in (left, right)]
    if None not in numbers:
        return "equal" if numbers[0] == numbers[1] else "different"
    return None


def _decimal(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
