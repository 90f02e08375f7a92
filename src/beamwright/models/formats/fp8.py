"""Weights of 8-bit floats with a scale per tensor, row or block, as several methods store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beamwright.models.formats.quantised import Form, Part, need


def scaled(weight: Tensor, scale: Tensor, block: list[int] | None) -> Tensor:
    """Values in float32. scale: of one number, [out, 1], or of blocks [rows, columns].

    Raises:
        ValueError: if the scales do not cover the weight.
    """
    scale = scale.float()
    if scale.numel() == 1:
        return weight.float() * scale.flatten()
    of_rows = tuple(scale.shape) == (len(weight), 1)
    rows, columns = (1, weight.shape[1]) if of_rows else block or (1, 1)
    if tuple(scale.shape) != (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)):
        raise ValueError(f"scales {tuple(scale.shape)} of a weight {tuple(weight.shape)}")
    wide = spread(scale, rows, len(weight), 0)
    return spread(wide, columns, weight.shape[1], 1).mul_(weight.float())


def spread(scales: Tensor, block: int, count: int, dim: int = 0) -> Tensor:
    """Each scale for so many values, `count` of them in all.

    Raises:
        ValueError: if there are more scales, or fewer.
    """
    if block < 1 or scales.shape[dim] != -(-count // block):
        raise ValueError(f"{scales.shape[dim]} scales of {count} values in blocks of {block}")
    return scales.repeat_interleave(min(block, count), dim).narrow(dim, 0, count)


def _read(part: Part, config: Mapping[str, Any]) -> Tensor:
    scale = part(".weight_scale_inv")
    scale = need(part, ".weight_scale") if scale is None else scale
    return scaled(need(part, ".weight"), scale, config.get("weight_block_size"))


FORM = Form((".weight",), (".weight_scale_inv", ".weight_scale", ".input_scale"), _read)
