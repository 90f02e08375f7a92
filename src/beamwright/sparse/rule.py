"""SparseRule: which tokens of a long path a row attends to. A row's own path decides it alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from beamwright.attention.partial import round_up
from beamwright.sparse.predict import PREDICTORS

SINKS, RECENT = 4, 12
"""Tokens that are always selected, inside the budget: a path's first ones, and its newest."""

PAGE = 16
"""Tokens that share a bound of their scores (Quest); pages do not cross segments."""

CANDIDATES = 4
"""`pages`: times the budget whose keys are scored, chosen by their pages' bounds."""

_SHARE_MULTIPLE = 16


@dataclass(frozen=True)
class Method:
    """query: what is scored with: the token's own, none, the layer's own from the residual of the
    layer before, or predicted from earlier tokens (a name of `PREDICTORS`). scores: of every key,
    of pages, or of keys of the best pages. evicts: what was not selected once is not again, until
    the step ends.
    """

    query: str = "true"
    scores: Literal["keys", "pages", "both"] = "keys"
    evicts: bool = False

    @property
    def bounds_rest(self) -> bool:
        """True if the scores say how much attention is left out, or at most."""
        return self.query == "true" and not self.evicts


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "exact": Method(),
        "pages": Method(scores="both"),
        "quest": Method(scores="pages"),
        "tova": Method(evicts=True),
        "ahead": Method(query="ahead"),
        "ahead-pages": Method(query="ahead", scores="both"),
        "window": Method(query="none"),
        **{name: Method(query=name) for name in PREDICTORS},
    }
)
"""By the name that `--sparse` has. `exact` is AsyncSpade's Eq. 8, `tova` evicts for good."""


@dataclass(frozen=True)
class SparseRule:
    """How many tokens a row selects, from when on, and how.

    select: tokens for each KV head, or a share of those that are visible (rounded up to 16).
    first: rows attend to everything until they see more tokens than this (AsyncSpade's theta).
    lag: tokens from the newest query that a prediction knows to the one that it is for.
    window: queries that a prediction reads. frame: of queries, behind or before rotary positions.
    full_layers: the first layers attend to everything. correct: a head whose true query has a
    smaller cosine to the predicted one selects by the true one (FreeKV); None: never.
    late: a selection that is not there yet is waited for, or the token before's is read once more
    (AsyncSpade; then timing chooses tokens).
    """

    method: str
    select: int | float
    first: int = 4096
    lag: int = 1
    window: int = 16
    frame: Literal["post", "pre"] = "post"
    full_layers: int = 0
    correct: float | None = None
    late: Literal["wait", "previous"] = "wait"

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    def budget(self, visible: int) -> int:
        """Tokens that a row selects of so many, the current one included."""
        if isinstance(self.select, int):
            return max(self.select, SINKS + RECENT)
        share = round_up(math.ceil(self.select * visible), _SHARE_MULTIPLE)
        return max(share, SINKS + RECENT)

    def is_sparse(self, visible: int) -> bool:
        """True if a row that sees so many tokens selects some of them."""
        return visible > max(self.first, self.budget(visible))
