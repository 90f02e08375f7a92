"""SparseRule: which tokens of a long path a row attends to. A row's own path decides it alone.

One row of a table per method; imports no torch, so that settings are read without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from beamwright.errors import InputError
from beamwright.plan.sparse import selected_tokens
from beamwright.registry import OF_LAB

PAGE, COARSE_PAGE = 4, 16
"""Tokens that share a bound of their scores; pages do not cross segments. Coarse ones, in whole
precision, are Quest's own; of the others a stored bound has 4 bits: as many bytes, and what they
promise of a single key is no longer that of fifteen strangers."""

CANDIDATES = 4
"""`pages`: times the budget whose keys are scored, chosen by their pages' bounds."""

WINDOW = 16
"""Queries before the newest that a prediction reads."""


@dataclass(frozen=True)
class Method:
    """query: what is scored with: the token's own, the layer's own from the residual of the layer
    before (ahead: InfiniGen's rehearsal), or one predicted from earlier tokens (AsyncSpade). weigh:
    weights of these by another reading of its equations than `predict.weigh`. scores: of every key,
    of pages (Quest), or of keys of the best pages.

    pack: layers whose selections are one piece of work and one copy, where earlier tokens tell all
    of them (AsyncSpade, section 4.3). share: layers that select what the first of them does
    (IndexShare). each: a set of tokens is a KV head's (kv), or every query head's (query). window:
    what predicts begins anew with a step, or goes on through the path.
    """

    query: Literal["own", "ahead", "predicted"] = "own"
    scores: Literal["keys", "pages", "both"] = "keys"
    weigh: Callable[[Any], Any] | None = None
    pack: int = 1
    share: int = 1
    each: Literal["kv", "query"] = "kv"
    window: Literal["step", "path"] = "step"

    @property
    def page(self) -> int:
        """Tokens of a page, where pages are scored."""
        return COARSE_PAGE if self.scores == "pages" else PAGE


METHODS = {
    "exact": Method(),
    "pages": Method(scores="both"),
    "quest": Method(scores="pages"),
    "ahead": Method("ahead"),
    "ahead-pages": Method("ahead", "both"),
    "asyncspade": Method("predicted"),
}
"""By the name that `--sparse` has. `exact` is AsyncSpade's Eq. 8. The lab adds two."""

_OF_LAB = ("asyncspade-printed", "asyncspade-ridge")
_OPTIONS = {"pack": r"[1-9]\d*", "share": r"[1-9]\d*", "each": "kv|query", "window": "step|path"}


@cache
def method_of(text: str) -> Method:
    """`NAME`, or `NAME,OPTION=VALUE,...` with options of a `Method`.

    Raises:
        InputError: for what is none, or does nothing.
    """
    name, *options = text.split(",")
    if name in _OF_LAB and name not in METHODS:
        raise InputError(f"--sparse {name}: {OF_LAB}")
    if name not in METHODS:
        raise InputError(f"--sparse {text!r}: expected off, auto, {', '.join(METHODS)}")
    given: dict[str, Any] = {}
    for each in options:
        key, _, value = each.partition("=")
        if key not in _OPTIONS or not re.fullmatch(_OPTIONS[key], value):
            known = "pack=LAYERS, share=LAYERS, each=kv|query, window=step|path"
            raise InputError(f"--sparse {text}: {each!r} is none of {known}")
        given[key] = int(value) if value.isdigit() else value
    method = replace(METHODS[name], **given)
    if method.query != "predicted":
        for key in ("pack", "window"):
            if key in given:
                raise InputError(f"--sparse {text}: {key} goes with a query that is predicted")
    elif method.pack % method.share and method.pack > 1:
        raise InputError(f"--sparse {text}: a pack is of whole shares")
    return replace(method, pack=max(method.pack, method.share))


@dataclass(frozen=True)
class SparseRule:
    """How many tokens a row selects, from when on, and how.

    select: tokens for each KV head, or a share of those that are visible (rounded up to 16).
    first: rows attend to everything until they see more tokens than this (AsyncSpade's theta).
    full_layers: the first layers attend to everything. correct: a head whose true query has a
    smaller cosine to the foreseen one selects by the true one (FreeKV); None: never.
    """

    method: str
    select: int | float
    first: int = 4096
    full_layers: int = 0
    correct: float | None = None

    @property
    def how(self) -> Method:
        return method_of(self.method)

    def budget(self, visible: int) -> int:
        """Tokens that a row selects of so many, the current one included."""
        return selected_tokens(self.select, visible)

    def is_sparse(self, visible: int) -> bool:
        """True if a row that sees so many tokens selects some of them."""
        return visible > max(self.first, self.budget(visible))

    def pack_of(self, layer: int, num_layers: int) -> range:
        """Layers whose selections are found together with this one's."""
        begin = layer - (layer - self.full_layers) % self.how.pack
        return range(begin, min(begin + self.how.pack, num_layers))

    def leader(self, layer: int) -> int:
        """The layer whose query selects for this one."""
        return layer - (layer - self.full_layers) % self.how.share
