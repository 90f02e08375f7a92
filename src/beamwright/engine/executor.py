"""Executors: the step writer and the verifier on one device, in turn or beside each other.

With a plain `Lane` an executor does one piece of work at a time, scores first: it is the
specification that one with workers, and the simulator's, are compared with. When scores arrive
depends on the clock, what they are does not (decoupled tree exploration, section 5: the verifier's
side; several verifiers, 9.1.2).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

import torch

from beamwright.attention import KERNEL_BACKENDS
from beamwright.cores import num_cores
from beamwright.counters import Progress
from beamwright.engine.scoring import LESS, Scoring, without
from beamwright.engine.timeline import Accounting, Timeline
from beamwright.models.load import no_more_memory
from beamwright.models.tree_model import TreeModel
from beamwright.protocols import Event, StepWriter, Verifier, traits_of
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node, by_root

STEPS_TOGETHER = {"lockstep": 2**31, "continuous": 1, "decoupled": 64}
"""Steps of several trees that are scored in one call of a verifier that is a model."""

PATIENCE_S = 1.0
"""Seconds that nobody needs a user's verifier any more before its thread is left to itself."""

Models = Sequence[TreeModel | None]
"""The generator, None where it runs elsewhere, and of each verifier its model, if it has one."""


class Lane:
    """A verifier that scores batch after batch: here, where its results are asked for.

    patience_s: a call of the verifier whose scores nobody needs
    any more may take so much longer; None where it surely ends.
    """

    patience_s: float | None = None

    def __init__(self, scoring: Scoring, progress: Progress | None = None) -> None:
        self.scoring, self._progress = scoring, progress or Progress()

    @property
    def busy(self) -> bool:
        """True while a batch waits, or one is scored that is not given up."""
        return bool(self.scoring.queue)

    @property
    def has_results(self) -> bool:
        """True if `take` has something to give that was scored before."""
        return False

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Return when this is so, as it will be without waiting where scores come when taken."""

    def put(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Score these steps of one tree, after or beside those that wait."""
        self.scoring.queue.put(tuple(nodes), priority)

    def take(self) -> list[Event] | None:
        """What came of a batch; None if none is finished."""
        if not self.scoring.queue:
            return None
        nodes = self.scoring.queue.take()
        self._progress.doing(f"round {nodes[0].round}: scoring {len(nodes)} steps")
        return self.scoring.score(nodes)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free what the verifier keeps on these nodes before anything more is scored.

        A batch that is being scored is finished first; one that waits and is gone never begins.
        """
        self.scoring.queue.release(nodes)
        self.scoring.release(nodes)

    def close(self) -> None:
        """Forget what waits, finish what runs, free what is to be freed."""
        self.scoring.queue.clear()


class Executor:
    """Runs iterations of the writer and calls of the verifier, one after the other or beside it.

    lanes: verifiers, each with KV of its own: a tree is one lane's as long as it lives.
    stalled_s: seconds that models have waited for the link so far; the generator's alone where
    lanes have threads.
    """

    def __init__(
        self,
        writer: StepWriter,
        lanes: Sequence[Lane],
        stalled_s: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.writer, self._stalled_s, self._progress = writer, stalled_s, progress or Progress()
        self.lanes, first = lanes, lanes[0]
        self.patience_s = first.patience_s
        self._lane_of: dict[Node, Lane] = {}  # of a tree, by its root
        self._accounting, self._timeline = first.scoring.accounting, first.scoring.timeline
        self._groups_before = writer.counts.groups - self._accounting.counts.groups

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Score these finished steps of one tree; those of a larger priority first.

        By the lane that had the fewest trees when it came; the first of them has a tree that was
        resumed, whose KV is there.
        """
        if not nodes:
            return
        root = nodes[0].root
        if root not in self._lane_of:
            num_trees = Counter(self._lane_of.values())
            self._lane_of[root] = min(self.lanes, key=num_trees.__getitem__)
        self._lane_of[root].put(nodes, priority)

    def wait(self) -> list[Event]:
        """Do one bounded piece of work: a batch of scores, or an iteration of the running batch.

        Scores come first: a round waits for them. Returns no event where no step has ended, where
        there was nothing to do, and where scores have not come for `patience_s`.
        """
        events = self._take()
        if events is not None:
            return events
        scoring = self._scores()
        if self.writer.busy or (scoring and self.writer.speculating):
            return self._iterate()
        if scoring:
            self._progress.doing("scoring steps")
            self._wait_for_scores()
        return self._take() or []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own, the verifier's as soon as nobody reads it.

        What waits for a score is forgotten.
        """
        self.writer.release(nodes)
        for root, below in by_root(nodes).items():
            self._lane_of.get(root, self.lanes[0]).release(below)
            if root in below:
                self._lane_of.pop(root, None)

    def close(self) -> None:
        """Stop what runs beside the caller; returns when all that was released is free.

        What waits for a score is forgotten. It can be used again.
        """
        with ExitStack() as closing:  # all of them, whatever one raises
            for lane in self.lanes:
                closing.callback(lane.close)

    def _take(self) -> list[Event] | None:
        """What came of a batch; None if none is finished."""
        results = (lane.take() for lane in self.lanes)
        return next((events for events in results if events is not None), None)

    def _scores(self) -> bool:
        return any([lane.busy for lane in self.lanes])

    def _wait_for_scores(self) -> None:
        """Return when results are there, or none will come."""
        self.lanes[0].wait(
            lambda: any(lane.has_results for lane in self.lanes) or not self._scores()
        )

    def _iterate(self) -> list[Event]:
        number = self.writer.counts.groups - self._groups_before
        with (
            no_more_memory("a round cannot be finished (decode)", LESS),
            self._accounting.phase("decode", self._stalled_s),
            self._timeline.span("decode", "compute", group=number) as facts,
        ):
            events = list(self.writer.iterate())
            if (rows := self.writer.last_rows) is not None:
                facts["open_rows"], facts["rows_ahead"] = rows
        self._accounting.counts.groups = self.writer.counts.groups - self._groups_before
        return events


class VerifierWorker(Lane):
    """A thread that scores batches in their order; it starts with the first one.

    It alone calls the verifier, whose model, KV and link nobody else touches; between two batches
    it frees what is to be freed. Two threads share nodes that are decoded, which the loop leaves
    alone until their scores are in. Errors are raised where results are taken.

    stream: of a card, which nobody else uses. changed: of all workers of an executor.
    patience_s: after that its thread is left to itself, and another takes over: a user's function
    cannot be stopped, and may never return. None for models, which do, and whose memory two threads
    cannot share.
    """

    def __init__(
        self,
        scoring: Scoring,
        stream: torch.cuda.Stream | None = None,
        patience_s: float | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        super().__init__(scoring)
        self.patience_s, self._stream = patience_s, stream
        self.changed = changed or threading.Condition()
        # All below are read and written with `changed` held.
        self._thread: threading.Thread | None = None
        self._unneeded: list[Node] = []
        self._results: deque[list[Event] | BaseException] = deque()
        self._closing = False
        self._current: tuple[Node, ...] = ()  # is being scored
        self._unneeded_since_s: float | None = None  # that batch

    @property
    def busy(self) -> bool:
        scoring = bool(self._current) and self._unneeded_since_s is None
        return bool(self.scoring.queue) or scoring

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def wait(self, is_over: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(is_over, self.patience_s)

    def put(self, nodes: Sequence[Node], priority: int = 0) -> None:
        if self._thread is None:
            self._start()
        with self.changed:
            super().put(nodes, priority)
            self.changed.notify_all()

    def take(self) -> list[Event] | None:
        with self.changed:
            since_s, patience_s = self._unneeded_since_s, self.patience_s or 0.0
            stuck = since_s is not None and time.monotonic() >= since_s + patience_s
            if stuck:
                self._leave()
            result = self._results.popleft() if self._results else None
        if stuck:
            self._start()
        if isinstance(result, BaseException):
            raise result
        return result

    def release(self, nodes: Sequence[Node]) -> None:
        if self._thread is None:
            self.scoring.release(nodes)
            return
        with self.changed:
            self.scoring.queue.release(nodes)
            self._unneeded += nodes
            if self._current and self.patience_s is not None and not without(self._current, nodes):
                self._unneeded_since_s = self._unneeded_since_s or time.monotonic()
            self.changed.notify_all()

    def close(self) -> None:
        """End the thread, too.

        A call that does not end in `patience_s` is left to itself.
        """
        if self._thread is None:
            return
        with self.changed:
            self._closing = True
            self.scoring.queue.clear()
            self.changed.notify_all()
        self._thread.join(self.patience_s)
        with self.changed:
            self._leave()
            self._closing = False
            results, self._results = self._results, deque()
            unneeded, self._unneeded = self._unneeded, []
        if unneeded:  # the worker is stuck
            self.scoring.release(unneeded)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _start(self) -> None:
        """Returns when the worker computes with as many threads as this one, to the same bits: a
        thread takes torch's number over when it first asks, and keeps it while others change it."""
        if self._stream is not None:  # what it reads is computed by then
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(ready,), name="verifier", daemon=True
        )
        self._thread.start()
        ready.wait()

    def _leave(self) -> None:
        """Whatever the thread does from now on is its own affair."""
        if self._thread is not None and self._current:
            self.scoring.accounting.leave(self._thread.ident)
        self._thread, self._current, self._unneeded_since_s = None, (), None
        self.changed.notify_all()

    # --- on the worker's thread --------------------------------------------------------------

    def _work(self, ready: threading.Event) -> None:
        torch.get_num_threads()
        ready.set()
        while (work := self._next()) is not None:
            unneeded, batch = work
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    if unneeded:
                        self.scoring.release(unneeded)
                    else:
                        self._finish(self.scoring.score(batch))
            except BaseException as error:  # whatever it is, the loop's thread must hear of it
                self._finish(error)
        if self._stream is not None:
            self._stream.synchronize()

    def _next(self) -> tuple[list[Node], tuple[Node, ...]] | None:
        """What is to be freed, or else scored; None if the worker is closed, or was left."""
        me, queue = threading.current_thread(), self.scoring.queue
        with self.changed:
            self.changed.wait_for(
                lambda: self._unneeded or queue or self._closing or self._thread is not me
            )
            if self._thread is not me:
                return None
            unneeded, self._unneeded = self._unneeded, []
            self._current = queue.take() if queue and not unneeded else ()
            return (unneeded, self._current) if unneeded or self._current else None

    def _finish(self, result: list[Event] | BaseException) -> None:
        with self.changed:
            if threading.current_thread() is self._thread:
                self._results.append(result)
                self._current, self._unneeded_since_s = (), None
                self.changed.notify_all()


# --- which of them, and with how many threads ------------------------------------------------


def make_executor(
    settings: ScheduleSettings,
    writer: StepWriter,
    verifiers: Sequence[Verifier],
    accounting: Accounting,
    models: Models,
    timeline: Timeline,
    progress: Progress,
    *,
    beside: bool,
) -> Executor:
    """The executor for a run. beside: see `overlaps`; several verifiers score beside decoding."""
    generator, *scorers = models
    most_steps = STEPS_TOGETHER[settings.explore] if scorers else 1

    def scoring(number: int, stalls: Models) -> Scoring:
        stalled_s = partial(_stalled_s, stalls)
        return Scoring(verifiers[number], accounting, stalled_s, timeline, most_steps)

    if not beside:
        lane = Lane(scoring(0, models), progress)
        return Executor(writer, [lane], partial(_stalled_s, models), progress)
    computes, patience_s = (scorers, None) if scorers else ([generator], PATIENCE_S)
    changed = threading.Condition()
    workers = [
        VerifierWorker(
            scoring(i, scorers[i : i + 1]),
            None if model is None else model.stream,
            patience_s,
            changed,
        )
        for i, model in enumerate(computes)
    ]
    return Executor(writer, workers, partial(_stalled_s, models[:1]), progress)


def _stalled_s(models: Models) -> float:
    return sum(model.store.stall_s for model in models if model is not None)


def overlaps(
    settings: ScheduleSettings,
    verifier: Verifier,
    models: Models,
    *,
    in_flight: int | None,
    exact: bool,
    num_threads: int,
) -> bool:
    """True if the verifier has a thread of its own; never one that does not say that it may.

    "auto": where there are several, and where it is the user's own, which may hang; else where that
    is faster (docs/log/2026-11.md#scoring-beside-decoding), and changes nothing else: a
    generator elsewhere; or, with results that do not depend on a batch, a CPU with a core for each
    of the worker's threads, or a card whose kernels read KV in place, where memory is planned for
    both at a time: decoding waits for memory there, and scoring computes. With several trees in
    flight, and no KV that has had to leave the device so far.

    in_flight: trees at a time; None for as many as there is work for.
    """
    generator, *scorers = models
    if not traits_of(verifier).beside_decoding:
        return False
    if settings.executor != "auto" or len(scorers) > 1:
        return settings.executor != "plain"
    if not scorers:
        return True
    if in_flight == 1 or generator is None:
        return in_flight != 1
    scorer = scorers[0]
    assert scorer is not None
    outgrown = generator.store.outgrown or scorer.store.outgrown
    has_room = num_cores() >= 2 * num_threads
    if scorer.decoder.device.type == "cuda":
        has_room = {generator.backend.name, scorer.backend.name} <= set(KERNEL_BACKENDS)
    return exact and not outgrown and has_room
