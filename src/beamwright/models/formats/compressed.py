"""compressed-tensors: pack-quantized, int-quantized and float-quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from beamwright.models.formats.fp8 import scaled
from beamwright.models.formats.quantised import Form, Groups, Part, need, unpacked


def _read(part: Part, config: Mapping[str, Any]) -> Groups | Tensor:
    """Codes are signed; packed ones have half their range added."""
    scale, packed = need(part, ".weight_scale"), part(".weight_packed")
    if packed is None:
        return _unpacked(need(part, ".weight"), scale, part(".weight_zero_point"), config)
    rows, columns = need(part, ".weight_shape").tolist()
    bits = _weights(config)["num_bits"]
    if part(".weight_g_idx") is not None:
        raise ValueError("groups of columns that are apart (weight_g_idx) are not read")
    codes = unpacked(packed, bits)[:, :columns]
    if tuple(codes.shape) != (rows, columns):
        raise ValueError(f"weight_packed {tuple(packed.shape)} of {rows} x {columns}")
    zero, scale = torch.tensor(float(1 << bits - 1)), scale.float()
    if (zeros := part(".weight_zero_point")) is not None:
        zero = unpacked(zeros.t(), bits).t()[:rows].float()
    return Groups(bits, codes.contiguous(), scale, -zero * scale)


def _unpacked(
    weight: Tensor, scale: Tensor, zero: Tensor | None, config: Mapping[str, Any]
) -> Groups | Tensor:
    if weight.dtype != torch.int8:
        return scaled(weight, scale, _weights(config).get("block_structure"))
    scale = scale.float().reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    scale = scale.expand(len(weight), -1)
    zeros = 0 if zero is None else zero.float().view_as(scale)
    return Groups(8, weight.view(torch.uint8) ^ 128, scale, -(zeros + 128) * scale)


def _weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the first group of projections is quantised; others may not differ.

    Raises:
        ValueError: if they do.
    """
    found = [group["weights"] for group in config["config_groups"].values()]
    if any(each.get("num_bits") != found[0].get("num_bits") for each in found):
        raise ValueError("groups of projections with different bits are not read")
    weights: Mapping[str, Any] = found[0]
    return weights


_BESIDE = ("scale", "zero_point", "shape", "g_idx")
FORM = Form(
    (".weight_packed", ".weight"),
    (*(f".weight_{name}" for name in _BESIDE), ".input_scale", ".input_zero_point"),
    _read,
)
