"""SparseRule: which tokens of a long path a row attends to. A row's own path decides it alone.

AsyncSpade (sections 3 and 4.2) selects the tokens of step t + 1 while step t is computed, so it has
to predict the query, from one row's own queries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import torch

from beamwright.errors import InputError
from beamwright.plan.sparse import selected_tokens

PAGE, COARSE_PAGE = 4, 16
"""Tokens that share a bound of their scores; pages do not cross segments. Coarse ones, in whole
precision, are Quest's own; of the others a stored bound has 4 bits: as many bytes, and what they
promise of a single key is no longer that of fifteen strangers."""

CANDIDATES = 4
"""`pages`: times the budget whose keys are scored, chosen by their pages' bounds."""

WINDOW = 16
"""Queries before the newest that a prediction reads."""

RIDGE = 1e-2
"""Of the mean squared norm of the window's queries: the paper gives neither value nor scale."""

Reading = Literal["text", "printed", "ridge"]

_LEAST_SCALE = 1e-20
_STEPS, _RATE = 80, 0.2


def regressed(values: torch.Tensor, reading: Reading = "text") -> torch.Tensor:
    """Equations 2 and 3: for every k = 1 .. W the newest query is regressed on the k before it.

    The paper can be read in three ways. text: ridge regression and then a softmax, as section 4.2
    says; its weights are nearly flat. printed: Eq. 2, which has the softmax inside what is
    minimised and so no closed form. ridge: without any softmax.

    values: float32 [..., W + 1, dim], the newest last. Returns weights [..., W, W], a row for each
    k, the newest of the past first.
    """
    past, newest = values[..., :-1, :].flip(-2), values[..., -1, :]
    width = past.shape[-2]
    gram, eye = past @ past.transpose(-1, -2), torch.eye(width, device=past.device)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(_LEAST_SCALE)
    target = (past @ newest[..., None]).squeeze(-1)
    inside = torch.ones(width, width, device=past.device, dtype=torch.bool).tril()
    if reading == "printed":
        return _descended(gram / scale, target / scale[..., 0], inside)
    # One system for each k: the first k rows and columns; the rest is the identity, and 0.
    both = inside[:, :, None] & inside[:, None, :]
    systems = torch.where(both, (gram + RIDGE * scale * eye)[..., None, :, :], eye)
    found = torch.linalg.solve(systems, torch.where(inside, target[..., None, :], 0.0))
    return found if reading == "ridge" else torch.where(inside, found, -torch.inf).softmax(-1)


def _descended(gram: torch.Tensor, target: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Weights [..., W, W] whose logits minimise Eq. 2, by Adam: a fixed number of steps, so that
    every row's bits are its own. In float64: what is nearly still is divided by how still it is."""
    gram, target = gram.double(), target.double()
    logits = target.new_zeros(*target.shape, target.shape[-1])
    mean, square = torch.zeros_like(logits), torch.zeros_like(logits)
    for step in range(1, _STEPS + 1):
        weights = torch.where(inside, logits, -torch.inf).softmax(-1)
        slope = weights @ gram - target[..., None, :]
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True)) + RIDGE * logits
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope * slope
        away = (square / (1 - 0.99**step)).sqrt() + 1e-8
        logits = logits - _RATE * (mean / (1 - 0.9**step)) / away
    return torch.where(inside, logits, -torch.inf).softmax(-1).float()


def asyncspade(queries: torch.Tensor, reading: Reading = "text") -> torch.Tensor:
    """Equations 2 to 5: the weights of every k (`regressed`), shifted by one token; the candidates
    are averaged.

    queries: a window [..., W + 1, dim], the newest last, shorter while a row is young. Returns
    [..., dim].
    """
    width = queries.shape[-2] - 1
    if not width:
        return queries[..., -1, :]
    values = queries.float()
    shifted = values[..., 1:, :].flip(-2)
    found = torch.einsum("...kw,...wd->...d", regressed(values, reading), shifted)
    return found.div(width).to(queries.dtype)


@dataclass(frozen=True)
class Method:
    """query: what is scored with: the token's own, the layer's own from the residual of the layer
    before (ahead: InfiniGen's rehearsal), or one predicted from earlier tokens, by a reading of
    AsyncSpade's equations. scores: of every key, of pages (Quest), or of keys of the best pages.

    pack: layers whose selections are one piece of work and one copy, where earlier tokens tell all
    of them (AsyncSpade, section 4.3). share: layers that select what the first of them does
    (IndexShare). each: a set of tokens is a KV head's (kv), or every query head's (query). window:
    what predicts begins anew with a step, or goes on through the path.
    """

    query: Literal["own", "ahead", "predicted"] = "own"
    scores: Literal["keys", "pages", "both"] = "keys"
    reading: Reading = "text"
    pack: int = 1
    share: int = 1
    each: Literal["kv", "query"] = "kv"
    window: Literal["step", "path"] = "step"

    @property
    def page(self) -> int:
        """Tokens of a page, where pages are scored."""
        return COARSE_PAGE if self.scores == "pages" else PAGE


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "exact": Method(),
        "pages": Method(scores="both"),
        "quest": Method(scores="pages"),
        "ahead": Method("ahead"),
        "ahead-pages": Method("ahead", "both"),
        "asyncspade": Method("predicted"),
        "asyncspade-printed": Method("predicted", reading="printed"),
        "asyncspade-ridge": Method("predicted", reading="ridge"),
    }
)
"""By the name that `--sparse` has. `exact` is AsyncSpade's Eq. 8."""

_OPTIONS = {"pack": r"[1-9]\d*", "share": r"[1-9]\d*", "each": "kv|query", "window": "step|path"}


@cache
def method_of(text: str) -> Method:
    """`NAME`, or `NAME,OPTION=VALUE,...` with options of a `Method`.

    Raises:
        InputError: for what is none, or does nothing.
    """
    name, *options = text.split(",")
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
