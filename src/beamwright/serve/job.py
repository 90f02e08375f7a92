"""SearchJob: one search of a request, what is asked and what has become of it so far."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from beamwright.engine.limits import num_generated
from beamwright.errors import Cancelled
from beamwright.protocols import RoundReport
from beamwright.sections import SearchSettings
from beamwright.serve.errors import api_error
from beamwright.serve.events import About
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution
from beamwright.tree import Conversation, Problem, RawPrompt

_MOST_ROUNDS = 64


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

    def __str__(self) -> str:
        """A round in a line, for people."""
        best = "" if self.best is None else f", best score {self.best:.3f}"
        ended = f", {self.finished} finished" if self.finished else ""
        return (
            f"Round {self.number}: {self.candidates} candidates, {self.kept} kept{ended}{best}, "
            f"{self.tokens} tokens so far.\n"
        )


@dataclass(eq=False)
class SearchJob:
    """One search of a request. It keeps its newest text and rounds alone, so a reader that is
    slow, or gone, holds nothing up.

    model: as it was named. options: of `Solver.submit`. choices: answers that are returned.
    seed: of the search, given or drawn. stops: strings that end an answer. top_logprobs: of every
    token, None without log-probabilities. tools: the answer may call some. param: the field that
    the problem is in. token_ids, with_stop: what was drawn is said, and the stop string that ended
    a text is in it, as vLLM does.

    owner: whose it is, None where there are no keys. text: final so far. rounds: those that nobody
    has read yet, the newest 64.
    """

    model: str
    problem: Problem
    options: Mapping[str, Any]
    choices: int = 1
    seed: int = 0
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    tools: bool = False
    param: str = "messages"
    token_ids: bool = False
    with_stop: bool = False
    owner: str | None = field(default=None, init=False)
    prompt_tokens: int = field(default=0, init=False)
    text: str = field(default="", init=False)
    first_text_s: float | None = field(default=None, init=False)
    rounds: list[RoundSummary] = field(default_factory=list, init=False)
    outcome: Solution | BaseException | None = field(default=None, init=False)
    handle: Handle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.number = secrets.token_hex(12)
        self.id = f"chatcmpl-{self.number}"
        self.created_s, self.began_s = time.time(), time.monotonic()
        self._changed = asyncio.Event()

    @property
    def is_plain(self) -> bool:
        """One sample: there is no search to tell of."""
        return self.options.get("n") == 1

    @property
    def state(self) -> Literal["waiting", "running", "done", "failed", "cancelled"]:
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
        raise api_error(self.outcome, self.param)

    def cancel(self) -> None:
        """Its KV is freed before the next iteration. One that has ended stays as it is."""
        if self.handle is not None and self.outcome is None:
            self.handle.cancel()

    def hear(self, text: str, summary: RoundSummary) -> None:
        """In the event loop: a round is decided."""
        if len(text) > len(self.text) and text.startswith(self.text):
            self.text = text
            self.first_text_s = self.first_text_s or time.monotonic() - self.began_s
        self.rounds = [*self.rounds[1 - _MOST_ROUNDS :], summary]
        self._changed.set()

    def settle(self, outcome: Solution | BaseException) -> None:
        """In the event loop: it has ended."""
        self.outcome = outcome
        self._changed.set()

    def about(self, search: SearchSettings) -> About:
        """What the page says of it. search: the server's own recipe."""
        problem, options = self.problem, self.options
        text = problem.problem_text if isinstance(problem, Conversation) else str(problem)
        return {
            "problem": str(problem.given) if isinstance(problem, RawPrompt) else text,
            "model": self.model,
            "method": options.get("search") or search.search,
            "n": options.get("n", search.n),
            "width": options.get("width", search.width),
            "seed": self.seed,
        }
