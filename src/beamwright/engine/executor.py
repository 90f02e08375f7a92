"""Executors: the step writer and the verifier on one device, in turn or beside each other.

`PlainExecutor` does one piece of work at a time, scores first: it is the specification that
`OverlappedExecutor`, and the simulator's, are compared with. When scores arrive depends on the
clock, what they are does not (decoupled tree exploration, section 5: the verifier's side). Here,
too: how many of torch's threads compute, by the sizes of the models.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from beamwright.attention import KERNEL_BACKENDS
from beamwright.counters import Progress
from beamwright.engine.scoring import LESS, Scoring, without
from beamwright.engine.timeline import Accounting, Timeline
from beamwright.models.load import no_more_memory
from beamwright.models.tree_model import TreeModel
from beamwright.protocols import DecodesAhead, Event, StepWriter, Verifier
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node

STEPS_TOGETHER = {"lockstep": 2**31, "continuous": 1, "decoupled": 64}
"""Steps of several trees that are scored in one call of a verifier that is a model."""

PATIENCE_S = 1.0
"""Seconds that nobody needs a user's verifier any more before its thread is left to itself."""

SMALL_PARAMETERS = 20_000_000
_UNSET = "OMP_NUM_THREADS : [not set]"

Models = tuple[TreeModel | None, TreeModel | None]
"""The generator, None where it runs elsewhere, and the verifier's model, None if it has none."""


class PlainExecutor:
    """Runs iterations of the writer and calls of the verifier one after the other on one device.

    ahead: the writer, where it may decode children that selection has not opened yet.
    stalled_s: seconds that models have waited for the link so far.
    patience_s: seconds that a tree whose deadline has passed still waits for scores, where they
    may never come; None where they surely will. beside: the verifier has a thread of its own.
    """

    patience_s: float | None = None
    beside = False

    def __init__(
        self,
        writer: StepWriter,
        scoring: Scoring,
        stalled_s: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.writer, self._scoring, self._stalled_s = writer, scoring, stalled_s
        self.ahead = writer if isinstance(writer, DecodesAhead) else None
        self._accounting, self._progress = scoring.accounting, progress or Progress()
        self._groups_before = writer.num_groups - self._accounting.counts.groups

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Score these finished steps of one tree; those of a larger priority first."""
        if nodes:
            self._scoring.queue.put(tuple(nodes), priority)

    def wait(self) -> list[Event]:
        """Do one bounded piece of work: a batch of scores, or an iteration of the running batch.

        Scores come first: a round waits for them. Returns no event where no step has ended, where
        there was nothing to do, and where scores have not come for `patience_s`.
        """
        if self._scoring.queue:
            nodes = self._scoring.queue.take()
            self._progress.doing(f"round {nodes[0].round}: scoring {len(nodes)} steps")
            return self._scoring.score(nodes)
        return self._iterate() if self.writer.busy else []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own, as soon as nobody reads it.

        What waits for a score is forgotten.
        """
        self._scoring.queue.release(nodes)
        self.writer.release(nodes)
        self._scoring.release(nodes)

    def close(self) -> None:
        """Stop what runs beside the caller; returns when all that was released is free.

        What waits for a score is forgotten. It can be used again.
        """

    def _iterate(self) -> list[Event]:
        number = self.writer.num_groups - self._groups_before
        with (
            no_more_memory("a round cannot be finished (decode)", LESS),
            self._accounting.phase("decode", self._stalled_s),
            self._scoring.timeline.span("decode", "compute", group=number) as facts,
        ):
            events = list(self.writer.iterate())
            if self.ahead is not None:
                facts["open_rows"], facts["rows_ahead"] = self.ahead.last_rows
        self._accounting.counts.groups = self.writer.num_groups - self._groups_before
        return events


class OverlappedExecutor(PlainExecutor):
    """Decodes while a thread of its own scores; waits only where there is nothing to decode.

    stalled_s: of the generator alone.
    """

    beside = True

    def __init__(
        self,
        writer: StepWriter,
        worker: VerifierWorker,
        stalled_s: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(writer, worker.scoring, stalled_s, progress)
        self._worker, self.patience_s = worker, worker.patience_s

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        if nodes:
            self._worker.put(nodes, priority)

    def wait(self) -> list[Event]:
        events = self._worker.take()
        if events is not None:
            return events
        scoring, ahead = self._worker.busy, self.ahead is not None and self.ahead.speculating
        if self.writer.busy or (scoring and ahead):
            return self._iterate()
        if scoring:
            self._progress.doing("scoring steps")
        return self._worker.take(wait=True) or []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the generator's KV of these nodes at once, the verifier's before it scores anything
        more."""
        self.writer.release(nodes)
        self._worker.release(nodes)

    def close(self) -> None:
        self._worker.close()


class VerifierWorker:
    """A thread that scores batches in their order; it starts with the first one.

    It alone calls the verifier, whose model, KV and link nobody else touches; between two batches
    it frees what is to be freed. Two threads share nodes that are decoded, which the loop leaves
    alone until their scores are in. Errors are raised where results are taken.

    device: a card, on which it has a stream of its own.
    patience_s: a call of the verifier whose scores nobody needs any more may take so much longer.
    Then its thread is left to itself, and another takes over: a user's function cannot be stopped,
    and may never return. None for models, which do, and whose memory two threads cannot share.
    """

    def __init__(
        self, scoring: Scoring, device: torch.device | None = None, patience_s: float | None = None
    ) -> None:
        self.scoring, self.patience_s = scoring, patience_s
        # Made once: torch hands out the same few in turn, and another one's captures are on them.
        self._stream = torch.cuda.Stream(device) if device is not None else None
        self._changed = threading.Condition()
        # All below are read and written with `_changed` held.
        self._thread: threading.Thread | None = None
        self._unneeded: list[Node] = []
        self._results: deque[list[Event] | BaseException] = deque()
        self._closing = False
        self._current: tuple[Node, ...] = ()  # is being scored
        self._unneeded_since_s: float | None = None  # that batch

    @property
    def busy(self) -> bool:
        """True while a batch waits, or one is scored that is not given up."""
        scoring = bool(self._current) and self._unneeded_since_s is None
        return bool(self.scoring.queue) or scoring

    def put(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Score these steps of one tree, after or beside those that wait."""
        if self._thread is None:
            self._start()
        with self._changed:
            self.scoring.queue.put(tuple(nodes), priority)
            self._changed.notify_all()

    def take(self, *, wait: bool = False) -> list[Event] | None:
        """What came of a batch; None if none is finished.

        wait: until one is, if any is to come, and at most `patience_s`.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._results or not self.busy, self.patience_s)
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
        """Free what the verifier keeps on these nodes before anything more is scored.

        A batch that is being scored is finished first; one that waits and is gone never begins.
        """
        if self._thread is None:
            self.scoring.release(nodes)
            return
        with self._changed:
            self.scoring.queue.release(nodes)
            self._unneeded += nodes
            if self._current and self.patience_s is not None and not without(self._current, nodes):
                self._unneeded_since_s = self._unneeded_since_s or time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Forget what waits, finish what runs, free what is to be freed; the thread ends.

        A call that does not end in `patience_s` is left to itself.
        """
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self.scoring.queue.clear()
            self._changed.notify_all()
        self._thread.join(self.patience_s)
        with self._changed:
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
        self._changed.notify_all()

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
        with self._changed:
            self._changed.wait_for(
                lambda: self._unneeded or queue or self._closing or self._thread is not me
            )
            if self._thread is not me:
                return None
            unneeded, self._unneeded = self._unneeded, []
            self._current = queue.take() if queue and not unneeded else ()
            return (unneeded, self._current) if unneeded or self._current else None

    def _finish(self, result: list[Event] | BaseException) -> None:
        with self._changed:
            if threading.current_thread() is self._thread:
                self._results.append(result)
                self._current, self._unneeded_since_s = (), None
                self._changed.notify_all()


# --- which of them, and with how many threads ------------------------------------------------


def make_executor(
    settings: ScheduleSettings,
    writer: StepWriter,
    verifier: Verifier,
    accounting: Accounting,
    models: Models,
    timeline: Timeline,
    progress: Progress,
    *,
    beside: bool,
) -> PlainExecutor:
    """The executor for a run. beside: see `overlaps`."""
    generator, scorer = models
    most_steps = 1 if scorer is None else STEPS_TOGETHER[settings.explore]
    stalled_s = partial(_stalled_s, models[1:] if beside else models)
    scoring = Scoring(verifier, accounting, stalled_s, timeline, most_steps)
    if not beside:
        return PlainExecutor(writer, scoring, stalled_s, progress)
    model = scorer or generator
    on_card = model is not None and model.decoder.device.type == "cuda"
    device = model.decoder.device if model is not None and on_card else None
    worker = VerifierWorker(scoring, device, PATIENCE_S if scorer is None else None)
    return OverlappedExecutor(writer, worker, partial(_stalled_s, models[:1]), progress)


def _stalled_s(models: Sequence[TreeModel | None]) -> float:
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

    "auto": where that is faster (docs/log/2026-11-22-scoring-beside-decoding.md), and changes
    nothing else: models on different devices, a generator elsewhere; or, with results that do not
    depend on a batch, a CPU with a core for each of the worker's threads, or a card whose kernels
    read KV in place, where memory is planned for both at a time: decoding waits for memory there,
    and scoring computes. With several trees in flight, and no KV that has had to leave the device
    so far.

    in_flight: trees at a time; None for as many as there is work for.
    """
    generator, scorer = models
    if not getattr(verifier, "beside_decoding", False):
        return False
    if len({str(model.decoder.device) for model in models if model is not None}) > 1:
        return True  # nobody waits, and each thread has a current device of its own
    if settings.executor != "auto":
        return settings.executor == "overlapped"
    if in_flight == 1 or scorer is None or generator is None:
        return in_flight != 1 and scorer is not None
    outgrown = generator.store.outgrown or scorer.store.outgrown
    has_room = num_cores() >= 2 * num_threads
    if scorer.decoder.device.type == "cuda":
        has_room = {generator.backend.name, scorer.backend.name} <= set(KERNEL_BACKENDS)
    return exact and not outgrown and has_room


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Threads:
    """Threads of one product, and why so many.

    torch's OpenMP threads wait for one another by spinning. A small model's products are over in
    microseconds, so a second thread gains little; and where another process has the second core,
    every one of thousands of parallel regions waits for a thread that does not run
    (docs/log/2026-11-22-one-thread.md).
    """

    count: int
    why: str

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with so many threads, and put back what the host program had."""
        before = torch.get_num_threads()
        if before != self.count:
            torch.set_num_threads(self.count)
        try:
            yield
        finally:
            if before != torch.get_num_threads():
                torch.set_num_threads(before)


def threads_for(num_parameters: int) -> Threads:
    """Threads for models of which the largest has so many parameters.

    One for small models; for others, or where OMP_NUM_THREADS says how many, what torch has.
    """
    available = torch.get_num_threads()
    if _UNSET not in torch.__config__.parallel_info():
        return Threads(available, "OMP_NUM_THREADS is set")
    limit = f"{SMALL_PARAMETERS // 10**6} million parameters"
    if num_parameters > SMALL_PARAMETERS:
        return Threads(available, f"a model has more than {limit}")
    return Threads(1, f"no model has more than {limit}; OMP_NUM_THREADS overrides it")
