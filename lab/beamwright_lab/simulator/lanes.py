"""Two lanes on a virtual clock: the verifier scores while the generator decodes, on one device.

Work is taken to share a device like a fluid. What leaves bandwidth, arithmetic, or the time between
launches unused leaves it to the other; where both want more than there is, they slow down by the
same factor. So lanes are never faster than the roofline of all that they do; a real card, whose
kernels compete for caches, registers and schedulers as well, is slower than that. The executor's
rules are those of `engine.executor`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamwright.engine.executor import Executor, Lane
from beamwright.engine.scoring import Scoring
from beamwright.engine.timeline import Accounting
from beamwright.protocols import Event, StepWriter, Verifier
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import Work


@dataclass
class RunningWork:
    """Work under way. left_s: seconds that the rest of it takes alone. card: where it runs."""

    work: Work
    left_s: float
    card: int


class Tape(VirtualClock):
    """The clock of a verifier whose work is noted down, and takes its time later.

    Waits for the link are not: nothing else goes on meanwhile that has not begun.
    """

    def __init__(self, clock: SharedClock, card: int = 0) -> None:
        super().__init__()
        self._clock, self._card = clock, card
        self.pieces: deque[RunningWork] = deque()

    def run(self, work: Work) -> None:
        """To be done after what is on the tape."""
        if work.seconds > 0:
            self.pieces.append(RunningWork(work, work.seconds, self._card))

    def advance(self, seconds: float) -> None:
        self.run(Work.alone(seconds))


class SimulatedLane(Lane):
    """A verifier that scores batch after batch on a tape.

    A batch's KV is allocated when it begins; its scores are known when its work is done.
    """

    def __init__(self, scoring: Scoring, tape: Tape) -> None:
        super().__init__(scoring)
        self._tape = tape
        self._now: list[Event] | None = None
        self._begins = False
        self.results: deque[list[Event]] = deque()

    @property
    def busy(self) -> bool:
        return self.piece() is not None

    def take(self) -> list[Event] | None:
        return self.results.popleft() if self.results else None

    def piece(self) -> RunningWork | None:
        """What it does now; None if there is nothing to do."""
        pieces = self._tape.pieces
        while True:
            if pieces and pieces[0].left_s > 0:
                return pieces[0]
            if pieces:
                pieces.popleft()
                continue
            if self._now is not None:
                self.results.append(self._now)
                self._now = None
            if self._begins or not self.scoring.queue:
                return None
            self._begins = True  # asks the clock to wait where its KV has to be loaded
            self._now = self.scoring.score(self.scoring.queue.take())
            self._begins = False

    def close(self) -> None:
        """Forget what waits, and what is under way."""
        super().close()
        self._tape.pieces.clear()
        self.results.clear()
        self._now = None


class SharedClock(VirtualClock):
    """The time of a device on which lanes run beside its caller's work.

    both_s: seconds in which both ran; beside_s: in which only lanes did, `hidden_s` of them while
    the caller waited for the link.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[SimulatedLane] = []
        self.both_s = self.beside_s = self.hidden_s = 0.0

    def run(self, work: Work) -> None:
        own = RunningWork(work, work.seconds, 0)
        while own.left_s > 0:
            self._pass(own)

    def advance(self, seconds: float) -> None:
        self.run(Work.alone(seconds))

    def reach(self, time_s: float) -> float:
        began_s, beside_s = self.now_s, self.beside_s
        while self.now_s < time_s and self._pass(None, time_s):
            pass
        super().reach(time_s)
        self.hidden_s += self.beside_s - beside_s
        return self.now_s - began_s

    def until(self, ready: Callable[[], bool]) -> None:
        """Let lanes run until this is so, or none has anything to do."""
        while not ready() and self._pass(None):
            pass

    def _pass(self, own: RunningWork | None, until_s: float = math.inf) -> bool:
        """Let time pass until some piece is done; False if there is none."""
        beside = [piece for lane in self.lanes if (piece := lane.piece()) is not None]
        pieces = beside if own is None else [own, *beside]
        if not pieces:
            return False
        cards = {piece.card for piece in pieces}
        rates = {card: _rate([p.work for p in pieces if p.card == card]) for card in cards}
        first = min(pieces, key=lambda piece: piece.left_s / rates[piece.card])
        seconds = first.left_s / rates[first.card]
        if seconds > until_s - self.now_s:
            seconds = until_s - self.now_s
        else:
            first.left_s = 0.0  # exactly: a difference could leave a rounding
        for piece in pieces:
            piece.left_s = max(0.0, piece.left_s - seconds * rates[piece.card])
        if own is not None and beside:
            self.both_s += seconds
        elif beside:
            self.beside_s += seconds
        super().advance(seconds)
        for lane in self.lanes:
            lane.piece()  # what is done is known at once
        return True


def _rate(together: Sequence[Work]) -> float:
    """How fast work goes on beside other work on one card, as a share of what it does alone."""
    memory = sum(work.memory_s / work.seconds for work in together)
    compute = sum(work.compute_s / work.seconds for work in together)
    return 1 / max(1.0, memory, compute)


class LanedExecutor(Executor):
    """An executor with workers on a virtual clock, with a lane for each copy of the verifier."""

    def __init__(
        self,
        writer: StepWriter,
        verifiers: Sequence[tuple[Verifier, Tape]],
        accounting: Accounting,
        clock: SharedClock,
        stalled_s: Callable[[], float] = lambda: 0.0,
        *,
        most_steps: int = 1,
    ) -> None:
        clock.lanes = [
            SimulatedLane(Scoring(verifier, accounting, most_steps=most_steps), tape)
            for verifier, tape in verifiers
        ]
        super().__init__(writer, clock.lanes, stalled_s)
        self._clock = clock

    def _take(self) -> list[Event] | None:
        for lane in self._clock.lanes:
            lane.piece()  # what is done is known, and the next batch has begun
        return super()._take()

    def _wait_for_scores(self) -> None:
        self._clock.until(lambda: any(lane.results for lane in self._clock.lanes))
