"""bitsandbytes: blocks of 4-bit levels from a table (nf4, fp4), or int8 with a scale per row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from beamwright.models.formats.fp8 import spread
from beamwright.models.formats.quantised import Form, Groups, Part, need

_STATES = [f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]


def _read(part: Part, config: Mapping[str, Any]) -> Groups | torch.Tensor:
    weight = need(part, ".weight")
    if weight.dtype == torch.int8:
        scale = need(part, ".SCB").float()[:, None] / 127
        return Groups(8, weight.view(torch.uint8) ^ 128, scale, -128 * scale)
    written = next((found for name in _STATES if (found := part(name)) is not None), None)
    if written is None:
        raise ValueError("there is no quant_state")
    state = json.loads(bytes(written.tolist()))
    most = need(part, ".weight.absmax")
    if (of_most := part(".weight.nested_absmax")) is not None:  # scales that are quantised, too
        levels = need(part, ".weight.nested_quant_map")[most.long()]
        each = spread(of_most, int(state["nested_blocksize"]), len(levels))
        most = levels * each + float(state["nested_offset"])
    codes = torch.stack([weight.flatten() >> 4, weight.flatten() & 15], dim=-1)
    values = need(part, ".weight.quant_map").float()[codes.long()].flatten()
    return (values * spread(most.float(), int(state["blocksize"]), len(values))).view(
        state["shape"]
    )


_NESTED = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
FORM = Form(
    (".weight",),
    (*(f".weight.{name}" for name in _NESTED), *_STATES, ".SCB", ".weight_format"),
    _read,
)
