"""How long a request lets a model think: budgets and efforts in the words of several servers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from beamwright.serve.body import Fields
from beamwright.serve.errors import ApiError

_BUDGETS = (
    "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens",
    "reasoning_budget",
)  # fmt: skip
_SHARES: Mapping[str | None, float] = MappingProxyType(
    {"minimal": 1 / 32, "low": 1 / 8, "high": 1 / 2, "xhigh": 3 / 4}
)
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
    given = {name: getattr(fields, name) for name in _BUDGETS}
    asked = fields.reasoning
    if asked is not None:
        given["reasoning.max_tokens"] = asked.max_tokens
    given = {name: tokens for name, tokens in given.items() if tokens is not None}
    off = _switched_off(fields)
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
    if fields.effort in _SHARES:
        return max(1, int(min(context, max_tokens or context) * _SHARES[fields.effort]))
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
