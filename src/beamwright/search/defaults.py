"""Fill in the default strategy and verifier, which depend on each other and on the model.

The bundled model gets the bundled verifier and beam search. Any other model has no verifier unless
the user names one, and its default strategy is a majority vote. Without a verifier, a strategy that
needs scores is an error. Models with random weights exist only for measurements: their own
log-probabilities are the scores, and no strategy is refused.
"""

from __future__ import annotations

import math
from typing import Any

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.search import DEFAULT_SEARCH, strategy_entry
from beamwright.sections import ModelSettings

_PAGE = "--verifier PATH (docs/guides/verifiers.md)"


def with_defaults(
    settings: Settings, *, own_scores: bool = False, own_strategy: bool = False
) -> Settings:
    """Return `settings` with every unset setting of the search filled in.

    In addition to `with_strategy_and_verifier`, this fills in the strategy's defaults for the
    choice of the answer, for its options and for the step limits.

    own_scores: see `with_strategy_and_verifier`.
    own_strategy: True if the caller passed a strategy object. `settings` then name beam search, and
        the strategy's options are not filled in.

    Raises:
        InputError: for settings that contradict each other, or a strategy without the scores that
            it needs.
    """
    settings = with_strategy_and_verifier(settings, own_scores=own_scores)
    row = strategy_entry(settings.search)
    search, step = settings.search, settings.step
    filled: dict[str, Any] = {"choose": search.choose or row.choose}
    if not own_strategy:
        policy = row.make_policy(search)
        filled |= {name: getattr(policy, name) for name in row.options if hasattr(policy, name)}
    search = search.model_copy(update=filled)
    if step.step_limits is None and step.step_tokens is None and row.step_limits is not None:
        cap = step.max_step_tokens if "max_step_tokens" in step.model_fields_set else math.inf
        limits = tuple(limit for limit in row.step_limits if limit < cap)
        if len(limits) < len(row.step_limits):
            limits = (*limits, step.max_step_tokens)
        step = step.model_copy(update={"step_limits": limits})
    return settings.model_copy(update={"search": search, "step": step})


def with_strategy_and_verifier(settings: Settings, *, own_scores: bool = False) -> Settings:
    """Return `settings` with a strategy and a verifier filled in.

    own_scores: True if the steps are scored by something that no setting names, such as a verifier
        function or a strategy object that the caller passed.

    Raises:
        InputError: for an unknown strategy, or for a strategy that needs scores without a verifier.
            The message lists the verifiers that the user can choose.
    """
    model, search = settings.model, settings.search
    if search.search is None:
        name = "majority" if not own_scores and _votes_by_default(model) else DEFAULT_SEARCH
        search = search.model_copy(update={"search": name})
    row = strategy_entry(search)
    if model.verifier is None:
        own = row.scorer if model.default_verifier == "none" else None
        model = model.model_copy(update={"verifier": own or model.default_verifier})
    if not own_scores and model.verifier == "none" and not model.is_random:
        choose, instead = search.choose or row.choose, "--search majority"
        need = f"--search {search.search} needs scores" if row.needs_scores else None
        if need is None and choose in ("best", "weighted") and search.n > 1:
            need = f"--search {search.search} needs scores to choose its answer (--choose {choose})"
            instead = "--choose majority"
        if need is not None:
            raise InputError(
                f"{need}, and --model {model.model} runs without a verifier. Name one with "
                f"{_PAGE}, or use {instead}, which takes the most frequent answer."
            )
    return settings.model_copy(update={"model": model, "search": search})


def vote_note(settings: Settings) -> str | None:
    """Return a note for the user if these settings vote only because no verifier is named.

    settings: the settings before defaults are filled in.
    """
    if settings.search.search is not None or not _votes_by_default(settings.model):
        return None
    return (
        f"--model {settings.model.model} runs without a verifier: the answer is a majority vote of "
        f"{settings.search.n} paths. Name a verifier to search by scores: {_PAGE}."
    )


def _votes_by_default(model: ModelSettings) -> bool:
    """Return True if the default strategy of this model is majority voting."""
    return model.verifier_or_default == "none" and not model.is_random
