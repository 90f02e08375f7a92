"""MXFP4: experts in pairs of 4-bit floats, 32 of them with a power of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from beamwright.models.formats.quantised import Form, Part, need

_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _read(part: Part, config: Mapping[str, Any]) -> torch.Tensor:
    """Values [experts, in, out] of blocks [experts, out, groups, 16], the low nibble first."""
    blocks, scales = need(part, "_blocks"), need(part, "_scales")
    if blocks.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        raise ValueError(f"scales {tuple(scales.shape)} of blocks {tuple(blocks.shape)}")
    levels = torch.cat([_LEVELS, -_LEVELS])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(levels[codes.long()], scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(-1, -2).contiguous()


FORM = Form(("_blocks",), ("_scales",), _read, weight="")
