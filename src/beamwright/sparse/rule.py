"""SparseRule: by which method `--sparse` selects tokens, and how many of them.

The table `METHODS` has one row per method. This module does not import torch, so settings are
read without loading torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from beamwright.errors import InputError
from beamwright.plan.sparse import selected_tokens
from beamwright.registry import LAB_HINT

# Tokens per page. A page has bounds on the scores of its keys, and lies within one segment.
#
# Quest uses coarse pages with bounds in full precision. Other methods use small pages with bounds
# in 4 bits. Both need the same number of bytes, but the bound on a small page is closer to each
# key's score.
PAGE, COARSE_PAGE = 4, 16

# Number of keys in the best pages that are scored per selected token, if pages are scored first.
CANDIDATES = 4

# Number of queries before the newest one from which the next query is predicted.
WINDOW = 16


@dataclass(frozen=True)
class SelectionMethod:
    """One way to select tokens.

    query: the query that keys are scored with. "own" is the token's own query. "ahead" is the query
        that the layer has if the layer before it adds nothing to the residual (InfiniGen's
        rehearsal). "predicted" is a query predicted from earlier tokens (AsyncSpade).
    scores: what is scored: all keys, pages by their bounds (Quest), or both: pages first, then the
        keys of the best pages.
    weigh: function that weighs earlier queries, for another reading of AsyncSpade's equations;
        None for `predict.weigh`.
    pack: number of consecutive layers whose tokens are selected and copied together, for predicted
        queries (AsyncSpade, section 4.3).
    share: number of consecutive layers that use the selection of the first of them (IndexShare).
    each: "kv" selects a set of tokens for each KV head, "query" for each query head.
    window: "step" predicts only from queries of the current step, "path" from earlier steps too.
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
        """Number of tokens per page, for methods that score pages."""
        return COARSE_PAGE if self.scores == "pages" else PAGE


# Methods by their names in `--sparse`. `exact` is AsyncSpade's Eq. 8. The lab adds two methods.
METHODS = {
    "exact": SelectionMethod(),
    "pages": SelectionMethod(scores="both"),
    "quest": SelectionMethod(scores="pages"),
    "ahead": SelectionMethod("ahead"),
    "ahead-pages": SelectionMethod("ahead", "both"),
    "asyncspade": SelectionMethod("predicted"),
}

_OF_LAB = ("asyncspade-printed", "asyncspade-ridge")
_OPTIONS = {"pack": r"[1-9]\d*", "share": r"[1-9]\d*", "each": "kv|query", "window": "step|path"}


@cache
def parse_method(text: str) -> SelectionMethod:
    """Parse `NAME` or `NAME,OPTION=VALUE,...`, with options of a `SelectionMethod`.

    Raises:
        InputError: for an unknown name or option, or an option without effect.
    """
    name, *options = text.split(",")
    if name in _OF_LAB and name not in METHODS:
        raise InputError(f"--sparse {name}: {LAB_HINT}")
    if name not in METHODS:
        raise InputError(f"--sparse {text!r}: expected off, auto, {', '.join(METHODS)}")
    given: dict[str, Any] = {}
    for each in options:
        key, _, value = each.partition("=")
        if key not in _OPTIONS or not re.fullmatch(_OPTIONS[key], value):
            known = "pack=LAYERS, share=LAYERS, each=kv|query, window=step|path"
            raise InputError(f"--sparse {text}: {each!r} is not one of {known}")
        given[key] = int(value) if value.isdigit() else value
    method = replace(METHODS[name], **given)
    if method.query != "predicted":
        for key in ("pack", "window"):
            if key in given:
                raise InputError(f"--sparse {text}: {key} works only with asyncspade")
    elif method.pack % method.share and method.pack > 1:
        raise InputError(f"--sparse {text}: pack must be a multiple of share")
    return replace(method, pack=max(method.pack, method.share))


@dataclass(frozen=True)
class SparseRule:
    """How tokens are selected, how many, and from which path length on.

    method: the value of `--sparse`.
    select: number of tokens for each KV head, or a share of the visible tokens (rounded up to a
        multiple of 16).
    first: rows that see at most this many tokens attend to all of them (AsyncSpade's theta).
    full_layers: number of first layers that attend to all tokens.
    correct: a head selects by its true query instead, if the cosine between its estimated and its
        true query is smaller (FreeKV). None: heads never do.
    """

    method: str
    select: int | float
    first: int = 4096
    full_layers: int = 0
    correct: float | None = None

    @property
    def how(self) -> SelectionMethod:
        """The `SelectionMethod` that `method` names."""
        return parse_method(self.method)

    def budget(self, visible: int) -> int:
        """Return how many of `visible` tokens a row selects, including the current token."""
        return selected_tokens(self.select, visible)

    def is_sparse(self, visible: int) -> bool:
        """Return True if a row that sees `visible` tokens attends to only some of them."""
        return visible > max(self.first, self.budget(visible))

    def pack_of(self, layer: int, num_layers: int) -> range:
        """Return the layers whose tokens are selected together with those of `layer`."""
        begin = layer - (layer - self.full_layers) % self.how.pack
        return range(begin, min(begin + self.how.pack, num_layers))

    def leader(self, layer: int) -> int:
        """Return the layer whose query selects the tokens that `layer` reads."""
        return layer - (layer - self.full_layers) % self.how.share
