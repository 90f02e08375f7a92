"""The desk: searches of all requests, in the solver's thread, and what an event loop hears of them.

A job keeps its newest text and round alone, so a reader that is slow, or gone, holds nothing up.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from beamwright.conversation import Conversation, RawPrompt
from beamwright.engine.limits import num_generated
from beamwright.errors import Cancelled, InputError
from beamwright.protocols import RoundReport
from beamwright.search import DEFAULT_SEARCH, STRATEGIES
from beamwright.sections import SearchSettings
from beamwright.serve.asked import Asker, SearchRequest
from beamwright.serve.engine import Engine
from beamwright.serve.errors import ApiError, api_error, log
from beamwright.serve.events import About
from beamwright.serve.final import final_text
from beamwright.serve.limits import ServerLimits
from beamwright.serve.recipes import ModelNames
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution

State = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True)
class RoundSummary:
    """What one round has decided. tokens: generated so far; best: score of its best candidate."""

    number: int
    candidates: int
    kept: int
    pruned: int
    finished: int
    best: float | None
    tokens: int

    @classmethod
    def of(cls, report: RoundReport) -> RoundSummary:
        """Copied: the report's tree grows on."""
        scores = [node.score for node in report.candidates if node.score is not None]
        return cls(
            report.round,
            len(report.candidates),
            len(report.survivors),
            len(report.pruned),
            len(report.finished),
            max(scores, default=None),
            num_generated(report.tree),
        )


class Listener(Protocol):
    """Hears of every job. `begun`, `ended` in the event loop, `round` in the solver's thread, where
    the tree is alive: all of them are quick. What one raises is logged, and nobody else's."""

    def begun(self, job: Job) -> None: ...
    def round(self, job: Job, report: RoundReport) -> None: ...
    def ended(self, job: Job, outcome: Solution | BaseException) -> None: ...


class Job:
    """One search of a request.

    owner: whose it is, None where there are no keys. text: final so far. rounds: those that nobody
    has read yet, the newest 64.
    """

    def __init__(self, ask: SearchRequest, owner: str | None) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.ask, self.owner, self.prompt_tokens = ask, owner, 0
        self.created_s, self.began_s = time.time(), time.monotonic()
        self.text = ""
        self.first_text_s: float | None = None
        self.rounds: list[RoundSummary] = []
        self.outcome: Solution | BaseException | None = None
        self.handle: Handle | None = None
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        match self.outcome:
            case None:
                return "running" if self.handle is not None and self.handle.begun else "waiting"
            case Solution():
                return "done"
            case Cancelled():
                return "cancelled"
        return "failed"

    async def changes(self) -> AsyncIterator[None]:
        """Once whenever there is something new, and once behind the end. For one reader."""
        ended = False
        while not ended:
            await self._changed.wait()
            self._changed.clear()
            if ended := self.outcome is not None:
                self._changed.set()  # whoever reads it again is not kept waiting
            yield

    async def solution(self) -> Solution:
        """Its result. Raises ApiError."""
        async for _ in self.changes():
            pass
        assert self.outcome is not None
        if isinstance(self.outcome, Solution):
            return self.outcome
        raise api_error(self.outcome, self.ask.param)

    def cancel(self) -> None:
        """Its KV is freed before the next iteration."""
        if self.handle is not None and self.outcome is None:
            self.handle.cancel()

    def hear(self, text: str, found: RoundSummary) -> None:
        """In the event loop: a round is decided."""
        if len(text) > len(self.text) and text.startswith(self.text):
            self.text = text
            self.first_text_s = self.first_text_s or time.monotonic() - self.began_s
        self.rounds = [*self.rounds[-63:], found]
        self._changed.set()

    def settle(self, outcome: Solution | BaseException) -> None:
        """In the event loop: it has ended."""
        self.outcome = outcome
        self._changed.set()


def about(job: Job, search: SearchSettings) -> About:
    """What the page says of a search. search: the server's own recipe."""
    problem, options = job.ask.problem, job.ask.options
    text = problem.problem_text if isinstance(problem, Conversation) else str(problem)
    if isinstance(problem, RawPrompt):
        text = str(problem.given)
    return {
        "problem": text,
        "model": job.ask.model,
        "method": options.get("search") or search.search,
        "n": options.get("n", search.n),
        "width": options.get("width", search.width),
        "seed": job.ask.seed,
    }


class Desk:
    """Takes requests for an engine. seed: of searches that name none; None: drawn anew."""

    def __init__(
        self, solver: Engine, name: str, limits: ServerLimits, seed: int | None = None
    ) -> None:
        self.solver, self.limits = solver, limits
        self.models = ModelNames(name, solver.settings.search)
        self.asker = Asker(
            self.models, limits, solver.codec is not None and solver.codec.takes_tools, seed
        )
        self.jobs: dict[str, Job] = {}
        self.listeners: list[Listener] = []
        self.draining = self._hurried = False
        self._waits: set[asyncio.Task[None]] = set()
        self._coming: Counter[str | None] = Counter()  # that are being looked at, by owner
        self._job_s = 10.0  # of the jobs that ended last

    async def begin(self, ask: SearchRequest, owner: str | None = None) -> Job:
        """Have it searched.

        Raises:
            ApiError: 503 while the server ends, 429 where too many are here, 400 for what is wrong.
        """
        self._check_room(owner)
        job, loop = Job(ask, owner), asyncio.get_running_loop()
        streams = self._streams(ask)
        told = threading.Event()  # a round is nobody's before the job is
        given_up = False

        def on_round(report: RoundReport) -> None:
            told.wait()
            if given_up:
                return
            self._tell("round", job, report)
            text = final_text(report.tree, ask.stops) if streams else ""
            found = RoundSummary.of(report)
            loop.call_soon_threadsafe(job.hear, text, found)

        def submit() -> None:
            self._submit(job, on_round)
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
            told.set()
            raise
        finally:
            self._coming[owner] -= 1
        assert job.handle is not None
        self.jobs[job.id] = job
        self._tell("begun", job)
        told.set()
        task = loop.create_task(self._end(job, job.handle))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        return job

    def _submit(self, job: Job, on_round: Callable[[RoundReport], None]) -> None:
        """By any thread: prompts and options may take a while to look at. Raises ApiError."""
        ask = job.ask
        try:
            job.prompt_tokens = self.solver.prompt_tokens(ask.problem)
        except InputError as error:
            raise api_error(error, ask.param) from error
        try:
            job.handle = self.solver.submit(ask.problem, on_round=on_round, **ask.options)
        except InputError as error:
            raise api_error(error, "search") from error

    async def begin_search(
        self, problem: str, options: Mapping[str, Any], owner: str | None = None
    ) -> Job:
        """A problem with options of a search, by recipes' names. Raises as `begin`."""
        fields = {
            "model": self.models.name,
            "messages": [{"role": "user", "content": problem}],
            "search": dict(options),
        }
        ask = await asyncio.to_thread(self.asker.chat_from, fields)
        return await self.begin(ask, owner)

    async def drain(self) -> None:
        """Take in nobody else; wait for those who are here, and then no longer."""
        self.draining = True
        deadline = time.monotonic() + self.limits.drain_s
        while self._num_here() and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(0.05)
        for job in list(self.jobs.values()):
            job.cancel()
        while self._waits:
            await asyncio.wait(self._waits)

    def _streams(self, ask: SearchRequest) -> bool:
        """True if text is final before the end, and can be said without what else is asked for."""
        method = ask.options.get("search") or self.models.search.search or DEFAULT_SEARCH
        commits = method in STRATEGIES and STRATEGIES[method].commits
        return commits and ask.top_logprobs is None and not ask.tools

    def hurry(self) -> None:
        """Whoever drains waits no longer."""
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
        seconds = max(1, round(self._job_s))
        raise ApiError(
            429, f"running or waiting: {full}", code="queue_full", retry_after_s=min(60, seconds)
        )

    def _num_here(self, owner: str | None = None) -> int:
        """Searches that run, wait, or are being looked at; of one owner, or all."""
        if owner is None:
            return len(self.jobs) + self._coming.total()
        return sum(job.owner == owner for job in self.jobs.values()) + self._coming[owner]

    async def _end(self, job: Job, handle: Handle) -> None:
        outcome: Solution | BaseException
        try:
            outcome = await handle
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
        self._job_s = 0.8 * self._job_s + 0.2 * (time.monotonic() - job.began_s)
        job.settle(outcome)
        self._tell("ended", job, outcome)

    def _tell(self, what: Literal["begun", "round", "ended"], *of: Any) -> None:
        for each in self.listeners:
            try:
                getattr(each, what)(*of)
            except Exception:
                log.exception("%s of %s", what, type(each).__name__)


def _ending() -> ApiError:
    return ApiError(503, "the server is shutting down", retry_after_s=30)
