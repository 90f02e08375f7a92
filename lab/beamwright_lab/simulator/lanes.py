"""Concurrent decoding and scoring on a virtual clock, with the executor rules of `engine.executor`.

Concurrent work shares a device like a fluid: each model uses the bandwidth, the arithmetic and the
time between launches that the other leaves idle. If both need more than there is, both slow down by
the same factor. So together they are never faster than the roofline of their total work. A real GPU
is slower, because kernels also compete for caches, registers and schedulers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamwright.engine.executor import Executor, VerifierLane
from beamwright.engine.scoring import VerifierCaller
from beamwright.engine.timeline import PhaseTimer
from beamwright.protocols import Event, StepWriter, Verifier
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import Work


@dataclass
class RunningWork:
    """Work that has been started.

    left_s: seconds that the remaining work takes if nothing else runs.
    card: number of the device; 0 is the generator's.
    """

    work: Work
    left_s: float
    card: int


class QueueClock(VirtualClock):
    """The clock given to a concurrent verifier: it queues work for the shared clock.

    Waiting for the link is not queued.
    """

    def __init__(self, clock: SharedClock, card: int = 0) -> None:
        super().__init__()
        self._clock, self._card = clock, card
        self.pieces: deque[RunningWork] = deque()

    def run(self, work: Work) -> None:
        """Queue work behind the work already in the queue."""
        if work.seconds > 0:
            self.pieces.append(RunningWork(work, work.seconds, self._card))

    def advance(self, seconds: float) -> None:
        self.run(Work.alone(seconds))


class SimulatedLane(VerifierLane):
    """A verifier that scores its batches in order, concurrently with the generator.

    The KV of a batch is allocated when its scoring starts. Its scores are available when its work
    is done.
    """

    def __init__(self, scoring: VerifierCaller, queue: QueueClock) -> None:
        super().__init__(scoring)
        self._work_queue = queue
        self._current_events: list[Event] | None = None
        self._starting = False
        self.results: deque[list[Event]] = deque()

    @property
    def busy(self) -> bool:
        return self.current_work() is not None

    def take(self) -> list[Event] | None:
        return self.results.popleft() if self.results else None

    def current_work(self) -> RunningWork | None:
        """Return the current work, starting the next batch if needed; None if idle."""
        pieces = self._work_queue.pieces
        while True:
            if pieces and pieces[0].left_s > 0:
                return pieces[0]
            if pieces:
                pieces.popleft()
                continue
            if self._current_events is not None:
                self.results.append(self._current_events)
                self._current_events = None
            if self._starting or not self.scoring.queue:
                return None
            # `score` may wait for loads, and the clock then calls `current_work` again.
            self._starting = True
            self._current_events = self.scoring.score(self.scoring.queue.take())
            self._starting = False

    def close(self) -> None:
        """Drop waiting and running batches, and unread results."""
        super().close()
        self._work_queue.pieces.clear()
        self.results.clear()
        self._current_events = None


class SharedClock(VirtualClock):
    """The clock of a device that the generator, its caller, shares with verifier lanes.

    both_s: seconds in which the generator and a lane computed.
    beside_s: seconds in which only lanes computed.
    hidden_s: those of `beside_s` in which the generator waited for the link.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[SimulatedLane] = []
        self.both_s = self.beside_s = self.hidden_s = 0.0

    def run(self, work: Work) -> None:
        own = RunningWork(work, work.seconds, 0)
        while own.left_s > 0:
            self._advance_to_next_end(own)

    def advance(self, seconds: float) -> None:
        self.run(Work.alone(seconds))

    def advance_to(self, time_s: float) -> float:
        began_s, beside_s = self.now_s, self.beside_s
        while self.now_s < time_s and self._advance_to_next_end(None, time_s):
            pass
        super().advance_to(time_s)
        self.hidden_s += self.beside_s - beside_s
        return self.now_s - began_s

    def run_until(self, ready: Callable[[], bool]) -> None:
        """Run the lanes until `ready` returns true or all are idle."""
        while not ready() and self._advance_to_next_end(None):
            pass

    def _advance_to_next_end(self, own: RunningWork | None, until_s: float = math.inf) -> bool:
        """Advance until a piece of work ends, at most to `until_s`; False if there is no work.

        own: the generator's work, if any.
        """
        beside = [piece for lane in self.lanes if (piece := lane.current_work()) is not None]
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
            first.left_s = 0.0  # a subtraction could leave a rounding error
        for piece in pieces:
            piece.left_s = max(0.0, piece.left_s - seconds * rates[piece.card])
        if own is not None and beside:
            self.both_s += seconds
        elif beside:
            self.beside_s += seconds
        super().advance(seconds)
        for lane in self.lanes:
            lane.current_work()  # publish results of work that has just ended
        return True


def _rate(together: Sequence[Work]) -> float:
    """Return the speed of concurrent work on one device, as a share of its speed alone."""
    memory = sum(work.memory_s / work.seconds for work in together)
    compute = sum(work.compute_s / work.seconds for work in together)
    return 1 / max(1.0, memory, compute)


class LanedExecutor(Executor):
    """A simulated executor with one concurrent lane for each copy of the verifier."""

    def __init__(
        self,
        writer: StepWriter,
        verifiers: Sequence[tuple[Verifier, QueueClock]],
        phase_timer: PhaseTimer,
        clock: SharedClock,
        stalled_s: Callable[[], float] = lambda: 0.0,
        *,
        most_steps: int = 1,
    ) -> None:
        clock.lanes = [
            SimulatedLane(VerifierCaller(verifier, phase_timer, most_steps=most_steps), queue)
            for verifier, queue in verifiers
        ]
        super().__init__(writer, clock.lanes, stalled_s)
        self._clock = clock

    def _take_results(self) -> list[Event] | None:
        for lane in self._clock.lanes:
            lane.current_work()  # publish finished results and start the next batch
        return super()._take_results()

    def _wait_for_scores(self) -> None:
        self._clock.run_until(lambda: any(lane.results for lane in self._clock.lanes))
