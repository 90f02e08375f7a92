"""What settings leave open: strategy and verifier, which depend on each other and on the model.

The bundled model comes with the bundled verifier and beam search. Another model has no verifier
until one is named, and its paths vote; a search that needs scores is refused without one. Random
weights are there to be measured: they score themselves, and nothing is refused.
"""

from __future__ import annotations

import math
from typing import Any

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.search import DEFAULT_SEARCH, strategy_row
from beamwright.sections import ModelSettings

_WAYS = (
    "--verifier PATH or hf:ORG/NAME (a process reward model), judge:PATH (a chat model), "
    "likelihood:PATH (another model's probabilities) or logprob (the model's own confidence)"
)
_PAGE = "see docs/guides/verifiers.md"


def with_defaults(
    settings: Settings, *, own_scores: bool = False, own_strategy: bool = False
) -> Settings:
    """Settings in which nothing about the search is left open: `resolved`, and the strategy's own
    choice of the answer, options and step lengths where none were given.

    own_strategy: the user's own decides; beam search is its name here.

    Raises:
        InputError: as `resolved`, and as `make_strategy`.
    """
    settings = resolved(settings, own_scores=own_scores)
    row = strategy_row(settings.search)
    search, step = settings.search, settings.step
    filled: dict[str, Any] = {"choose": search.choose or row.choose}
    if not own_strategy:
        policy = row.policy(search)
        filled |= {name: getattr(policy, name) for name in row.options if hasattr(policy, name)}
    search = search.model_copy(update=filled)
    if step.step_limits is None and step.step_tokens is None and row.step_limits is not None:
        cap = step.max_step_tokens if "max_step_tokens" in step.model_fields_set else math.inf
        limits = tuple(limit for limit in row.step_limits if limit < cap)
        if len(limits) < len(row.step_limits):
            limits = (*limits, step.max_step_tokens)
        step = step.model_copy(update={"step_limits": limits})
    return settings.model_copy(update={"search": search, "step": step})


def resolved(settings: Settings, *, own_scores: bool = False) -> Settings:
    """Settings in which a strategy and a verifier are named.

    own_scores: steps are scored by what no setting names, such as a function of the user's.

    Raises:
        InputError: for an unknown strategy, or one that needs scores where there are none; says
            what gives them.
    """
    model, search = settings.model, settings.search
    if search.search is None:
        name = "majority" if not own_scores and _votes_by_default(model) else DEFAULT_SEARCH
        search = search.model_copy(update={"search": name})
    row = strategy_row(search)
    if model.verifier is None:
        own = row.scorer if model.default_verifier == "none" else None
        model = model.model_copy(update={"verifier": own or model.default_verifier})
    if not own_scores and model.verifier == "none" and not model.is_random:
        choose, instead = search.choose or row.choose, "--search majority"
        need = f"--search {search.search} needs scores" if row.needs_scores else None
        if need is None and choose != "majority" and search.n > 1:
            need = f"--search {search.search} needs scores to choose its answer (--choose {choose})"
            instead = "--choose majority"
        if need is not None:
            raise InputError(
                f"{need}, and --model {model.model} has no verifier: give {_WAYS}; "
                f"without one, {instead} takes the most frequent answer; {_PAGE}"
            )
    return settings.model_copy(update={"model": model, "search": search})


def vote_note(settings: Settings) -> str | None:
    """A line for the user where these settings, as given, mean a vote for want of a verifier."""
    if settings.search.search is not None or not _votes_by_default(settings.model):
        return None
    return (
        f"--model {settings.model.model} without a verifier: majority vote of "
        f"{settings.search.n} paths. For a search guided by scores: {_WAYS}; {_PAGE}"
    )


def _votes_by_default(model: ModelSettings) -> bool:
    return model.scorer == "none" and not model.is_random
