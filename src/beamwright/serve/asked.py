"""From a request's fields to what is searched: a problem, options of the Solver, what is shown."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamwright.config import option_owners
from beamwright.conversation import Conversation, Problem
from beamwright.errors import InputError
from beamwright.serve.errors import ApiError
from beamwright.serve.fields import (
    MOST_PROMPTS,
    MOST_STOPS,
    ChatFields,
    CompletionFields,
    Fields,
    ResponseFields,
    parsed,
)
from beamwright.serve.limits import ServerLimits
from beamwright.serve.recipes import ModelNames
from beamwright.serve.said import message_of, messages_of, nested_tools, prompts_of
from beamwright.units import parse_duration

_SEEDS = 2**63
_NAMES = {"method": "search", "rounds": "max_rounds"}  # of `search`, as recipes have them
_OURS = ("stop", "stop_strings", "top_logprobs")  # go by OpenAI's names


@dataclass(frozen=True)
class SearchRequest:
    """One search for one request.

    model: as it was named. options: of `Solver.submit`. choices: answers that are returned.
    seed: of the search, given or drawn. stops: strings that end an answer. top_logprobs: of every
    token, None without log-probabilities. tools: the answer may call some. param: the field that
    the problem is in. token_ids, with_stop: what was drawn is said, and the stop string that ended
    a text is in it, as vLLM does.
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

    @property
    def is_plain(self) -> bool:
        """One sample: there is no search to tell of."""
        return self.options.get("n") == 1


@dataclass(frozen=True)
class Asker:
    """Reads requests for one server. seed: of all searches that name none; None: drawn anew."""

    models: ModelNames
    limits: ServerLimits
    takes_tools: bool
    seed: int | None = None

    def chat(self, fields: ChatFields) -> SearchRequest:
        """A conversation. Raises ApiError 400 for what is not understood."""
        tools = self._tools(fields.tools, fields.tool_choice)
        messages = tuple(
            message_of(each, f"messages[{number}]") for number, each in enumerate(fields.messages)
        )
        top = (fields.top_logprobs or 0) if fields.logprobs else None
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs", "top_logprobs")
        limit = fields.max_completion_tokens or fields.max_tokens
        return self._ask(fields, Conversation(messages, tools), limit, top)

    def chat_from(self, body: Mapping[str, Any]) -> SearchRequest:
        """The same, from a body's fields."""
        return self.chat(parsed(ChatFields, body))

    def completions(self, fields: CompletionFields) -> list[SearchRequest]:
        """A search for every prompt."""
        prompts = prompts_of(fields.prompt)
        if not prompts:
            raise ApiError(400, f"prompt: from 1 to {MOST_PROMPTS} of them", "prompt")
        token_ids, with_stop = (
            bool(fields.return_token_ids),
            bool(fields.include_stop_str_in_output),
        )
        if fields.stream and (token_ids or with_stop):
            name = "return_token_ids" if token_ids else "include_stop_str_in_output"
            raise ApiError(400, f"{name}: not in a stream", name, "unsupported")
        asks = [self._ask(fields, each, fields.max_tokens, fields.logprobs) for each in prompts]
        return [
            replace(ask, param="prompt", token_ids=token_ids, with_stop=with_stop) for ask in asks
        ]

    def response(self, fields: ResponseFields) -> SearchRequest:
        """A conversation that nobody remembers."""
        messages = messages_of(fields.input)
        if fields.instructions:
            messages.insert(0, {"role": "system", "content": fields.instructions})
        if (fields.text or {}).get("format", {"type": "text"}) != {"type": "text"}:
            raise ApiError(400, "text.format: only text is supported", "text.format")
        effort = (fields.reasoning or {}).get("effort")
        if not isinstance(effort, str | None):
            raise ApiError(400, "reasoning.effort: is a name", "reasoning.effort")
        if effort is not None:
            fields = fields.model_copy(update={"reasoning_effort": effort})
        tools = self._tools(nested_tools(fields.tools), fields.tool_choice)
        limit = fields.max_output_tokens or fields.max_tokens
        ask = self._ask(fields, Conversation(tuple(messages), tools), limit, None)
        return replace(ask, param="input")

    # --- options -----------------------------------------------------------------------------

    def _ask(
        self, fields: Fields, problem: Problem, max_tokens: int | None, top: int | None
    ) -> SearchRequest:
        options = self.models.options(fields.model, fields.reasoning_effort)
        options |= _own(fields.search)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(fields, name)
            if value is not None:
                options[name] = value
        if fields.top_k is not None and fields.top_k > 0:
            options["top_k"] = fields.top_k
        choices = fields.n or 1
        if choices > 1 and options.get("n") == 1:
            options["choose"] = "majority"  # of samples: nobody need score them
        options = self._wide_enough(options, choices)
        seed = fields.seed if fields.seed is not None else options.get("seed", self.seed)
        seed = secrets.randbelow(2**31) if seed is None else seed % _SEEDS
        stops = _stops(fields.stop)
        options |= {"seed": seed, "max_tokens": max_tokens or options.get("max_tokens")}
        options |= {"stop_strings": stops or None, "top_logprobs": top or None}
        budget = options.get("token_budget")
        most = self.limits.tokens
        options["token_budget"] = most if budget is None else min(budget, most)
        options["deadline"] = min(_seconds(options.get("deadline")), self.limits.seconds)
        tools = isinstance(problem, Conversation) and bool(problem.tools)
        return SearchRequest(fields.model, problem, options, choices, seed, stops, top, tools)

    def _wide_enough(self, options: dict[str, Any], choices: int) -> dict[str, Any]:
        """At least as many candidates as are returned."""
        search = self.models.search
        width = options.get("width", search.width)
        n = options.get("n", search.n)
        if isinstance(n, int) and isinstance(width, int) and 0 < n < choices and width > 0:
            n = -(-choices // width) * width
            options = {**options, "n": n}
        if isinstance(n, int) and n > self.limits.n:
            raise ApiError(400, f"search.n: {n} candidates; at most {self.limits.n} here", "n")
        return options

    def _tools(
        self, tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
    ) -> tuple[Mapping[str, Any], ...]:
        if choice not in (None, "auto", "none"):
            raise ApiError(400, "tool_choice: auto and none are supported", "tool_choice")
        if not tools or choice == "none":
            return ()
        if not self.takes_tools:
            raise ApiError(
                400, "tools: this model's chat template has none (tool_choice none drops them)",
                "tools", "unsupported",
            )  # fmt: skip
        for number, each in enumerate(tools):
            named = isinstance(each.get("function"), Mapping) and each["function"].get("name")
            if each.get("type") != "function" or not isinstance(named, str):
                raise ApiError(400, f"tools[{number}]: no function with a name", f"tools[{number}]")
        return tuple(tools)


def _own(search: Mapping[str, Any] | None) -> dict[str, Any]:
    found = {}
    for name, value in (search or {}).items():
        if name == "events":  # of the stream, not of the search
            continue
        known = _NAMES.get(name, name)
        if known in _OURS or known not in option_owners():
            raise ApiError(400, f"search.{name}: no such option here", f"search.{name}")
        found[known] = value
    for name in ("n", "width", "seed", "token_budget", "max_tokens"):
        value = found.get(name)
        if value is not None and type(value) is not int:
            raise ApiError(400, f"search.{name}: is a whole number", f"search.{name}")
    if not isinstance(found.get("search", ""), str | None):
        raise ApiError(400, "search.method: is a name", "search.method")
    return found


def _seconds(deadline: Any) -> float:
    if deadline is None:
        return float("inf")
    try:
        found = parse_duration(deadline)
    except (InputError, ValueError, TypeError):
        raise ApiError(400, "search.deadline: seconds, or 30s, 2m, 1h", "search.deadline") from None
    return float("inf") if found is None else found


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    found = tuple([stop] if isinstance(stop, str) else stop or ())
    if len(found) > MOST_STOPS or any(not 1 <= len(each) <= 256 for each in found):
        raise ApiError(400, f"stop: at most {MOST_STOPS} strings of 1 to 256 characters", "stop")
    if any("\ud800" <= char <= "\udfff" for each in found for char in each):
        raise ApiError(400, "stop: half of a character ends nothing", "stop")
    return found
