"""OverlappedExecutor: the verifier runs on a lane of its own while the loop's thread decodes.

A lane is one thread, and on a card one stream: it alone calls the verifier, whose model, KV and
link nobody else touches. The loop's thread owns the trees and the generator. They share nodes that
are decoded, which the loop leaves alone until their scores are in: a tree is either being decoded
or being scored. When scores arrive depends on the clock, what they are does not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from beamwright.engine.accounting import Accounting
from beamwright.engine.executor import PlainExecutor, StepWriter
from beamwright.engine.scoring import Scoring
from beamwright.engine.scoring_queue import ScoringQueue, without
from beamwright.engine.timeline import Timeline
from beamwright.engine.trial import Trial
from beamwright.progress import Progress
from beamwright.protocols import Event, StepDecoded, Verifier
from beamwright.tree import Node

LaneCompute = Callable[[], AbstractContextManager[object]]
"""Called on the loop's thread when a lane starts; what it gives is entered on the lane's thread:
where and how the lane computes. It is left when all that the lane has queued is done."""


class OverlappedExecutor(PlainExecutor):
    """An `Executor` that decodes while the verifier scores.

    It waits for scores only where there is nothing to decode.

    compute: see `LaneCompute`. scoring_stalled_s: seconds that the verifier has waited for its link
    so far; `stalled_s` are the generator's. patience_s: see `Lane`. most_steps: see `ScoringQueue`.
    trial: says when it takes turns after all; None: never.
    """

    def __init__(
        self,
        writer: StepWriter,
        verifier: Verifier,
        accounting: Accounting,
        stalled_s: Callable[[], float] = lambda: 0.0,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
        *,
        compute: LaneCompute = nullcontext,
        scoring_stalled_s: Callable[[], float] = lambda: 0.0,
        patience_s: float | None = None,
        most_steps: int = 1,
        trial: Trial | None = None,
    ) -> None:
        super().__init__(writer, verifier, accounting, stalled_s, timeline, progress)
        scoring = Scoring(verifier, accounting, scoring_stalled_s, timeline)
        self._lane = Lane(scoring, compute, patience_s, most_steps)
        self.patience_s, self._trial = patience_s, trial
        if trial is not None:
            trial.begin()

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        if nodes:
            self._lane.put(tuple(nodes), priority)

    def wait(self) -> list[Event]:
        """Scores come first: a round waits for them."""
        events = self._lane.take()
        if events is None:
            events = self._work()
        if self._trial is not None:
            tokens = sum(len(each.token_ids) for each in events if isinstance(each, StepDecoded))
            self._trial.note(tokens, awaited=self._lane.busy)
        return events

    def _work(self) -> list[Event]:
        """Decode beside the lane, or wait for it."""
        scoring = self._lane.busy
        waits = scoring and self._trial is not None and self._trial.drains
        if not waits and (self._writer.busy or (scoring and self.speculating)):
            return self._iterate()
        if scoring:
            self._progress.doing("scoring steps")
        return self._lane.take(wait=True) or []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the generator's KV of these nodes at once, the verifier's when the lane gets to it.

        That is before it scores anything more.
        """
        self._writer.release(nodes)
        self._lane.release(nodes)

    def close(self) -> None:
        """Forget what waits for a score; returns when the lane has ended."""
        self._lane.close()


class Lane:
    """A thread that scores batches in their order; it starts with the first one.

    Between two batches it frees what is to be freed. Errors are raised where results are taken.

    patience_s: a call of the verifier whose scores nobody needs any more may take so much longer.
    Then its thread is left to itself, and another takes over: a user's function cannot be stopped,
    and may never return. None for models, which do, and whose memory two threads cannot share.
    """

    def __init__(
        self,
        scoring: Scoring,
        compute: LaneCompute = nullcontext,
        patience_s: float | None = None,
        most_steps: int = 1,
    ) -> None:
        self._scoring, self._compute, self._patience_s = scoring, compute, patience_s
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # All below are read and written with `_changed` held.
        self._unscored = ScoringQueue(most_steps)
        self._unneeded: list[Node] = []
        self._results: deque[list[Event] | BaseException] = deque()
        self._failure: BaseException | None = None
        self._started = self._closing = False
        self._now: tuple[Node, ...] | None = None  # is being scored
        self._unneeded_since_s: float | None = None  # that batch

    @property
    def busy(self) -> bool:
        """True while a batch waits, or one is scored that is not given up."""
        return bool(self._unscored) or (self._now is not None and self._unneeded_since_s is None)

    def put(self, nodes: tuple[Node, ...], priority: int = 0) -> None:
        """Score these steps of one tree, after or beside those that wait."""
        if self._thread is None:
            self._start()
        with self._changed:
            self._unscored.put(nodes, priority)
            self._changed.notify_all()

    def take(self, *, wait: bool = False) -> list[Event] | None:
        """What came of a batch; None if none is finished.

        wait: until one is, if any is to come, and at most `patience_s`.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(self._has_news, self._patience_s)
            self._replace_stuck()
            self._raise_failure()
            result = self._results.popleft() if self._results else None
        if isinstance(result, BaseException):
            raise result
        return result

    def release(self, nodes: Sequence[Node]) -> None:
        """Free what the verifier keeps on these nodes before anything more is scored.

        A batch that is being scored is finished first; one that waits and is gone never begins.
        """
        if self._thread is None:
            self._scoring.release(nodes)
            return
        with self._changed:
            self._unscored.release(nodes)
            self._unneeded += nodes
            now = self._now
            if now and self._patience_s is not None and not without([now], nodes):
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
            self._unscored.clear()
            self._changed.notify_all()
        self._thread.join(self._patience_s)
        with self._changed:
            self._leave()
            self._closing = False
            self._results.clear()
            unneeded, self._unneeded = self._unneeded, []
        if unneeded:  # the lane could not start, or is stuck
            self._scoring.release(unneeded)
        self._raise_failure()

    def _start(self) -> None:
        """Returns when the lane computes as it will: it may take over how this thread does."""
        work = threading.Thread(
            target=self._work, args=(self._compute(),), name="verifier", daemon=True
        )
        self._thread, self._started = work, False
        work.start()
        with self._changed:
            while not self._started and self._failure is None:
                self._changed.wait()

    def _has_news(self) -> bool:
        return bool(self._results) or self._failure is not None or not self.busy

    def _replace_stuck(self) -> None:
        """If the time of a call that nobody needs is over, go on in another thread."""
        since_s, patience_s = self._unneeded_since_s, self._patience_s
        if since_s is None or patience_s is None or time.monotonic() < since_s + patience_s:
            return
        self._leave()
        self._start()

    def _leave(self) -> None:
        """Whatever the thread does from now on is its own affair."""
        if self._thread is not None and self._now is not None:
            self._scoring.leave(self._thread.ident)
        self._thread = self._now = self._unneeded_since_s = None
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # --- on the lane's thread ----------------------------------------------------------------

    def _work(self, compute: AbstractContextManager[object]) -> None:
        try:
            with compute:
                self._tell(started=True)
                while self._turn():
                    pass
        except BaseException as error:  # whatever it is, the loop's thread must hear of it
            self._tell(failure=error)

    def _turn(self) -> bool:
        """One piece of work; False if the lane is closed and there is none, or it is left."""
        with self._changed:
            while self._is_own() and not (self._unneeded or self._unscored or self._closing):
                self._changed.wait()
            if not self._is_own():
                return False
            unneeded, self._unneeded = self._unneeded, []
            batch = self._unscored.take() if self._unscored and not unneeded else None
            self._now = batch
        if unneeded:
            self._free(unneeded)
        elif batch is not None:
            self._score(batch)
        return bool(unneeded or batch)

    def _free(self, nodes: Sequence[Node]) -> None:
        try:
            self._scoring.release(nodes)
        except BaseException as error:
            self._tell(failure=error)

    def _score(self, nodes: Sequence[Node]) -> None:
        result: list[Event] | BaseException
        try:
            result = self._scoring.score(nodes)
        except BaseException as error:
            result = error
        with self._changed:
            if self._is_own():
                self._results.append(result)
                self._now = self._unneeded_since_s = None
                self._changed.notify_all()

    def _tell(self, *, started: bool = False, failure: BaseException | None = None) -> None:
        with self._changed:
            if self._is_own():
                self._started = self._started or started
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _is_own(self) -> bool:
        """True on the lane's thread; one that was left is the lane's no more."""
        return threading.current_thread() is self._thread
