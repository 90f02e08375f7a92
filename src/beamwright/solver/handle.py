"""Asynchronous solving: handles of submitted problems, and the thread that solves them."""

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

# At the interpreter's exit, seconds to wait for the solver's thread: a user's verifier that runs in
# the thread may never return.
_EXIT_S = 5.0


class Submitted(Protocol):
    """Interface of a submitted problem, in this process or on a replica of a cluster."""

    on_round: RoundCallback | None
    begun: bool
    cancelled: bool


class Handle:
    """Handle of a submitted problem: waits for its solution, or cancels its search.

    `await handle` waits for the result in an event loop. The search runs even if no caller waits.

    future: resolves to the solution. Cancelling this future does not cancel the search.
    """

    def __init__(
        self,
        problem_id: str | int,
        request: Submitted,
        withdraw: Callable[[], None],
        check_outside: Callable[[], None],
    ) -> None:
        """withdraw: tells the queue or replica that the problem is cancelled.
        check_outside: raises InputError in a thread that would wait for itself.
        """
        self.problem_id, self._request = problem_id, request
        self._withdraw, self._check_outside = withdraw, check_outside
        self.future: Future[Solution] = Future()
        self.future.set_running_or_notify_cancel()  # `future.cancel()` now has no effect
        self._on_round = request.on_round
        request.on_round = self._report_round

    def __repr__(self) -> str:
        state = "running" if self.begun else "waiting"
        if self.done():
            error = self.future.exception()
            state = "solved" if error is None else type(error).__name__
        return f"<Handle {self.problem_id!r:.80}: {state}>"

    @property
    def begun(self) -> bool:
        """True once the search has been admitted; False while the problem waits in the queue."""
        return self._request.begun

    def done(self) -> bool:
        """Return True if the problem is solved, has failed, or is cancelled."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Solution:
        """Wait for the solution, at most `timeout` seconds.

        Raises:
            BeamwrightError: if the search failed; `Cancelled` if it was cancelled. The error's
                `partial` has the candidates that were finished by then.
            TimeoutError: if the search takes longer than `timeout`; the search goes on.
            InputError: in a callback of the same solver, which would wait for itself.
        """
        self._check_outside()
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Cancel the search; its KV is freed before the next iteration."""
        self._request.cancelled = True
        self._withdraw()

    def __await__(self) -> Generator[Any, None, Solution]:
        """Wait for the solution in an event loop; see `result`."""
        return asyncio.wrap_future(self.future).__await__()

    def _report_round(self, report: RoundReport) -> None:
        """Pass a round's report to the user's callback; cancel the search if that call raises."""
        try:
            if self._on_round is not None:
                self._on_round(report)
        except Exception as error:  # a callback's error ends only its own search
            self._request.cancelled = True
            self.set_outcome(error)

    def set_outcome(self, outcome: Solution | BaseException) -> None:
        """Set the result, a solution or an error. Later results are ignored."""
        if self.future.done():
            return
        if isinstance(outcome, Solution):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


class CallLock:
    """Lock of a solver: one call runs at a time, and calls from other threads wait.

    A nested call, such as a `solve` inside a callback of `solve`, raises InputError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._stream: Callable[[], Stream | None] = lambda: None

    def register_stream(self, stream: Stream) -> Stream:
        """Register the iterator of outcomes that `solve_many` returns, and return it.

        The call of `solve_many` holds the lock until the last outcome has been read.
        """
        self._stream = weakref.ref(stream)
        return stream

    def close_stream(self) -> None:
        """Close the iterator of `solve_many` that this thread is reading, to allow a new call.

        If the thread runs inside the iterator (in a callback), the iterator stays open, and `hold`
        refuses the new call.
        """
        stream = self._stream() if self._owner == threading.get_ident() else None
        with suppress(ValueError):  # ValueError: the stream is running
            if stream is not None:
                stream.close()

    def check_outside(self) -> None:
        """Check that this thread is not inside a call of the solver, where it would deadlock.

        Raises:
            InputError: if this thread is inside a call.
        """
        if self._owner == threading.get_ident():
            raise InputError(
                "this Solver is running a search, so its callbacks and verifier cannot call it. "
                "Use another Solver in them."
            )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock during a `with` block, after the calls of other threads have ended.

        Raises:
            InputError: if this thread is inside a call.
        """
        self.check_outside()
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


class SubmitQueue:
    """Queue of submitted requests, and the thread that solves them until the queue is empty.

    serve: takes the source of requests, runs them once the solver is free, and yields outcomes.
    """

    def __init__(self, serve: Callable[[Arrivals], Iterator[tuple[Request, Outcome]]]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._waiting: PriorityQueue[Request] = PriorityQueue()
        self._handles: dict[Request, Handle] = {}
        self._thread: threading.Thread | None = None

    def submit(self, problem_id: str | int, request: Request) -> Handle:
        """Queue a request, start the thread if there is none, and return the request's handle."""
        handle = Handle(problem_id, request, partial(self._drop, request), self._check_outside)
        with self._lock:  # so that the thread cannot admit the request before its handle exists
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="solver", daemon=True)
                thread.start()  # if this raises, no thread is recorded and no handle waits
                self._thread = thread
                atexit.register(self.close, _EXIT_S)
            self._handles[request] = handle
            # A request that only scores given steps needs no slot, so it goes to the front instead
            # of waiting for requests that need one.
            self._waiting.put(request, request.priority if request.draws else sys.maxsize)
        return handle

    def _drop(self, request: Request) -> None:
        """Remove a cancelled request from the queue, unless it has begun."""
        with self._lock:
            if request not in self._waiting:
                return
            self._waiting.replace_items(lambda other: None if other is request else other)
            handle = self._handles.pop(request)
        handle.set_outcome(Cancelled())

    def _next(self, has_room: bool, is_idle: bool) -> Request | None:
        """Return the next request to admit, or None if none may be admitted now (`Arrivals`).

        If the queue is empty and the scheduler is idle, the solver's thread ends. The next `submit`
        starts another thread.
        """
        with self._lock:
            first = next(iter(self._waiting), None)
            if first is None and is_idle:
                self._forget_thread()
            if first is None or (first.draws and not has_room):
                return None
            return self._waiting.take()

    def _forget_thread(self) -> None:
        """Record that the solver's thread has ended, so that `submit` starts another."""
        self._thread = None
        atexit.unregister(self.close)

    def _check_outside(self) -> None:
        """Check that the caller is not the solver's thread, which would wait for itself.

        Raises:
            InputError: in the solver's thread.
        """
        if threading.current_thread() is self._thread:
            raise InputError("a callback cannot wait for a search of the same Solver")

    def close(self, wait_s: float | None = None) -> None:
        """Cancel all requests, and wait at most `wait_s` seconds until the thread has ended.

        The interpreter's exit also calls this, because a thread that is still inside PyTorch at the
        exit would abort the process.
        """
        with self._lock:
            handles, thread = list(self._handles.values()), self._thread
        for handle in handles:
            handle.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def _run(self) -> None:
        """Solve queued requests until the queue is empty. This is the thread's function."""
        try:
            for request, outcome in self._serve(self._next):
                with self._lock:
                    handle = self._handles.pop(request)
                handle.set_outcome(outcome)
        # `_serve` raises only if the KV link fails, or for a bug. The thread ends then, so all
        # handles get the error: otherwise their callers would wait forever.
        except BaseException as error:
            with self._lock:
                handles = list(self._handles.values())
                self._forget_thread()
                self._handles.clear()
                self._waiting.clear()
            for handle in handles:
                handle.set_outcome(error)
