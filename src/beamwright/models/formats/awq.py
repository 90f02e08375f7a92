"""AWQ, as its gemm kernels want it: eight columns to a word, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from beamwright.models.formats.quantised import Form, Groups, Part, need, unpacked

_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def _read(part: Part, config: Mapping[str, Any]) -> Groups:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"AWQ version {config['version']!r:.20} is not read; gemm is")
    scale = need(part, ".scales").float()
    codes, zeros = (_columns(need(part, f".{name}")) for name in ("qweight", "qzeros"))
    return Groups(4, codes.t().contiguous(), scale.t(), -(zeros * scale).t())


def _columns(words: Tensor) -> Tensor:
    columns: Tensor = unpacked(words, 4).unflatten(1, (-1, 8))[..., _ORDER]
    return columns.flatten(1)


FORM = Form((".qweight",), (".qzeros", ".scales"), _read)
