"""Strategies: pure policies over a scored tree. One file and one table row each.

Knows no models, no KV, no schedules. LBS section 2.3; FACTS 3.
"""

from __future__ import annotations

from collections.abc import Callable

from beamwright.config import SearchSettings
from beamwright.errors import InputError
from beamwright.protocols import Strategy
from beamwright.search.beam import BeamSearch
from beamwright.search.best_of_n import BestOfN

STRATEGIES: dict[str, Callable[[SearchSettings], Strategy]] = {
    "best-of-n": BestOfN,
    "beam": BeamSearch,
}


def make_strategy(settings: SearchSettings) -> Strategy:
    """The strategy that `--search` names, with its settings checked.

    Raises:
        InputError: for an unknown name, or settings that the strategy cannot work with.
    """
    if settings.search not in STRATEGIES:
        raise InputError(f"--search {settings.search!r}: choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[settings.search](settings)


__all__ = ["STRATEGIES", "BeamSearch", "BestOfN", "make_strategy"]
