"""Products by oneDNN, whose rows have the same bits at any batch (docs/concepts/sameness.md)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""By the dtypes that are packed."""


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` for weights that do not stay; batch-invariant where oneDNN multiplies."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_multiply():
        return multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By oneDNN; the weight may be in its own order."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@cache
def _can_multiply() -> bool:
    x, weight = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    try:
        found = multiply(x, weight, None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return close(found, F.linear(x, weight))


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two products are the same but for their roundings."""
    most = TOLERANCE[found.dtype]
    return torch.allclose(found, expected, rtol=most, atol=most)
