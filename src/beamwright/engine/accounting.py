"""Clocks of a run: every instant counted once."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

BOTH = "both"


class Spent(NamedTuple):
    """Seconds of decoding and of scoring; passes of the verifier, and tokens of the steps in
    them."""

    decode_s: float = 0.0
    verify_s: float = 0.0
    calls: int = 0
    scored_tokens: int = 0

    def since(self, before: Spent) -> Spent:
        return Spent(
            self.decode_s - before.decode_s,
            self.verify_s - before.verify_s,
            self.calls - before.calls,
            self.scored_tokens - before.scored_tokens,
        )


@dataclass(frozen=True, eq=False)
class _Phase:
    name: str
    thread: int


class Accounting:
    """Phase seconds ("decode", "verify", "schedule") and groups of one run.

    calls, scored, scored_tokens: of the verifier, the steps in them, and these steps' tokens.
    Phases of one thread do not nest. Instants in which two threads are in a phase count as "both".
    Tokens are counted on the nodes that they were spent on (`Node.usage`).
    clock: seconds from any fixed origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_groups = self.calls = self.scored = self.scored_tokens = 0
        self._lock = threading.Lock()
        self._phases: list[_Phase] = []
        self._counted_s = 0.0

    def spent(self) -> Spent:
        """So far, whatever was decoded or scored."""
        decode_s, verify_s = (self.seconds.get(name, 0.0) for name in ("decode", "verify"))
        return Spent(decode_s, verify_s, self.calls, self.scored_tokens)

    def since(self, seconds: Mapping[str, float], num_groups: int) -> Accounting:
        """What has been added to these."""
        added = Accounting(self._clock)
        with self._lock:
            self._count()
            for name, total in self.seconds.items():
                added.seconds[name] = total - seconds.get(name, 0.0)
        added.num_groups = self.num_groups - num_groups
        return added

    @contextmanager
    def phase(self, name: str, stalled_s: Callable[[], float] | None = None) -> Iterator[None]:
        """Time a phase.

        stalled_s: seconds of waiting for transfers so far. What the phase adds to them counts as
        "stall" instead, but for what another phase has hidden.
        """
        stalled = 0.0 if stalled_s is None else stalled_s()
        phase = _Phase(name, threading.get_ident())
        with self._lock:
            self._count()
            self._phases.append(phase)
            before = self.seconds[name]
        try:
            yield
        finally:
            with self._lock:
                self._count()
                counts = phase in self._phases
                self._phases = [each for each in self._phases if each is not phase]
                if counts and stalled_s is not None:
                    alone = self.seconds[name] - before
                    stalled = min(stalled_s() - stalled, alone)
                    self.seconds[name] -= stalled
                    self.seconds["stall"] += stalled

    def leave(self, thread: int | None) -> None:
        """End the phase of a thread that may never come back; what follows of it does not count."""
        with self._lock:
            self._count()
            self._phases = [each for each in self._phases if each.thread != thread]

    def _count(self) -> None:
        """Give the time since the last look to those who ran."""
        now = self._clock()
        if self._phases:
            name = self._phases[0].name if len(self._phases) == 1 else BOTH
            self.seconds[name] += now - self._counted_s
        self._counted_s = now
