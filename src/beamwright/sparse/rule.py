"""SparseRule: which tokens of a long path a row attends to. A row's own path decides it alone.

AsyncSpade (sections 3 and 4.2) selects the tokens of step t + 1 while step t is computed, so it has
to predict the query. Every predictor is a function of one row's own queries: windows of
[..., W + 1, dim], the newest last, give [..., dim]. A window may be shorter while a row is young.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from beamwright.attention.partial import round_up

Predict = Callable[[torch.Tensor], torch.Tensor]

_LEAST_SCALE = 1e-20

RIDGE = 1e-2
"""Of the mean squared norm of the window's queries: the paper gives neither value nor scale."""


def last(queries: torch.Tensor) -> torch.Tensor:
    """The newest query itself."""
    return queries[..., -1, :]


def harmonic(queries: torch.Tensor) -> torch.Tensor:
    """The means of the newest k queries, averaged over k = 1 .. W, without any regression.

    That is what `asyncspade` comes to where its weights are uniform.
    """
    window = queries[..., -_width(queries) :, :]
    count = window.shape[-2]
    shares = (1 / torch.arange(1, count + 1, device=queries.device)).flip(0).cumsum(0) / count
    return torch.einsum("...wd,w->...d", window, shares.to(queries.dtype))


def asyncspade(queries: torch.Tensor) -> torch.Tensor:
    """Equations 2 to 5: for every k = 1 .. W the newest query is regressed on the k before it; the
    weights, softmax-normalised, are shifted by one token; the candidates are averaged.

    Eq. 2 has the softmax inside what is minimised, which has no closed form; section 4.2's text,
    ridge regression and then a softmax, is what is computed.
    """
    width = _width(queries)
    if queries.shape[-2] == 1:
        return last(queries)
    values = queries.float()
    past, newest = values[..., -width - 1 : -1, :].flip(-2), values[..., -1, :]  # newest first
    gram, eye = _ridge_gram(past)
    target = (past @ newest[..., None]).squeeze(-1)
    # One system for each k: the first k rows and columns; the rest is the identity, and 0.
    inside = torch.ones(width, width, device=queries.device, dtype=torch.bool).tril()
    both = inside[:, :, None] & inside[:, None, :]
    systems = torch.where(both, gram[..., None, :, :], eye)
    found = torch.linalg.solve(systems, torch.where(inside, target[..., None, :], 0.0))
    weights = torch.where(inside, found, -torch.inf).softmax(-1)
    shifted = values[..., -width:, :].flip(-2)
    return torch.einsum("...kw,...wd->...d", weights, shifted).div(width).to(queries.dtype)


def algorithm_one(queries: torch.Tensor) -> torch.Tensor:
    """Algorithm 1, line by line, on a window of W queries.

    Against Eq. 2 to 5: the regression has the sign -; there is one, whose weights are cut for every
    k; a second softmax gives weight to the zeros of the mask; and line 23's slice [-1-j : -1]
    leaves out the newest query, so that nothing is shifted.
    """
    width = queries.shape[-2]
    if width == 1:
        return last(queries)
    values = queries.float()
    past, newest = values[..., :-1, :], values[..., -1:, :]
    gram, _ = _ridge_gram(past)
    base = (-torch.linalg.solve(gram, past @ newest.transpose(-1, -2))).squeeze(-1).softmax(-1)
    mask = torch.ones(width, width, device=queries.device).tril()[:, :-1]
    weights = (base[..., None, :] * mask).softmax(-1)
    total = torch.zeros_like(values[..., 0, :])
    for j in range(1, width + 1):
        chosen = values[..., max(0, width - 1 - j) : -1, :]
        count = chosen.shape[-2]
        total = total + torch.einsum("...w,...wd->...d", weights[..., j - 1, :count], chosen)
    return (total / width).to(queries.dtype)


def _width(queries: torch.Tensor) -> int:
    return max(1, queries.shape[-2] - 1)


def _ridge_gram(past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of queries [..., count, dim] with each other and the ridge; and the identity."""
    gram = past @ past.transpose(-1, -2)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(past.shape[-2], device=past.device)
    return gram + RIDGE * scale.clamp_min(_LEAST_SCALE) * eye, eye


PREDICTORS: Mapping[str, Predict] = MappingProxyType(
    {
        "asyncspade": asyncspade,
        "algorithm-1": algorithm_one,
        "harmonic": harmonic,
        "last": last,
    }
)

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


@dataclass(frozen=True)
class Rotary:
    """Tables [context, head_dim] of a decoder, whose `sin` is negated in its first half; empty
    where positions are learned, and nothing is turned."""

    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim] at positions [rows]."""
        return self._turned(values, positions, 1.0)

    def turn_back(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `turn` makes these of."""
        if not self.cos.numel():
            return values
        scale = (self.cos[0] ** 2 + self.sin[0] ** 2)[0]
        return self._turned(values, positions, -1.0) / scale

    def _turned(self, values: torch.Tensor, positions: torch.Tensor, sign: float) -> torch.Tensor:
        if not self.cos.numel():
            return values
        # Rows that have stopped go on until others do, inside the context, as in the decoder.
        positions = positions.clamp(max=len(self.cos) - 1)
        cos, sin = self.cos[positions].unsqueeze(1), sign * self.sin[positions].unsqueeze(1)
        return values * cos + values.roll(values.shape[-1] // 2, -1) * sin
