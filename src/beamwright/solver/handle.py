"""Handles of problems that are submitted, the thread that solves them, and one call at a time.

Knows threads and event loops; of a search, that it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from beamwright.engine.scoring import PriorityQueue
from beamwright.errors import Cancelled, InputError
from beamwright.protocols import RoundCallback, RoundReport
from beamwright.solver.request import Request
from beamwright.solver.scheduler import Arrivals, Outcome
from beamwright.solver.solution import Solution

Stream = Generator[tuple[Request, Outcome], None, None]

_EXIT_S = 5.0
"""For the thread to end with the interpreter: a verifier of the user's may never return."""


class Submitted(Protocol):
    """A problem on its way, here or elsewhere."""

    on_round: RoundCallback | None
    begun: bool
    cancelled: bool


class Handle:
    """A problem that was submitted. It is solved whether or not anybody waits for it.

    `await handle` waits for its result in an event loop.

    withdraw: tells whoever has it solved that it is cancelled. check_outside: raises InputError
    where it would wait for itself. future: of its solution; cancelling it does not cancel the
    search.
    """

    def __init__(
        self,
        problem_id: str | int,
        request: Submitted,
        withdraw: Callable[[], None],
        check_outside: Callable[[], None],
    ) -> None:
        self.problem_id, self._request = problem_id, request
        self._withdraw, self._check_outside = withdraw, check_outside
        self.future: Future[Solution] = Future()
        self.future.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        self._on_round = request.on_round
        request.on_round = self._hear

    def __repr__(self) -> str:
        state = "running" if self.begun else "waiting"
        if self.done():
            error = self.future.exception()
            state = "solved" if error is None else type(error).__name__
        return f"<Handle {self.problem_id!r:.80}: {state}>"

    @property
    def begun(self) -> bool:
        """True once its search has begun; until then it waits for a place."""
        return self._request.begun

    def done(self) -> bool:
        """True if it is solved, cannot be solved, or is cancelled."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Solution:
        """Wait for the solution, at most so many seconds.

        Raises:
            BeamwrightError: why there is none, `Cancelled` if that was it; what was finished is in
            its `partial`.
            TimeoutError: if it takes longer; the search goes on.
            InputError: in a callback of the same solver: it would wait for ever.
        """
        self._check_outside()
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Give it up: its KV is freed before the next iteration."""
        self._request.cancelled = True
        self._withdraw()

    def __await__(self) -> Generator[Any, None, Solution]:
        """What `result` returns or raises."""
        return asyncio.wrap_future(self.future).__await__()

    def _hear(self, report: RoundReport) -> None:
        try:
            if self._on_round is not None:
                self._on_round(report)
        except Exception as error:  # what a caller's function raises ends its own search alone
            self._request.cancelled = True
            self.settle(error)

    def settle(self, outcome: Solution | BaseException) -> None:
        """It has ended so; what comes later does not count."""
        if self.future.done():
            return
        if isinstance(outcome, Solution):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


class OneAtATime:
    """Calls from several threads take turns; a call from inside a call is refused.

    A solver's KV, budgets and peaks belong to the search that runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._stream: Callable[[], Stream | None] = lambda: None

    def stream(self, stream: Stream) -> Stream:
        """Outcomes that are read one by one, in a turn that lasts until the last is."""
        self._stream = weakref.ref(stream)
        return stream

    def give_up(self) -> None:
        """End what this thread reads of; from inside of it that is refused later (`turn`)."""
        stream = self._stream() if self._owner == threading.get_ident() else None
        with suppress(ValueError):  # it is running
            if stream is not None:
                stream.close()

    def check_outside(self) -> None:
        """Raises InputError if this thread is in the middle of a call: it would wait for ever."""
        if self._owner == threading.get_ident():
            raise InputError(
                "this Solver is in the middle of a search: its callbacks and verifier cannot "
                "call it again; make another Solver for them"
            )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the calls of other threads to end, and keep them waiting.

        Raises:
            InputError: as `check_outside`.
        """
        self.check_outside()
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


class SubmitQueue:
    """Solves what is submitted, in a thread that lives while there is something to solve.

    serve: runs requests to their outcomes, when the solver is free.
    """

    def __init__(self, serve: Callable[[Arrivals], Iterator[tuple[Request, Outcome]]]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._waiting: PriorityQueue[Request] = PriorityQueue()
        self._handles: dict[Request, Handle] = {}
        self._thread: threading.Thread | None = None

    def submit(self, problem_id: str | int, request: Request) -> Handle:
        """Have it solved beside the others."""
        handle = Handle(problem_id, request, partial(self._drop, request), self._check_outside)
        with self._lock:  # the thread waits for it before it takes anybody in
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="solver", daemon=True)
                thread.start()  # or there is none, and nobody waits for it
                self._thread = thread
                atexit.register(self.close, _EXIT_S)
            self._handles[request] = handle
            # Who needs no place waits behind nobody who does.
            self._waiting.put(request, request.priority if request.draws else sys.maxsize)
        return handle

    def _drop(self, request: Request) -> None:
        """Whoever still waits for a place does not get one."""
        with self._lock:
            if request not in self._waiting:
                return
            self._waiting.change(lambda other: None if other is request else other)
            handle = self._handles.pop(request)
        handle.settle(Cancelled())

    def _next(self, has_place: bool, is_idle: bool) -> Request | None:
        """See `Arrivals`; with nobody left the thread ends, and whoever comes starts another."""
        with self._lock:
            first = next(iter(self._waiting), None)
            if first is None and is_idle:
                self._forget_thread()
            if first is None or (first.draws and not has_place):
                return None
            return self._waiting.take()

    def _forget_thread(self) -> None:
        self._thread = None
        atexit.unregister(self.close)

    def _check_outside(self) -> None:
        """Raises InputError in the thread that solves."""
        if threading.current_thread() is self._thread:
            raise InputError("a callback of a search cannot wait for one of the same Solver")

    def close(self, wait_s: float | None = None) -> None:
        """Cancel everything, and wait until the thread has ended, at most so long.

        Called at the interpreter's exit, too: a thread that is in PyTorch then aborts the process.
        """
        with self._lock:
            handles, thread = list(self._handles.values()), self._thread
        for handle in handles:
            handle.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def _run(self) -> None:
        try:
            for request, outcome in self._serve(self._next):
                with self._lock:
                    handle = self._handles.pop(request)
                handle.settle(outcome)
        except BaseException as error:  # a broken link, or a bug: nobody waits in vain
            with self._lock:
                handles = list(self._handles.values())
                self._forget_thread()
                self._handles.clear()
                self._waiting.clear()
            for handle in handles:
                handle.settle(error)
