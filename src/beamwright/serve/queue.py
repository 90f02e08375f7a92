"""RequestQueue: admission control, submission of searches to the solver, and graceful shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import beamwright
from beamwright.errors import Cancelled
from beamwright.protocols import RoundReport
from beamwright.serve.answers import raw_reply, settled_text, split_reply
from beamwright.serve.body import ApiError, Fields, ServerLimits, api_error, log, parse_fields
from beamwright.serve.job import RequestReader, RoundSummary, SearchJob
from beamwright.solver.solution import Solution
from beamwright.tree import Conversation, RawPrompt

if TYPE_CHECKING:
    from beamwright.serve.job import Engine


class Listener(Protocol):
    """Interface of an observer that a queue calls when a job begins, decides a round or ends.

    `on_begun` and `on_ended` are called in the event loop. `on_round` is called in the solver's
    thread, which alone may read the growing tree. All three must return quickly. An exception of a
    listener is logged, and the remaining listeners are still called.
    """

    def on_begun(self, job: SearchJob) -> None: ...
    def on_ended(self, job: SearchJob, outcome: Solution | BaseException) -> None: ...

    def on_round(self, job: SearchJob, report: RoundReport) -> None:
        """Handle a decided round. Overriding this method is optional."""
        return


class RequestQueue:
    """Admits requests within the server's limits, submits their jobs to an engine, and waits for
    running jobs at the shutdown.

    seed: seed of searches that request none; None for a random seed per search.
    receipts: True if replies include receipts.
    """

    def __init__(
        self,
        solver: Engine,
        name: str,
        limits: ServerLimits,
        seed: int | None = None,
        *,
        receipts: bool = True,
    ) -> None:
        self.solver, self.limits, self.started_s = solver, limits, time.time()
        self.receipts = receipts
        codec = solver.codec
        thinks = solver.context if codec is not None and codec.thoughts is not None else None
        self.reader = RequestReader(name, solver.settings.search, limits, seed, thinks)
        self.jobs: dict[str, SearchJob] = {}
        self.listeners: list[Listener] = []
        self.draining = self._grace_ended = False
        self._waits: set[asyncio.Task[None]] = set()
        # By owner, number of jobs that a thread is submitting. These jobs count towards limits.
        self._num_submitting: Counter[str | None] = Counter()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the server's version and settings; with a request, they determine the answer."""
        settings = self.solver.settings.model_dump(mode="json")
        facts = json.dumps([beamwright.__version__, settings], sort_keys=True, default=str)
        return f"bw_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    async def begin(self, job: SearchJob, owner: str | None = None) -> SearchJob:
        """Submit a job's search to the engine, and return the job.

        Raises:
            ApiError: 503 while the server shuts down, 429 if too many searches run or wait, 400 for
                a wrong problem or option.
        """
        self._check_room(owner)
        job.owner, loop = owner, asyncio.get_running_loop()
        known = threading.Event()  # listeners must hear `on_begun` before the first round
        given_up = False

        def on_round(report: RoundReport) -> None:
            known.wait()
            if given_up:
                return
            self._tell("round", job, report)
            raw = partial(raw_reply, codec=self.solver.codec, stops=job.stops)
            split = raw if isinstance(job.problem, RawPrompt) else split_reply
            now = settled_text(report.tree, job.stops, split) if job.streams else job.told
            loop.call_soon_threadsafe(job.record_round, now, RoundSummary.of(report))

        def submit() -> None:
            job.submit(self.solver, on_round)
            if given_up:  # the request was cancelled before this thread had submitted the job
                job.cancel()

        self._num_submitting[owner] += 1
        try:
            await asyncio.to_thread(submit)
            if self.draining:
                raise _ending()
        except BaseException:
            given_up = True
            job.cancel()
            known.set()
            raise
        finally:
            self._num_submitting[owner] -= 1
        self.jobs[job.id] = job
        self._tell("begun", job)
        known.set()
        task = loop.create_task(self._end(job))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        return job

    async def begin_search(
        self, problem: str, options: Mapping[str, Any], owner: str | None = None
    ) -> SearchJob:
        """Submit a problem with a recipe's options; returns and raises as `begin` does."""

        def read() -> SearchJob:
            fields = parse_fields(Fields, {"model": self.reader.name, "search": dict(options)})
            return self.reader.make_job(
                fields, Conversation(({"role": "user", "content": problem},))
            )

        return await self.begin(await asyncio.to_thread(read), owner)

    async def drain(self) -> None:
        """Refuse new searches, and wait for running ones; cancel them after the grace period."""
        self.draining = True
        deadline = time.monotonic() + self.limits.drain_s
        while self._count_searches() and time.monotonic() < deadline and not self._grace_ended:
            await asyncio.sleep(0.05)
        for job in list(self.jobs.values()):
            job.cancel()
        while self._waits:
            await asyncio.wait(self._waits)

    def end_grace_period(self) -> None:
        """End the grace period of `drain` at once."""
        self._grace_ended = True

    def _check_room(self, owner: str | None) -> None:
        if self.draining:
            raise _ending()
        here, theirs = self._count_searches(), self._count_searches(owner)
        if here >= self.limits.requests:
            full = f"this server has {here}"
        elif owner is not None and theirs >= self.limits.requests_per_key:
            full = f"this API key has {theirs}"
        else:
            return
        raise ApiError(
            429,
            f"the queue is full: {full} running or waiting searches; retry later",
            code="queue_full",
            retry_after_s=5,
        )

    def _count_searches(self, owner: str | None = None) -> int:
        """Count the searches of one owner, or of all, that run, wait or are being submitted."""
        if owner is None:
            return len(self.jobs) + self._num_submitting.total()
        return sum(job.owner == owner for job in self.jobs.values()) + self._num_submitting[owner]

    async def _end(self, job: SearchJob) -> None:
        outcome: Solution | BaseException
        assert job.handle is not None
        try:
            outcome = await job.handle
        except Cancelled as error:
            # While the server shuts down, return the best candidate so far instead of an error.
            outcome = (error.partial or _ending()) if self.draining else error
        except asyncio.CancelledError:  # this waiting task was cancelled, not the search
            raise
        except BaseException as error:  # from the solver's thread, so it must not end this task
            if api_error(error).status >= 500:
                log.error("%s", job.id, exc_info=error)
            outcome = error
        del self.jobs[job.id]
        job.set_outcome(outcome)
        self._tell("ended", job, outcome)

    def _tell(self, what: Literal["begun", "round", "ended"], *of: Any) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, f"on_{what}")(*of)
            except Exception:
                log.exception("listener %s failed at %s", type(listener).__name__, what)


def _ending() -> ApiError:
    return ApiError(503, "the server is shutting down", retry_after_s=30)
