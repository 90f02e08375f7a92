"""A row's next query, predicted from its last ones (AsyncSpade, sections 3 and 4.2).

Tokens of step t + 1 are selected while step t is computed, when its query is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RIDGE = 1e-2
"""Of the mean squared norm of the window's queries: the paper gives neither value nor scale."""

_LEAST_SCALE = 1e-20


def normal_equations(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the newest query on the W before it, float32 [..., W + 1, dim], the newest last.

    Returns products [..., W, W] of the past, the newest of them first, and with the newest query
    [..., W]; and their scale [..., 1, 1].
    """
    past, newest = values[..., :-1, :].flip(-2), values[..., -1, :]
    gram = past @ past.transpose(-1, -2)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(_LEAST_SCALE)
    return gram, (past @ newest[..., None]).squeeze(-1), scale


def regress(values: Tensor) -> Tensor:
    """Ridge regression (Eq. 2): for every k = 1 .. W of the newest query on the k before it.

    Returns weights [..., W, W], a row for each k, the newest of the past first.
    """
    gram, target, scale = normal_equations(values)
    eye, inside = torch.eye(target.shape[-1], device=gram.device), inside_of(gram)
    # One system for each k: the first k rows and columns; the rest is the identity, and 0.
    both = inside[:, :, None] & inside[:, None, :]
    systems = torch.where(both, (gram + RIDGE * scale * eye)[..., None, :, :], eye)
    found: Tensor = torch.linalg.solve(systems, torch.where(inside, target[..., None, :], 0.0))
    return found


def inside_of(weights: Tensor) -> Tensor:
    """A mask [W, W] of the k queries that row k weighs."""
    return torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()


def weigh(values: Tensor) -> Tensor:
    """Equations 2 and 3 as section 4.2 says them: `regress`, and then a softmax, nearly flat."""
    found = regress(values)
    return torch.where(inside_of(found), found, -torch.inf).softmax(-1)


def predict(queries: Tensor, weigh: Callable[[Tensor], Tensor] = weigh) -> Tensor:
    """Equations 2 to 5: the weights of every k, shifted by one token; candidates are averaged.

    queries: a window [..., W + 1, dim], the newest last, shorter while a row is young. Returns
    [..., dim].
    """
    width = queries.shape[-2] - 1
    if not width:
        return queries[..., -1, :]
    values = queries.float()
    shifted = values[..., 1:, :].flip(-2)
    found = torch.einsum("...kw,...wd->...d", weigh(values), shifted)
    return found.div(width).to(queries.dtype)
