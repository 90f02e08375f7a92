"""VerifierWorker: one thread, and on a card one stream, that scores batches in their order.

It alone calls the verifier, whose model, KV and link nobody else touches. Two threads share nodes
that are decoded, which the loop leaves alone until their scores are in. (Decoupled tree
exploration, section 5: the verifier's side.)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from beamwright.engine.scoring import Scoring, without
from beamwright.protocols import Event
from beamwright.tree import Node

MakeContext = Callable[[], AbstractContextManager[object]]
"""Called on the loop's thread when a worker starts; what it gives is entered on the worker's:
where and how it computes. It is left when all that the worker has queued is done."""


class VerifierWorker:
    """A thread that scores batches in their order; it starts with the first one.

    Between two batches it frees what is to be freed. Errors are raised where results are taken.

    patience_s: a call of the verifier whose scores nobody needs any more may take so much longer.
    Then its thread is left to itself, and another takes over: a user's function cannot be stopped,
    and may never return. None for models, which do, and whose memory two threads cannot share.
    """

    def __init__(
        self,
        scoring: Scoring,
        context: MakeContext = nullcontext,
        patience_s: float | None = None,
    ) -> None:
        self.scoring, self._context, self.patience_s = scoring, context, patience_s
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # All below are read and written with `_changed` held.
        self._unscored = scoring.queue
        self._unneeded: list[Node] = []
        self._results: deque[list[Event] | BaseException] = deque()
        self._failure: BaseException | None = None
        self._started = self._closing = False
        self._current: tuple[Node, ...] | None = None  # is being scored
        self._unneeded_since_s: float | None = None  # that batch

    @property
    def busy(self) -> bool:
        """True while a batch waits, or one is scored that is not given up."""
        scoring = self._current is not None and self._unneeded_since_s is None
        return bool(self._unscored) or scoring

    def put(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Score these steps of one tree, after or beside those that wait."""
        if self._thread is None:
            self._start()
        with self._changing():
            self._unscored.put(tuple(nodes), priority)

    def take(self, *, wait: bool = False) -> list[Event] | None:
        """What came of a batch; None if none is finished.

        wait: until one is, if any is to come, and at most `patience_s`.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._results or self._failure or not self.busy, self.patience_s
                )
            since_s, patience_s = self._unneeded_since_s, self.patience_s or 0.0
            if since_s is not None and time.monotonic() >= since_s + patience_s:  # it is stuck
                self._leave()
                self._start()
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
            self.scoring.release(nodes)
            return
        with self._changing():
            self._unscored.release(nodes)
            self._unneeded += nodes
            if self._current and self.patience_s is not None and not without(self._current, nodes):
                self._unneeded_since_s = self._unneeded_since_s or time.monotonic()

    def close(self) -> None:
        """Forget what waits, finish what runs, free what is to be freed; the thread ends.

        A call that does not end in `patience_s` is left to itself.
        """
        if self._thread is None:
            return
        with self._changing():
            self._closing = True
            self._unscored.clear()
        self._thread.join(self.patience_s)
        with self._changing():
            self._leave()
            self._closing = False
            self._results.clear()
            unneeded, self._unneeded = self._unneeded, []
        if unneeded:  # the worker could not start, or is stuck
            self.scoring.release(unneeded)
        self._raise_failure()

    def _start(self) -> None:
        """Returns when the worker computes as it will: it may take over how this thread does."""
        thread = threading.Thread(
            target=self._work, args=(self._context(),), name="verifier", daemon=True
        )
        self._thread, self._started = thread, False
        thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._failure is not None)

    def _leave(self) -> None:
        """Whatever the thread does from now on is its own affair."""
        if self._thread is not None and self._current is not None:
            self.scoring.accounting.leave(self._thread.ident)
        self._thread = self._current = self._unneeded_since_s = None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def _changing(self) -> Iterator[bool]:
        """Others wait meanwhile, and hear of it; see `_is_mine`."""
        with self._changed:
            yield self._is_mine
            self._changed.notify_all()

    @property
    def _is_mine(self) -> bool:
        """True on the worker's thread; one that was left is the worker's no more."""
        return threading.current_thread() is self._thread

    # --- on the worker's thread --------------------------------------------------------------

    def _work(self, context: AbstractContextManager[object]) -> None:
        try:
            with context:
                with self._changing() as is_mine:
                    self._started = self._started or is_mine
                while self._do_one():
                    pass
        except BaseException as error:  # whatever it is, the loop's thread must hear of it
            self._fail(error)

    def _do_one(self) -> bool:
        """One piece of work; False if the worker is closed and there is none, or it was left."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._unneeded or self._unscored or self._closing or not self._is_mine
            )
            if not self._is_mine:
                return False
            unneeded, self._unneeded = self._unneeded, []
            batch = self._unscored.take() if self._unscored and not unneeded else None
            self._current = batch
        if unneeded:
            try:
                self.scoring.release(unneeded)
            except BaseException as error:
                self._fail(error)
        elif batch is not None:
            self._score(batch)
        return bool(unneeded or batch)

    def _score(self, nodes: Sequence[Node]) -> None:
        result: list[Event] | BaseException
        try:
            result = self.scoring.score(nodes)
        except BaseException as error:
            result = error
        with self._changing() as is_mine:
            if is_mine:
                self._results.append(result)
                self._current = self._unneeded_since_s = None

    def _fail(self, error: BaseException) -> None:
        with self._changing() as is_mine:
            if is_mine:
                self._failure = self._failure or error


@contextmanager
def on_host() -> Iterator[None]:
    """As many of torch's threads as the loop computes with, and so the same bits.

    A thread takes torch's number over when it first asks, and keeps it while others change theirs.
    """
    torch.get_num_threads()
    yield


class OnCuda:
    """A `MakeContext`: a stream of its own, which starts behind what the loop's stream holds, and
    is empty at its end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Made once: torch hands out the same few in turn, and another one's captures are on them.
        self._stream = torch.cuda.Stream(device)

    def __call__(self) -> AbstractContextManager[None]:
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(self._device))
        return self._computing(before)

    @contextmanager
    def _computing(self, before: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(before)
        # Device and stream are a thread's own.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()
