"""Predict a row's next query from its last queries (AsyncSpade, sections 3 and 4.2).

With the prediction, the tokens that token t + 1 attends to are selected while token t is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Penalty of the ridge regression, relative to the mean squared norm of the window's queries.
#
# The paper does not give the penalty.
RIDGE = 1e-2

_LEAST_SCALE = 1e-20


def normal_equations(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normal equations of a regression of the newest query on the W queries before it.

    values: queries, float32 [..., W + 1, dim], the newest last.

    Returns:
        The products [..., W, W] of the W queries, newest first; their products [..., W] with the
        newest query; and the scale [..., 1, 1] of the ridge penalty.
    """
    past, newest = values[..., :-1, :].flip(-2), values[..., -1, :]
    gram = past @ past.transpose(-1, -2)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(_LEAST_SCALE)
    return gram, (past @ newest[..., None]).squeeze(-1), scale


def regress(values: Tensor) -> Tensor:
    """Regress the newest query on the k queries before it, for every k = 1 .. W (ridge, Eq. 2).

    values: as in `normal_equations`. Return weights [..., W, W]: row k - 1 has the k weights, that
    of the newest query first, and zeros.
    """
    gram, target, scale = normal_equations(values)
    eye, inside = torch.eye(target.shape[-1], device=gram.device), weight_mask(gram)
    # One linear system for each k: the first k rows and columns of the normal equations. The other
    # rows are those of the identity with target 0, so their weights are 0.
    both = inside[:, :, None] & inside[:, None, :]
    systems = torch.where(both, (gram + RIDGE * scale * eye)[..., None, :, :], eye)
    weights: Tensor = torch.linalg.solve(systems, torch.where(inside, target[..., None, :], 0.0))
    return weights


def weight_mask(weights: Tensor) -> Tensor:
    """Return a mask [W, W] that is true for the weights that `regress` computes."""
    return torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()


def weigh(values: Tensor) -> Tensor:
    """Compute the weights of earlier queries by Equations 2 and 3, as section 4.2 describes them.

    This is `regress` followed by a softmax, which makes the weights nearly equal.
    """
    weights = regress(values)
    return torch.where(weight_mask(weights), weights, -torch.inf).softmax(-1)


def predict_query(queries: Tensor, weigh: Callable[[Tensor], Tensor] = weigh) -> Tensor:
    """Predict the next query [..., dim] by Equations 2 to 5.

    The weights for every k are applied to the queries one token later, and the W results are
    averaged.

    queries: a window [..., W + 1, dim], the newest last; W is smaller while a row has few tokens.
    """
    width = queries.shape[-2] - 1
    if not width:
        return queries[..., -1, :]
    values = queries.float()
    shifted = values[..., 1:, :].flip(-2)
    summed = torch.einsum("...kw,...wd->...d", weigh(values), shifted)
    return summed.div(width).to(queries.dtype)
