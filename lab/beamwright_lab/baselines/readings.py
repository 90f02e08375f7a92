"""Other readings of AsyncSpade's Eq. 2: `--sparse asyncspade-printed` and `asyncspade-ridge`.

printed: Eq. 2 as printed, with the softmax inside the minimised term, so it has no closed form.
ridge: ridge regression without a softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from beamwright.sparse.rule import METHODS, SelectionMethod

if TYPE_CHECKING:
    from torch import Tensor

_STEPS, _RATE = 80, 0.2


def weigh_as_printed(values: Tensor) -> Tensor:
    """Return weights [..., W, W] whose logits minimise Eq. 2 as printed, found with Adam.

    The number of steps is fixed, so that a row's result does not depend on other rows. float64,
    because Adam divides small gradients by their own size.
    """
    import torch

    from beamwright.sparse.predict import RIDGE, normal_equations, weight_mask

    gram, target, scale = normal_equations(values)
    gram, target = (gram / scale).double(), (target / scale[..., 0]).double()
    logits, inside = target.new_zeros(*target.shape, target.shape[-1]), weight_mask(gram)
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


def weigh_by_ridge(values: Tensor) -> Tensor:
    """Return the weights [..., W, W] of ridge regression without softmax."""
    from beamwright.sparse.predict import regress

    return regress(values)


METHODS["asyncspade-printed"] = SelectionMethod("predicted", weigh=weigh_as_printed)
METHODS["asyncspade-ridge"] = SelectionMethod("predicted", weigh=weigh_by_ridge)
