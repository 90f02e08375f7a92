"""SearchJob: one search of a request, what is asked and what has become of it so far; and who
reads which search a request is for, and how long it may think: `RequestReader`.

`NAME` is the server's own recipe, `NAME:beam` and so on each strategy, `NAME:plain` one sample:
for the titles and tags of chat UIs, and for clients that know of no search.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from beamwright.config import option_owners
from beamwright.engine.decisions import num_generated
from beamwright.errors import Cancelled, InputError
from beamwright.protocols import RoundCallback, RoundReport
from beamwright.search import DEFAULT_SEARCH, STRATEGIES
from beamwright.sections import SearchSettings
from beamwright.serve.body import MOST_STOPS, ApiError, Fields, ServerLimits, api_error
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Candidate, Solution
from beamwright.tree import Conversation, Node, Problem, RawPrompt
from beamwright.units import parse_duration

if TYPE_CHECKING:
    from beamwright.cluster.solver import ClusterSolver
    from beamwright.solver.solver import Solver

    Engine = Solver | ClusterSolver

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
            number=report.round,
            candidates=len(report.candidates),
            kept=len(report.survivors),
            pruned=len(report.pruned),
            finished=len(report.finished),
            best=max(scores, default=None),
            tokens=num_generated(report.tree),
        )

    def __str__(self) -> str:
        """A round in a line, for people; `without_rounds` knows it."""
        best = "" if self.best is None else f", best score {self.best:.3f}"
        ended = f", {self.finished} finished" if self.finished else ""
        return (
            f"Round {self.number}: {self.candidates} candidates, {self.kept} kept{ended}{best}, "
            f"{self.tokens} tokens so far.\n"
        )


_ROUNDS = re.compile(r"\s*(Round \d+: \d+ candidates, \d+ kept[^\n]* tokens so far\.\s*)+")


def without_rounds(thought: str) -> str:
    """What a client sends back as a thought, without the rounds that our streams begin it with."""
    match = _ROUNDS.match(thought)
    return thought[match.end() :] if match else thought


class Told(NamedTuple):
    """A reply, or what of it is final: what was thought, and what is said."""

    thought: str = ""
    said: str = ""


@dataclass(eq=False)
class SearchJob:
    """One search of a request. It keeps its newest text and rounds alone, so a reader that is
    slow, or gone, holds nothing up.

    model: as it was named. options: of `Solver.submit`. about: what the page says of it. choices:
    answers that are returned. stops: strings that end an answer. streams: text is final before the
    end, see `answers`. param: the field that the problem is in. paths: to be scored; then nothing
    is searched, and no prompt read.

    owner: whose it is, None where there are no keys. told: final so far. rounds: those that nobody
    has read yet, the newest 64.
    """

    model: str
    problem: Problem
    options: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    choices: int = 1
    stops: tuple[str, ...] = ()
    streams: bool = False
    param: str = "messages"
    paths: Sequence[Sequence[str]] | None = None
    owner: str | None = field(default=None, init=False)
    prompt_tokens: int = field(default=0, init=False)
    told: Told = field(default=Told(), init=False)
    first_text_s: float | None = field(default=None, init=False)
    rounds: list[RoundSummary] = field(default_factory=list, init=False)
    outcome: Solution | BaseException | None = field(default=None, init=False)
    handle: Handle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.number = secrets.token_hex(12)
        self.id = f"{'chatcmpl' if self.paths is None else 'score'}-{self.number}"
        self.created_s, self.began_s = time.time(), time.monotonic()
        self._changed = asyncio.Event()

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
        """Whenever there is something new, and once behind the end. For one reader."""
        while self.outcome is None:
            await self._changed.wait()
            self._changed.clear()
            if self.outcome is None:
                yield
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

    @property
    def found(self) -> Solution:
        """Its solution, of a job that is done."""
        assert isinstance(self.outcome, Solution)
        return self.outcome

    def reply(self, candidate: Candidate) -> list[Node]:
        """The steps of an answer."""
        return self.found.tree.node(candidate.lineage).reply()

    def submit(self, solver: Engine, on_round: RoundCallback) -> None:
        """Have it searched; prompts and options may take a while to look at. Raises ApiError."""
        submit: Callable[..., Handle] = partial(solver.submit_score, paths=self.paths or ())
        param = "steps"
        try:
            if self.paths is None:
                param = self.param
                self.prompt_tokens = solver.prompt_tokens(self.problem)
                param, submit = "search", solver.submit
            self.handle = submit(self.problem, on_round=on_round, **self.options)
        except InputError as error:
            raise api_error(error, param) from error

    def cancel(self) -> None:
        """Its KV is freed before the next iteration. One that has ended stays as it is."""
        if self.handle is not None and self.outcome is None:
            self.handle.cancel()

    def hear(self, told: Told, summary: RoundSummary) -> None:
        """In the event loop: a round is decided."""
        grown = all(new.startswith(old) for new, old in zip(told, self.told, strict=True))
        if grown and told != self.told:
            self.told = told
            self.first_text_s = self.first_text_s or time.monotonic() - self.began_s
        self.rounds = [*self.rounds[1 - _MOST_ROUNDS :], summary]
        self._changed.set()

    def settle(self, outcome: Solution | BaseException) -> None:
        """In the event loop: it has ended."""
        self.outcome = outcome
        self._changed.set()


# --- what is asked ---------------------------------------------------------------------------

_PLAIN = {"search": "best-of-n", "n": 1, "width": 1, "choose": "best", "max_rounds": 100_000}
_EFFORTS = {"low": (4, 2), "high": (64, 4), "xhigh": (256, 4)}
"""n and width that a `reasoning_effort` stands for; `none` and `minimal` are one sample, and
`medium` is the recipe."""

_SEEDS = 2**63
_NAMES = {"method": "search", "rounds": "max_rounds"}  # of `search`, as recipes have them
_NOT_OURS = ("stop", "stop_strings", "top_logprobs")  # go by OpenAI's names, or not at all
_WHOLE = ("n", "width", "seed", "token_budget", "max_tokens")


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one server. name: of its generator; search: its recipe; seed: of all
    searches that name none; None: drawn anew. context: of a model that marks thoughts."""

    name: str
    search: SearchSettings
    limits: ServerLimits
    seed: int | None = None
    context: int | None = None

    def models(self) -> list[str]:
        """All names that a search has here, the recipe first."""
        return [self.name, f"{self.name}:plain", *(f"{self.name}:{row}" for row in STRATEGIES)]

    def options(self, model: str, effort: str | None = None) -> dict[str, Any]:
        """The search that a name and an effort stand for. Raises ApiError 404."""
        if model not in self.models():
            said = f"the model {model!r} does not exist here"
            raise ApiError(404, said, "model", "model_not_found")
        method = model.removeprefix(self.name).removeprefix(":")
        if method == "plain" or effort in ("none", "minimal"):
            return dict(_PLAIN)
        options: dict[str, Any] = {"search": method} if method else {}
        if effort is not None and effort in _EFFORTS:
            n, width = _EFFORTS[effort]
            options |= {"n": min(n, self.limits.n // width * width) or n, "width": width}
        return options

    def job(
        self,
        fields: Fields,
        problem: Problem,
        max_tokens: int | None = None,
        param: str = "messages",
        top_logprobs: int | None = None,
    ) -> SearchJob:
        """The search of this problem. param: the field that it is in. top_logprobs: beside each
        token, None where its own is not told either. Raises ApiError."""
        options = self.options(fields.model, fields.effort)
        if (thinking := thinking_of(fields, self.context, max_tokens)) is not None:
            options["thinking"] = thinking
        options |= _search_options(fields.search)
        given = {name: getattr(fields, name) for name in ("temperature", "top_p", "min_p")}
        given["top_k"] = fields.top_k if fields.top_k and fields.top_k > 0 else None
        given["top_logprobs"] = top_logprobs or None
        options |= {name: value for name, value in given.items() if value is not None}
        choices = fields.n or 1
        if choices > 1 and options.get("n") == 1:
            options["choose"] = "majority"  # of samples: nobody need score them
        self._widen(options, choices)
        seed = fields.seed if fields.seed is not None else options.get("seed", self.seed)
        seed = secrets.randbelow(2**31) if seed is None else seed % _SEEDS
        stops, budget = _stops(fields.stop), options.get("token_budget")
        options |= {
            "seed": seed,
            "max_tokens": max_tokens or options.get("max_tokens"),
            "stop_strings": stops or None,
            "token_budget": self.limits.tokens
            if budget is None
            else min(budget, self.limits.tokens),
            "deadline": min(_seconds(options.get("deadline")), self.limits.seconds),
        }
        method = options.get("search") or self.search.search
        about = {
            "problem": text_of(problem),
            "model": fields.model,
            "method": method,
            "n": options.get("n", self.search.n),
            "width": options.get("width", self.search.width),
            "seed": seed,
        }
        row = STRATEGIES.get(method or DEFAULT_SEARCH)
        # Log-probabilities and calls come at the end, and their text with them.
        whole = top_logprobs is not None or (isinstance(problem, Conversation) and problem.tools)
        streams = row is not None and row.commits and not whole
        return SearchJob(fields.model, problem, options, about, choices, stops, streams, param)

    def _widen(self, options: dict[str, Any], choices: int) -> None:
        """At least as many candidates as are returned."""
        width = options.get("width", self.search.width)
        n = options.get("n", self.search.n)
        if isinstance(n, int) and isinstance(width, int) and 0 < n < choices and width > 0:
            n = options["n"] = -(-choices // width) * width
        if isinstance(n, int) and n > self.limits.n:
            raise ApiError(400, f"search.n: {n} candidates; at most {self.limits.n} here", "n")


def text_of(problem: Problem) -> str:
    """As the page shows it."""
    if isinstance(problem, RawPrompt):
        return str(problem.given)
    return problem.problem_text if isinstance(problem, Conversation) else problem


def _search_options(search: Mapping[str, Any] | None) -> dict[str, Any]:
    options = {}
    for name, value in (search or {}).items():
        if name == "events":  # of the stream, not of the search
            continue
        known, param = _NAMES.get(name, name), f"search.{name}"
        if known in _NOT_OURS or known not in option_owners():
            raise ApiError(400, f"{param}: no such option here", param)
        if known == "search" and not isinstance(value, str | None):
            raise ApiError(400, f"{param}: is a name", param)
        whole = known in _WHOLE and isinstance(value, float) and value.is_integer()
        options[known] = int(value) if whole else value  # 8.0 is an integer in JSON
        if known in _WHOLE and type(options[known]) not in (int, type(None)):
            raise ApiError(400, f"{param}: is a whole number", param)
    return options


def _seconds(deadline: Any) -> float:
    try:
        seconds = None if deadline is None else parse_duration(deadline)
    except (InputError, ValueError, TypeError):
        raise ApiError(400, "search.deadline: seconds, or 30s, 2m, 1h", "search.deadline") from None
    return float("inf") if seconds is None else seconds


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = tuple([stop] if isinstance(stop, str) else stop or ())
    if len(stops) > MOST_STOPS or any(not 1 <= len(text) <= 256 for text in stops):
        raise ApiError(400, f"stop: at most {MOST_STOPS} strings of 1 to 256 characters", "stop")
    if any("\ud800" <= char <= "\udfff" for text in stops for char in text):
        raise ApiError(400, "stop: half of a character ends nothing", "stop")
    return stops


# --- how long it may think, in the words of several servers --------------------------------------

_BUDGETS = (
    "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens",
    "reasoning_budget",
)  # fmt: skip
_SHARES = {"minimal": 1 / 32, "low": 1 / 8, "high": 1 / 2, "xhigh": 3 / 4}
"""Of the context, or of a reply's most tokens, what an effort lets it think; `medium` is as
started. A context of 32,768 has 1,024 and 4,096, as people want it of vLLM (its issue 55382)."""


def thinking_of(
    fields: Fields, context: int | None, max_tokens: int | None = None
) -> str | int | None:
    """`--thinking` of a request; None: as the server was started.

    context: of a model that marks thoughts; None: it marks none. max_tokens: of a reply.

    Raises:
        ApiError: 400, for a budget of a model that marks no thoughts, and for two that contradict
            each other.
    """
    asked, off = fields.reasoning, _switched_off(fields)
    given: dict[str, int] = fields.model_dump(include={*_BUDGETS}, exclude_none=True)
    if asked is not None and asked.max_tokens is not None:
        given["reasoning.max_tokens"] = asked.max_tokens
    if given:
        name, tokens = next(iter(given.items()))
        if context is None:
            raise ApiError(400, f"{name}: this model marks no thoughts", name, "unsupported")
        if len(set(given.values())) > 1:
            raise ApiError(400, f"{' and '.join(given)}: they differ", name)
        if off and tokens:
            raise ApiError(400, f"{name}: {tokens} tokens, but {off}", name)
        return "on" if tokens < 0 else tokens or "off"
    if context is None:
        return None
    if off:
        return "off"
    if share := _SHARES.get(fields.effort or ""):
        return max(1, int(min(context, max_tokens or context) * share))
    return "on" if asked is not None and asked.enabled else None


def _switched_off(fields: Fields) -> str | None:
    """What in a request says that nothing is to be thought."""
    if fields.effort == "none":
        return "the effort is none"
    if (fields.chat_template_kwargs or {}).get("enable_thinking") is False:
        return "enable_thinking is false"
    if fields.reasoning is not None and fields.reasoning.enabled is False:
        return "reasoning.enabled is false"
    return None
