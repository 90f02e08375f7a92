"""RequestQueue: runs the searches of all requests in the solver's thread, and tells listeners."""

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
from beamwright.serve.answers import as_text, final_text, told
from beamwright.serve.body import ApiError, Fields, ServerLimits, api_error, log, parsed
from beamwright.serve.job import RequestReader, RoundSummary, SearchJob
from beamwright.solver.solution import Solution
from beamwright.tree import Conversation, RawPrompt

if TYPE_CHECKING:
    from beamwright.serve.job import Engine


class Listener(Protocol):
    """Hears of every job: `begun` and `ended` in the event loop, `round` in the solver's thread,
    where the tree is alive. All have to be quick; what one raises is logged and stops no other."""

    def begun(self, job: SearchJob) -> None: ...
    def ended(self, job: SearchJob, outcome: Solution | BaseException) -> None: ...

    def round(self, job: SearchJob, report: RoundReport) -> None:
        """A round is decided. Optional."""
        return


class RequestQueue:
    """Admit requests, submit them to an engine, and drain them at the end.

    seed: of searches that name none; None: drawn anew. receipts: replies hold them.
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
        self.draining = self._hurried = False
        self._waits: set[asyncio.Task[None]] = set()
        self._coming: Counter[str | None] = Counter()  # that are being looked at, by owner

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides an answer besides the request."""
        settings = self.solver.settings.model_dump(mode="json")
        facts = json.dumps([beamwright.__version__, settings], sort_keys=True, default=str)
        return f"bw_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    async def begin(self, job: SearchJob, owner: str | None = None) -> SearchJob:
        """Submit a search.

        Raises:
            ApiError: 503 while the server ends, 429 where too many are here, 400 for what is wrong.
        """
        self._check_room(owner)
        job.owner, loop = owner, asyncio.get_running_loop()
        known = threading.Event()  # a round is nobody's before the job is
        given_up = False

        def on_round(report: RoundReport) -> None:
            known.wait()
            if given_up:
                return
            self._tell("round", job, report)
            raw = partial(as_text, codec=self.solver.codec, stops=job.stops)
            split = raw if isinstance(job.problem, RawPrompt) else told
            now = final_text(report.tree, job.stops, split) if job.streams else job.told
            loop.call_soon_threadsafe(job.hear, now, RoundSummary.of(report))

        def submit() -> None:
            job.submit(self.solver, on_round)
            if given_up:  # whoever waited for this thread did not wait for its end
                job.cancel()

        self._coming[owner] += 1
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
            self._coming[owner] -= 1
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
        """Submit a problem with options by the names of recipes. Raises as `begin`."""

        def read() -> SearchJob:
            fields = parsed(Fields, {"model": self.reader.name, "search": dict(options)})
            return self.reader.job(fields, Conversation(({"role": "user", "content": problem},)))

        return await self.begin(await asyncio.to_thread(read), owner)

    async def drain(self) -> None:
        """Admit no more; wait for the searches that run until the grace period is over."""
        self.draining = True
        deadline = time.monotonic() + self.limits.drain_s
        while self._num_here() and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(0.05)
        for job in list(self.jobs.values()):
            job.cancel()
        while self._waits:
            await asyncio.wait(self._waits)

    def hurry(self) -> None:
        """End the grace period now."""
        self._hurried = True

    def _check_room(self, owner: str | None) -> None:
        if self.draining:
            raise _ending()
        here, theirs = self._num_here(), self._num_here(owner)
        if here >= self.limits.requests:
            full = f"{here} searches"
        elif owner is not None and theirs >= self.limits.requests_per_key:
            full = f"{theirs} of this key"
        else:
            return
        raise ApiError(429, f"running or waiting: {full}", code="queue_full", retry_after_s=5)

    def _num_here(self, owner: str | None = None) -> int:
        """Count searches that run, wait or are being submitted; of one owner, or of all."""
        if owner is None:
            return len(self.jobs) + self._coming.total()
        return sum(job.owner == owner for job in self.jobs.values()) + self._coming[owner]

    async def _end(self, job: SearchJob) -> None:
        outcome: Solution | BaseException
        assert job.handle is not None
        try:
            outcome = await job.handle
        except Cancelled as error:
            # Who ends the server still hands out what there is.
            outcome = (error.partial or _ending()) if self.draining else error
        except asyncio.CancelledError:  # of this task, not of the search
            raise
        except BaseException as error:  # of the solver's thread: no end of this one
            if api_error(error).status >= 500:
                log.error("%s", job.id, exc_info=error)
            outcome = error
        del self.jobs[job.id]
        job.settle(outcome)
        self._tell("ended", job, outcome)

    def _tell(self, what: Literal["begun", "round", "ended"], *of: Any) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, what)(*of)
            except Exception:
                log.exception("%s of %s", what, type(listener).__name__)


def _ending() -> ApiError:
    return ApiError(503, "the server is shutting down", retry_after_s=30)
