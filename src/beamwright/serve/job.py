"""The search jobs of a request, and the reader that turns a request into jobs.

`SearchJob` is one search: its problem, its options and its state. `RequestReader` derives the
options and the thinking budget from a request's fields.

The model name selects the search: `NAME` the server's own recipe, `NAME:beam` and so on another
strategy, and `NAME:plain` a single sample, which chat UIs use for titles and tags. `NAME:heavy` is
the recipe with an answer that the model writes from the candidates.
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

from beamwright.config import option_sections
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
    """The numbers of one decided round.

    candidates, kept, pruned, finished: numbers of the round's paths.
    best: the highest score of a candidate of the round; None if no candidate has a score.
    tokens: number of tokens that the search has generated so far.
    """

    number: int
    candidates: int
    kept: int
    pruned: int
    finished: int
    best: float | None
    tokens: int

    @classmethod
    def of(cls, report: RoundReport) -> RoundSummary:
        """Copy the numbers of a report, whose tree keeps growing."""
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
        """Return the round as a readable line; `strip_round_lines` must recognise its format."""
        best = "" if self.best is None else f", best score {self.best:.3f}"
        ended = f", {self.finished} finished" if self.finished else ""
        return (
            f"Round {self.number}: {self.candidates} candidates, {self.kept} kept{ended}{best}, "
            f"{self.tokens} tokens so far.\n"
        )


_ROUNDS = re.compile(r"\s*(Round \d+: \d+ candidates, \d+ kept[^\n]* tokens so far\.\s*)+")


def strip_round_lines(thought: str) -> str:
    """Return a thought that a client sends back, without the lines about rounds at its beginning.

    Streams of this server send these lines in the field of thoughts (`RoundSummary`).
    """
    match = _ROUNDS.match(thought)
    return thought[match.end() :] if match else thought


class ReplyText(NamedTuple):
    """A reply, or the beginning of a reply that can no longer change.

    thought: the text of the reasoning. said: the text of the answer.
    """

    thought: str = ""
    said: str = ""


@dataclass(eq=False)
class SearchJob:
    """One search of a request: submits the search, and tells one reader about its progress.

    A job keeps only its newest text and rounds, not a queue of events, so that a slow or
    disconnected reader cannot delay the search or use up memory.

    model: the model name in the request.
    options: the options for `Solver.submit`.
    about: values that the live page shows, such as the method.
    choices: number of answers to return.
    stops: strings that end an answer.
    streams: True if text can be final before the search ends (`answers`).
    param: the field that holds the problem, for error messages.
    paths: paths to score, each as the texts of its steps. None for a search. With paths, no token
        is decoded, and the prompt's tokens are not counted.
    owner: digest of the API key that owns the job; None if the server has no keys.
    told: the part of the reply that is final so far.
    rounds: summaries of rounds that the reader has not taken yet, at most the newest 64.
    outcome: the solution or the error; None while the job waits or runs.
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
    told: ReplyText = field(default=ReplyText(), init=False)
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
        """Yield after each round, and once more after the end. Only one reader may iterate."""
        while self.outcome is None:
            await self._changed.wait()
            self._changed.clear()
            if self.outcome is None:
                yield
        self._changed.set()  # so that a later iteration over an ended job does not wait
        yield

    async def solution(self) -> Solution:
        """Wait until the search ends; return its solution. Raises ApiError if it failed."""
        async for _ in self.changes():
            pass
        assert self.outcome is not None
        if isinstance(self.outcome, Solution):
            return self.outcome
        raise api_error(self.outcome, self.param)

    @property
    def finished_solution(self) -> Solution:
        """The solution of a job that has succeeded."""
        assert isinstance(self.outcome, Solution)
        return self.outcome

    def reply_nodes(self, candidate: Candidate) -> list[Node]:
        """Return the steps of a candidate's reply, from its first step to its last."""
        return self.finished_solution.tree.node(candidate.lineage).reply()

    def submit(self, solver: Engine, on_round: RoundCallback) -> None:
        """Submit the job to the solver. Slow: it tokenizes the prompt. Raises ApiError."""
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
        """Cancel the search, whose KV is freed before the next iteration.

        A search that has ended is not changed.
        """
        if self.handle is not None and self.outcome is None:
            self.handle.cancel()

    def record_round(self, told: ReplyText, summary: RoundSummary) -> None:
        """Record a decided round and the text that is final; call this in the event loop."""
        grown = all(new.startswith(old) for new, old in zip(told, self.told, strict=True))
        if grown and told != self.told:
            self.told = told
            self.first_text_s = self.first_text_s or time.monotonic() - self.began_s
        self.rounds = [*self.rounds[1 - _MOST_ROUNDS :], summary]
        self._changed.set()

    def set_outcome(self, outcome: Solution | BaseException) -> None:
        """Record the outcome of a search that has ended; call this in the event loop."""
        self.outcome = outcome
        self._changed.set()


# --- from a request to jobs ------------------------------------------------------------------

_PLAIN = {"search": "best-of-n", "n": 1, "width": 1, "choose": "best", "max_rounds": 100_000}
# (n, width) by `reasoning_effort`. `none` and `minimal` take one sample; `medium` uses the recipe.
_EFFORTS = {"low": (4, 2), "high": (64, 4), "xhigh": (256, 4)}

_SEEDS = 2**63
# Members of a request's `search` object that have another name in recipes.
_NAMES = {"method": "search", "rounds": "max_rounds"}
# Options that a `search` object must not set, because OpenAI's own fields set them.
_NOT_OURS = ("stop", "stop_strings", "top_logprobs")
_WHOLE = ("n", "width", "seed", "token_budget", "max_tokens")


@dataclass(frozen=True)
class RequestReader:
    """Makes jobs from the fields of requests, for one server.

    name: the generator's name. search: the search settings of the server's recipe.
    seed: seed of searches that request none; None for a random seed per search.
    thought_base_tokens: the model's context length, of which a reasoning effort allows a share for
        thoughts; None if the model does not mark thoughts.
    """

    name: str
    search: SearchSettings
    limits: ServerLimits
    seed: int | None = None
    thought_base_tokens: int | None = None

    def models(self) -> list[str]:
        """Return all model names that a request may use, the recipe's name first."""
        return [self.name, *(f"{self.name}:{row}" for row in ("plain", "heavy", *STRATEGIES))]

    def options(self, model: str, effort: str | None = None) -> dict[str, Any]:
        """Return the search options that a model name and an effort stand for.

        Raises:
            ApiError: 404 for an unknown name.
        """
        if model not in self.models():
            said = f"the model {model!r} does not exist; GET /v1/models lists the models"
            raise ApiError(404, said, "model", "model_not_found")
        method = model.removeprefix(self.name).removeprefix(":")
        if method == "plain" or effort in ("none", "minimal"):
            return dict(_PLAIN)
        options: dict[str, Any] = {"search": method} if method else {}
        if method == "heavy":
            options = {"choose": "synthesis"}
        if effort is not None and effort in _EFFORTS:
            n, width = _EFFORTS[effort]
            options |= {"n": min(n, self.limits.n // width * width) or n, "width": width}
        return options

    def make_job(
        self,
        fields: Fields,
        problem: Problem,
        max_tokens: int | None = None,
        param: str = "messages",
        top_logprobs: int | None = None,
    ) -> SearchJob:
        """Build the job for a problem. Raises ApiError 400 for a wrong field or option.

        param: the field that holds the problem.
        top_logprobs: number of most likely tokens to return with each token; None to return no
            log-probabilities at all.
        """
        options = self.options(fields.model, fields.effort)
        if (thinking := thinking_option(fields, self.thought_base_tokens, max_tokens)) is not None:
            options["thinking"] = thinking
        options |= _search_options(fields.search)
        given = {name: getattr(fields, name) for name in ("temperature", "top_p", "min_p")}
        given["top_k"] = fields.top_k if fields.top_k and fields.top_k > 0 else None
        given["top_logprobs"] = top_logprobs or None
        options |= {name: value for name, value in given.items() if value is not None}
        choices = fields.n or 1
        if choices > 1 and options.get("n") == 1:
            options["choose"] = "majority"  # a vote of samples needs no verifier scores
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
        # Log-probabilities and tool calls are known at the end of the search only, so no text is
        # sent earlier.
        whole = top_logprobs is not None or (isinstance(problem, Conversation) and problem.tools)
        whole = whole or options.get("choose", self.search.choose) == "synthesis"
        streams = row is not None and row.commits and not whole
        return SearchJob(fields.model, problem, options, about, choices, stops, streams, param)

    def _widen(self, options: dict[str, Any], choices: int) -> None:
        """Raise `n` in `options` until the search has at least `choices` candidates.

        Raises:
            ApiError: 400 if `n` exceeds the server's limit.
        """
        width = options.get("width", self.search.width)
        n = options.get("n", self.search.n)
        if isinstance(n, int) and isinstance(width, int) and 0 < n < choices and width > 0:
            n = options["n"] = -(-choices // width) * width
        if isinstance(n, int) and n > self.limits.n:
            raise ApiError(400, f"search.n: {n} exceeds the server's limit {self.limits.n}", "n")


def text_of(problem: Problem) -> str:
    """Return a problem's text as the live page shows it."""
    if isinstance(problem, RawPrompt):
        return str(problem.given)
    return problem.problem_text if isinstance(problem, Conversation) else problem


def _search_options(search: Mapping[str, Any] | None) -> dict[str, Any]:
    options = {}
    for name, value in (search or {}).items():
        if name == "events":  # `events` is an option of the stream, not of the search
            continue
        known, param = _NAMES.get(name, name), f"search.{name}"
        if known in _NOT_OURS or known not in option_sections():
            raise ApiError(400, f"{param}: requests cannot set this option; remove it", param)
        if known == "search" and not isinstance(value, str | None):
            raise ApiError(400, f"{param}: must be a strategy's name", param)
        whole = known in _WHOLE and isinstance(value, float) and value.is_integer()
        options[known] = int(value) if whole else value  # in JSON 8.0 counts as an integer
        if known in _WHOLE and type(options[known]) not in (int, type(None)):
            raise ApiError(400, f"{param}: must be a whole number", param)
    return options


def _seconds(deadline: Any) -> float:
    try:
        seconds = None if deadline is None else parse_duration(deadline)
    except (InputError, ValueError, TypeError):
        raise ApiError(
            400,
            "search.deadline: must be a number of seconds, or a text such as 30s, 2m or 1h",
            "search.deadline",
        ) from None
    return float("inf") if seconds is None else seconds


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = tuple([stop] if isinstance(stop, str) else stop or ())
    if len(stops) > MOST_STOPS or any(not 1 <= len(text) <= 256 for text in stops):
        raise ApiError(400, f"stop: at most {MOST_STOPS} texts of 1 to 256 characters", "stop")
    if any("\ud800" <= char <= "\udfff" for text in stops for char in text):
        raise ApiError(400, "stop: a text contains a lone surrogate", "stop")
    return stops


# --- thinking budgets, in the fields of several servers ------------------------------------------

_BUDGETS = (
    "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens",
    "reasoning_budget",
)  # fmt: skip
# Share of the context, or of `max_tokens` if smaller, that a reasoning effort allows for thoughts;
# `medium` leaves the server's setting. With a context of 32,768 tokens, `minimal` and `low` allow
# 1,024 and 4,096 tokens, as users of vLLM requested (its issue 55382).
_SHARES = {"minimal": 1 / 32, "low": 1 / 8, "high": 1 / 2, "xhigh": 3 / 4}


def thinking_option(
    fields: Fields, thought_base_tokens: int | None, max_tokens: int | None = None
) -> str | int | None:
    """Return the value of `--thinking` for a request; None leaves the server's own setting.

    thought_base_tokens: the model's context length, of which a reasoning effort allows a share for
        thoughts; None if the model does not mark thoughts.
    max_tokens: maximum number of a reply's tokens.

    Raises:
        ApiError: 400 for a budget if the model marks no thoughts, and for fields that contradict
            each other.
    """
    asked, off = fields.reasoning, _switched_off(fields)
    given: dict[str, int] = fields.model_dump(include={*_BUDGETS}, exclude_none=True)
    if asked is not None and asked.max_tokens is not None:
        given["reasoning.max_tokens"] = asked.max_tokens
    if given:
        name, tokens = next(iter(given.items()))
        if thought_base_tokens is None:
            raise ApiError(400, f"{name}: this model does not mark thoughts", name, "unsupported")
        if len(set(given.values())) > 1:
            raise ApiError(400, f"{' and '.join(given)} differ; send one of them", name)
        if off and tokens:
            raise ApiError(400, f"{name} is {tokens}, but {off}; remove one of them", name)
        return "on" if tokens < 0 else tokens or "off"
    if thought_base_tokens is None:
        return None
    if off:
        return "off"
    if share := _SHARES.get(fields.effort or ""):
        return max(1, int(min(thought_base_tokens, max_tokens or thought_base_tokens) * share))
    return "on" if asked is not None and asked.enabled else None


def _switched_off(fields: Fields) -> str | None:
    """Return the field, as text, by which a request switches thinking off; None without one."""
    if fields.effort == "none":
        return "the reasoning effort is none"
    if (fields.chat_template_kwargs or {}).get("enable_thinking") is False:
        return "enable_thinking is false"
    if fields.reasoning is not None and fields.reasoning.enabled is False:
        return "reasoning.enabled is false"
    return None
