"""Executors: run the generator's batch and the verifiers on one device, in turn or concurrently.

With a plain `VerifierLane` the executor does one piece of work at a time, and scores first. It is
the specification of the executor with verifier threads, and of the simulator's executor. Threads
change only when scores arrive, never their values (decoupled tree exploration, sections 5 and
9.1.2).
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
from beamwright.engine.scoring import MEMORY_ADVICE, VerifierCaller, remaining_batch
from beamwright.engine.timeline import PhaseTimer, Timeline
from beamwright.models.load import convert_memory_errors
from beamwright.models.tree_model import TreeModel
from beamwright.protocols import Event, StepWriter, Verifier, traits_of
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node, group_by_root

# Maximum number of steps, from several trees, in one call of a verifier model, per `--explore`.
STEPS_TOGETHER = {"lockstep": 2**31, "continuous": 1, "decoupled": 64}

# Grace period in seconds for a user's verifier. After it, a call whose scores are no longer needed
# is abandoned together with its thread.
PATIENCE_S = 1.0

# The generator's model (None if it is remote), then the verifiers' models, if they have any.
Models = Sequence[TreeModel | None]


class VerifierLane:
    """A verifier with its queue of batches, scored in order on the caller's thread, in `take`.

    patience_s: grace period for a call whose scores are no longer needed; None if calls surely end.
    """

    patience_s: float | None = None

    def __init__(self, scoring: VerifierCaller, progress: Progress | None = None) -> None:
        self.scoring, self._progress = scoring, progress or Progress()

    @property
    def busy(self) -> bool:
        """True while a batch waits, or is being scored and its scores are still needed."""
        return bool(self.scoring.queue)

    @property
    def has_results(self) -> bool:
        """True if `take` can return finished results without scoring."""
        return False

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Block until `is_over` returns true. This lane never blocks: it scores in `take`."""

    def put(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Queue these steps of one tree for scoring."""
        self.scoring.queue.put(tuple(nodes), priority)

    def take(self) -> list[Event] | None:
        """Return the scores of one batch as events; None if no batch is finished."""
        if not self.scoring.queue:
            return None
        nodes = self.scoring.queue.take()
        self._progress.doing(f"round {nodes[0].round}: scoring {len(nodes)} steps")
        return self.scoring.score(nodes)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the verifier's KV of these nodes, and remove them from waiting batches.

        A batch that is being scored is finished first.
        """
        self.scoring.queue.release(nodes)
        self.scoring.release(nodes)

    def close(self) -> None:
        """Drop waiting batches, finish the running one, and free released KV."""
        self.scoring.queue.clear()


class Executor:
    """Runner of the writer's decode iterations and the verifiers' calls, in turn or concurrently.

    lanes: verifiers, each with its own KV; all steps of a tree go to one lane.
    stalled_s: returns the seconds that models have waited for transfers so far; with verifier
        threads, only the generator's.
    """

    def __init__(
        self,
        writer: StepWriter,
        lanes: Sequence[VerifierLane],
        stalled_s: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.writer, self._stalled_s, self._progress = writer, stalled_s, progress or Progress()
        self.lanes, first = lanes, lanes[0]
        self.scores_patience_s = first.patience_s
        self._lane_of: dict[Node, VerifierLane] = {}  # by the root of the tree
        self._phase_timer, self._timeline = first.scoring.phase_timer, first.scoring.timeline
        self._groups_before = writer.counts.groups - self._phase_timer.counts.groups

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Queue finished steps of one tree for scoring; larger priorities are scored first.

        A new tree goes to the lane with the fewest trees. A resumed tree goes to the first lane,
        which has its KV.
        """
        if not nodes:
            return
        root = nodes[0].root
        if root not in self._lane_of:
            num_trees = Counter(self._lane_of.values())
            self._lane_of[root] = min(self.lanes, key=num_trees.__getitem__)
        self._lane_of[root].put(nodes, priority)

    def wait(self) -> list[Event]:
        """Take one batch of scores, or run one decode iteration, and return the events.

        Scores come first, because a round waits for them. Returns no events if no step has ended,
        if there is no work, or if no scores came within `scores_patience_s`.
        """
        events = self._take_results()
        if events is not None:
            return events
        scoring = self._is_scoring()
        if self.writer.busy or (scoring and self.writer.speculating):
            return self._iterate()
        if scoring:
            self._progress.doing("scoring steps")
            self._wait_for_scores()
        return self._take_results() or []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free all KV of these nodes, and drop those that wait for a score.

        A verifier's KV is freed as soon as no call reads it.
        """
        self.writer.release(nodes)
        for root, below in group_by_root(nodes).items():
            self._lane_of.get(root, self.lanes[0]).release(below)
            if root in below:
                self._lane_of.pop(root, None)

    def close(self) -> None:
        """Stop all threads, and return when all released KV is free.

        Steps that wait for a score are dropped. The executor can be used again.
        """
        with ExitStack() as closing:  # closes every lane, even if closing another one raises
            for lane in self.lanes:
                closing.callback(lane.close)

    def _take_results(self) -> list[Event] | None:
        """Return the events of the first finished batch of any lane; None without one."""
        results = (lane.take() for lane in self.lanes)
        return next((events for events in results if events is not None), None)

    def _is_scoring(self) -> bool:
        return any([lane.busy for lane in self.lanes])

    def _wait_for_scores(self) -> None:
        """Block until a lane has results, or no lane is scoring any more."""
        self.lanes[0].wait(
            lambda: any(lane.has_results for lane in self.lanes) or not self._is_scoring()
        )

    def _iterate(self) -> list[Event]:
        number = self.writer.counts.groups - self._groups_before
        with (
            convert_memory_errors("a round cannot be finished (decode)", MEMORY_ADVICE),
            self._phase_timer.phase("decode", self._stalled_s),
            self._timeline.span("decode", "compute", group=number) as facts,
        ):
            events = list(self.writer.iterate())
            if (rows := self.writer.last_rows) is not None:
                facts["open_rows"], facts["rows_ahead"] = rows
        self._phase_timer.counts.groups = self.writer.counts.groups - self._groups_before
        return events


class VerifierWorker(VerifierLane):
    """A verifier with a thread of its own, which scores batches in order.

    The thread starts with the first batch. Only this thread calls the verifier and uses its model,
    KV and link. Between two batches it frees released KV. While nodes are scored, the engine's
    thread must not change them. An error of the verifier is raised by `take`.

    stream: the CUDA stream that only this worker uses; None on a CPU.
    changed: condition variable shared by all workers of an executor.
    patience_s: grace period after which the thread is abandoned and a new one starts, because a
        user's function cannot be stopped and may never return. None for models: their calls return,
        and two threads cannot share their memory.
    """

    def __init__(
        self,
        scoring: VerifierCaller,
        stream: torch.cuda.Stream | None = None,
        patience_s: float | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        super().__init__(scoring)
        self.patience_s, self._stream = patience_s, stream
        self.changed = changed or threading.Condition()
        # Every attribute below is read and written only while `changed` is held.
        self._thread: threading.Thread | None = None
        self._unneeded: list[Node] = []
        self._results: deque[list[Event] | BaseException] = deque()
        self._closing = False
        self._current: tuple[Node, ...] = ()  # the batch that is being scored
        self._unneeded_since_s: float | None = None  # when that batch was released; None: needed

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
                self._abandon_thread()
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
            if (
                self._current
                and self.patience_s is not None
                and not remaining_batch(self._current, nodes)
            ):
                self._unneeded_since_s = self._unneeded_since_s or time.monotonic()
            self.changed.notify_all()

    def close(self) -> None:
        """End the thread, or abandon it if a call does not return within `patience_s`."""
        if self._thread is None:
            return
        with self.changed:
            self._closing = True
            self.scoring.queue.clear()
            self.changed.notify_all()
        self._thread.join(self.patience_s)
        with self.changed:
            self._abandon_thread()
            self._closing = False
            results, self._results = self._results, deque()
            unneeded, self._unneeded = self._unneeded, []
        if unneeded:  # the abandoned worker will not free them
            self.scoring.release(unneeded)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _start(self) -> None:
        """Start the thread, and wait until it has taken over torch's number of compute threads.

        Scores are then bitwise equal to scores computed on this thread. torch copies the number to
        a new thread at the thread's first query, and later changes elsewhere have no effect.
        """
        if self._stream is not None:  # wait for queued work that the verifier will read
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(ready,), name="verifier", daemon=True
        )
        self._thread.start()
        ready.wait()

    def _abandon_thread(self) -> None:
        """Let the thread run on unattended: ignore its result, and stop timing its call."""
        if self._thread is not None and self._current:
            self.scoring.phase_timer.abandon_thread(self._thread.ident)
        self._thread, self._current, self._unneeded_since_s = None, (), None
        self.changed.notify_all()

    # --- on the worker's thread --------------------------------------------------------------

    def _work(self, ready: threading.Event) -> None:
        torch.get_num_threads()
        ready.set()
        while (work := self._next_work()) is not None:
            unneeded, batch = work
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    if unneeded:
                        self.scoring.release(unneeded)
                    else:
                        self._finish(self.scoring.score(batch))
            except BaseException as error:  # any error must reach the loop's thread
                self._finish(error)
        if self._stream is not None:
            self._stream.synchronize()

    def _next_work(self) -> tuple[list[Node], tuple[Node, ...]] | None:
        """Block until there is work, and return it: (nodes to free, batch to score).

        Only one of the two is filled. None: the thread is to end.
        """
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


# --- construction ----------------------------------------------------------------------------


def make_executor(
    settings: ScheduleSettings,
    writer: StepWriter,
    verifiers: Sequence[Verifier],
    phase_timer: PhaseTimer,
    models: Models,
    timeline: Timeline,
    progress: Progress,
    *,
    beside: bool,
) -> Executor:
    """Create the executor of a run, with one lane or worker per verifier.

    models: the generator's model (None if it is remote), then the verifiers' models, if any.
    beside: True if each verifier gets a thread, see `has_own_thread`.
    """
    generator, *scorers = models
    most_steps = STEPS_TOGETHER[settings.explore] if scorers else 1

    def scoring(number: int, stalls: Models) -> VerifierCaller:
        stalled_s = partial(_stalled_s, stalls)
        return VerifierCaller(verifiers[number], phase_timer, stalled_s, timeline, most_steps)

    if not beside:
        lane = VerifierLane(scoring(0, models), progress)
        return Executor(writer, [lane], partial(_stalled_s, models), progress)
    # A user's verifier has no model; it runs on the generator's stream that decoding does not use.
    stream_models, patience_s = (scorers, None) if scorers else ([generator], PATIENCE_S)
    changed = threading.Condition()
    workers = [
        VerifierWorker(
            scoring(i, scorers[i : i + 1]),
            None if model is None else model.stream,
            patience_s,
            changed,
        )
        for i, model in enumerate(stream_models)
    ]
    return Executor(writer, workers, partial(_stalled_s, models[:1]), progress)


def _stalled_s(models: Models) -> float:
    return sum(model.stall_s for model in models if model is not None)


def has_own_thread(
    settings: ScheduleSettings,
    verifier: Verifier,
    models: Models,
    *,
    in_flight: int | None,
    exact: bool,
    num_threads: int,
) -> bool:
    """Return True if verifiers run in threads of their own, beside decoding.

    The verifier must have the trait `beside_decoding`. With `--executor auto`, several verifiers
    get threads, and so does a user's own verifier, which may hang. A single verifier model gets one
    only if several trees are in flight, and if that is faster without changing results
    (docs/log/2026-11.md#scoring-beside-decoding). With a remote generator, a thread is always
    faster and never changes results. With a local one, results must be `exact`, and no KV may have
    left the device so far. On a CPU there must be a core for each of the worker's threads. On a GPU
    the kernels must read KV in place: decoding is bound by memory, and scoring by arithmetic.

    in_flight: maximum number of trees at once; None: as many as the generator has work for.
    exact: True if results do not depend on the batch.
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
