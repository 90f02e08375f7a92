"""Strategies: pure policies over a scored tree. One file with one declaration each.

Knows no models, no KV, no schedules. Every module of this folder is imported, and with it what it
declares. LBS section 2.3; FlashTTS section 2.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from beamwright.search.declare import (
    DEFAULT_SEARCH,
    STRATEGIES,
    SearchPolicy,
    StrategyRow,
    round_rng,
    strategy,
)
from beamwright.sections import SearchSettings


def make_strategy(settings: SearchSettings) -> SearchPolicy:
    """The strategy that `--search` names, with its settings checked.

    Raises:
        InputError: for an unknown name, an option of another strategy, or settings that the
            strategy cannot work with.
    """
    return strategy_row(settings).policy(settings)


def strategy_row(settings: SearchSettings) -> StrategyRow:
    """The row that `--search` names, or of beam search.

    Raises:
        InputError: for an unknown name.
    """
    return STRATEGIES.find(settings.search or DEFAULT_SEARCH)


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "DEFAULT_SEARCH",
    "STRATEGIES",
    "SearchPolicy",
    "StrategyRow",
    "make_strategy",
    "round_rng",
    "strategy",
    "strategy_row",
]
