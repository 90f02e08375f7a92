"""Which search a request is for: model names, efforts, and the options of its `search` object.

`NAME` is the server's own recipe, `NAME:beam` and so on each strategy, `NAME:plain` one sample:
for the titles and tags of chat UIs, and for clients that know of no search.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from beamwright.config import option_owners
from beamwright.errors import InputError
from beamwright.search import DEFAULT_SEARCH, STRATEGIES, make_strategy
from beamwright.sections import SearchSettings
from beamwright.serve.body import MOST_STOPS, Fields, ServerLimits
from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob
from beamwright.tree import Conversation, Problem
from beamwright.units import parse_duration

PLAIN: Mapping[str, Any] = MappingProxyType(
    {"search": "best-of-n", "n": 1, "width": 1, "choose": "best", "max_rounds": 100_000}
)
EFFORTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": PLAIN,
        "minimal": PLAIN,
        "low": {"n": 4, "width": 2},
        "medium": {},
        "high": {"n": 64, "width": 4},
        "xhigh": {"n": 256, "width": 4},
    }
)
"""What `reasoning_effort` means: `medium` is the server's recipe."""

_SEEDS = 2**63
_NAMES = {"method": "search", "rounds": "max_rounds"}  # of `search`, as recipes have them
_OURS = ("stop", "stop_strings", "top_logprobs")  # go by OpenAI's names


@dataclass(frozen=True)
class ModelNames:
    """The names that a server answers to. name: of its generator; search: its recipe."""

    name: str
    search: SearchSettings

    def ids(self) -> list[str]:
        """All of them, the recipe first; strategies that the recipe's n and width suit."""
        methods = [method for method in STRATEGIES if self._suits(method)]
        return [self.name, f"{self.name}:plain", *(f"{self.name}:{method}" for method in methods)]

    def options(self, model: str, effort: str | None = None) -> dict[str, Any]:
        """The search that is asked for.

        Raises:
            ApiError: 404 for a model, 400 for an effort that there is not.
        """
        if effort is not None and effort not in EFFORTS:
            known = ", ".join(EFFORTS)
            raise ApiError(400, f"reasoning_effort: {effort}; known: {known}", "reasoning_effort")
        wanted = EFFORTS[effort or "medium"]
        if model == self.name:
            return dict(wanted)
        name, _, method = model.rpartition(":")
        if name != self.name or method not in ("plain", *STRATEGIES):
            raise ApiError(
                404, f"the model {model!r} does not exist here", "model", "model_not_found"
            )
        plain = method == "plain" or wanted is PLAIN
        return dict(PLAIN) if plain else {"search": method, **wanted}

    def commits(self, options: Mapping[str, Any]) -> bool:
        """True if a search decides text before its end, see `final`."""
        method = options.get("search") or self.search.search or DEFAULT_SEARCH
        return method in STRATEGIES and STRATEGIES[method].commits

    def _suits(self, method: str) -> bool:
        shared = {name: getattr(self.search, name) for name in SearchSettings.model_fields}
        try:
            make_strategy(SearchSettings(**{**shared, "search": STRATEGIES[method].name}))
        except InputError:
            return False
        return True


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one server. seed: of all searches that name none; None: drawn anew."""

    models: ModelNames
    limits: ServerLimits
    takes_tools: bool
    seed: int | None = None

    def job(
        self,
        fields: Fields,
        problem: Problem,
        max_tokens: int | None = None,
        top_logprobs: int | None = None,
        **known: Any,
    ) -> SearchJob:
        """The search of this problem. known: other fields of the job. Raises ApiError."""
        options = self.models.options(fields.model, fields.reasoning_effort)
        options |= _search_options(fields.search)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(fields, name)
            if value is not None:
                options[name] = value
        if fields.top_k is not None and fields.top_k > 0:
            options["top_k"] = fields.top_k
        choices = fields.n or 1
        if choices > 1 and options.get("n") == 1:
            options["choose"] = "majority"  # of samples: nobody need score them
        self._widen(options, choices)
        seed = fields.seed if fields.seed is not None else options.get("seed", self.seed)
        seed = secrets.randbelow(2**31) if seed is None else seed % _SEEDS
        stops, most = _stops(fields.stop), self.limits.tokens
        budget = options.get("token_budget")
        options |= {
            "seed": seed,
            "max_tokens": max_tokens or options.get("max_tokens"),
            "stop_strings": stops or None,
            "top_logprobs": top_logprobs or None,
            "token_budget": most if budget is None else min(budget, most),
            "deadline": min(_seconds(options.get("deadline")), self.limits.seconds),
        }
        tools = isinstance(problem, Conversation) and bool(problem.tools)
        return SearchJob(
            fields.model, problem, options, choices, seed, stops, top_logprobs, tools, **known
        )

    def _widen(self, options: dict[str, Any], choices: int) -> None:
        """At least as many candidates as are returned."""
        width = options.get("width", self.models.search.width)
        n = options.get("n", self.models.search.n)
        if isinstance(n, int) and isinstance(width, int) and 0 < n < choices and width > 0:
            n = options["n"] = -(-choices // width) * width
        if isinstance(n, int) and n > self.limits.n:
            raise ApiError(400, f"search.n: {n} candidates; at most {self.limits.n} here", "n")

    def tools(
        self, tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
    ) -> tuple[Mapping[str, Any], ...]:
        """Those that the model is shown. Raises ApiError."""
        if choice not in (None, "auto", "none"):
            raise ApiError(400, "tool_choice: auto and none are supported", "tool_choice")
        if not tools or choice == "none":
            return ()
        if not self.takes_tools:
            raise ApiError(
                400, "tools: this model's chat template has none (tool_choice none drops them)",
                "tools", "unsupported",
            )  # fmt: skip
        for number, tool in enumerate(tools):
            named = isinstance(tool.get("function"), Mapping) and tool["function"].get("name")
            if tool.get("type") != "function" or not isinstance(named, str):
                raise ApiError(400, f"tools[{number}]: no function with a name", f"tools[{number}]")
        return tuple(tools)


def _search_options(search: Mapping[str, Any] | None) -> dict[str, Any]:
    options = {}
    for name, value in (search or {}).items():
        if name == "events":  # of the stream, not of the search
            continue
        known = _NAMES.get(name, name)
        if known in _OURS or known not in option_owners():
            raise ApiError(400, f"search.{name}: no such option here", f"search.{name}")
        options[known] = value
    for name in ("n", "width", "seed", "token_budget", "max_tokens"):
        if options.get(name) is not None and type(options[name]) is not int:
            raise ApiError(400, f"search.{name}: is a whole number", f"search.{name}")
    if not isinstance(options.get("search", ""), str | None):
        raise ApiError(400, "search.method: is a name", "search.method")
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
