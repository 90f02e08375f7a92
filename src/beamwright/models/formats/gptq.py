"""GPTQ of 2 to 8 bits, versions 1 and 2, with columns in order or not (`desc_act`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from beamwright.models.formats.quantised import Form, Groups, Part, need, unpacked


def _read(part: Part, config: Mapping[str, Any]) -> Groups | torch.Tensor:
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out]."""
    words, scale, groups = need(part, ".qweight"), need(part, ".scales").float(), part(".g_idx")
    # `dynamic` gives some projections other bits, which the shapes tell.
    bits = int(config["bits"]) if groups is None else 32 * len(words) // max(1, len(groups))
    codes = unpacked(words.t(), bits)
    # The first version stores zero points less one; what its kernels add is not cut to the bits.
    first = config.get("checkpoint_format", "gptq") != "gptq_v2"
    low = -(unpacked(need(part, ".qzeros"), bits).float() + first) * scale
    each = codes.shape[1] // max(1, len(scale))
    if groups is None or torch.equal(groups.long(), torch.arange(codes.shape[1]) // max(1, each)):
        return Groups(bits, codes, scale.t(), low.t())
    # Groups of columns that are apart: of these, each column gets its own scale.
    index = groups.long()
    return torch.addcmul(low.t()[:, index], codes.float(), scale.t()[:, index])


FORM = Form((".qweight",), (".qzeros", ".scales", ".g_idx"), _read)
