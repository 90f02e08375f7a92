"""Where the next query will point: predictors over a window of a row's last queries.

AsyncSpade (sections 3 and 4.2) selects the tokens of step t + 1 while step t is computed, so it has
to predict the query. Every predictor is a function of one row's own queries: windows of
[..., W + 1, dim], the newest last, give [..., dim]. A window may be shorter while a row is young.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

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


def asyncspade(queries: torch.Tensor, *, sign: float = 1.0, softmax: bool = True) -> torch.Tensor:
    """Equations 2 to 5: for every k = 1 .. W the newest query is regressed on the k before it; the
    weights, softmax-normalised, are shifted by one token; the candidates are averaged.

    Eq. 2 has the softmax inside what is minimised, which has no closed form; section 4.2's text,
    ridge regression and then a softmax, is what is computed. sign: -1 as Algorithm 1 has it.
    softmax: without it the ridge weights themselves.
    """
    width = _width(queries)
    if queries.shape[-2] == 1:
        return last(queries)
    values = queries.float()
    past, newest = values[..., -width - 1 : -1, :].flip(-2), values[..., -1, :]  # newest first
    gram = past @ past.transpose(-1, -2)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(width, device=queries.device)
    gram = gram + RIDGE * scale.clamp_min(_LEAST_SCALE) * eye
    target = (past @ newest[..., None]).squeeze(-1)
    # One system for each k: the first k rows and columns; the rest is the identity, and 0.
    inside = torch.ones(width, width, device=queries.device, dtype=torch.bool).tril()
    both = inside[:, :, None] & inside[:, None, :]
    systems = torch.where(both, gram[..., None, :, :], eye)
    found = torch.linalg.solve(systems, torch.where(inside, target[..., None, :], 0.0))
    if softmax:
        found = torch.where(inside, sign * found, -torch.inf).softmax(-1)
    shifted = values[..., -width:, :].flip(-2)
    return torch.einsum("...kw,...wd->...d", found, shifted).div(width).to(queries.dtype)


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
    gram = past @ past.transpose(-1, -2)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(width - 1, device=queries.device)
    gram = gram + RIDGE * scale.clamp_min(_LEAST_SCALE) * eye
    base = (-torch.linalg.solve(gram, past @ newest.transpose(-1, -2))).squeeze(-1).softmax(-1)
    mask = torch.ones(width, width, device=queries.device).tril()[:, :-1]
    weights = (base[..., None, :] * mask).softmax(-1)
    total = torch.zeros_like(values[..., 0, :])
    for j in range(1, width + 1):
        chosen = values[..., max(0, width - 1 - j) : -1, :]
        count = chosen.shape[-2]
        total = total + torch.einsum("...w,...wd->...d", weights[..., j - 1, :count], chosen)
    return (total / width).to(queries.dtype)


PREDICTORS: Mapping[str, Predict] = MappingProxyType(
    {
        "asyncspade": asyncspade,
        "algorithm-1": algorithm_one,
        "harmonic": harmonic,
        "last": last,
    }
)


def overlap(selected: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Eq. 1: of the tokens that a reference selects, the share that is selected, too.

    selected, reference: boolean masks [..., tokens]; returns [...].
    """
    both = (selected & reference).sum(-1)
    return both / reference.sum(-1).clamp_min(1)


def _width(queries: torch.Tensor) -> int:
    return max(1, queries.shape[-2] - 1)
