"""One token of recurrent layers, in plain torch: what the kernels of `step_kernels` compute.

States are in float32 (or wider) while they are computed, however they are kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_step(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    normed: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464): out [rows, heads, value_dim], and the next state.

    state: [rows, heads, key_dim, value_dim]. query, key: [rows, key_heads, key_dim]; normed: to
    length 1, first. value: [rows, heads, value_dim]. decay (a logarithm), beta: [rows, heads].
    """
    wide = torch.promote_types(state.dtype, torch.float32)
    heads = value.shape[1] // key.shape[1]
    asks, keys = (x.to(wide) for x in (query, key))
    if normed:
        asks, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (asks, keys))
    asks, keys = (x.repeat_interleave(heads, dim=1).unsqueeze(-1) for x in (asks, keys))
    kept = state.to(wide) * decay.to(wide).exp()[..., None, None]
    known = (kept * keys).sum(-2)
    fresh = (value.to(wide) - known) * beta.to(wide).unsqueeze(-1)
    kept = kept + keys * fresh.unsqueeze(-2)
    found = (kept * asks).sum(-2) * key.shape[2] ** -0.5
    return found.to(value.dtype), kept.to(state.dtype)


def convolution_step(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """A causal convolution's newest output [rows, channels], and the next state.

    state: the last inputs of a channel, [rows, channels, taps]; weight: [channels, taps].
    """
    moved = torch.cat([state[..., 1:], x.to(state.dtype).unsqueeze(-1)], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    found = (moved.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        found = found + bias.to(wide)
    found = found.to(x.dtype)
    return F.silu(found) if silu else found, moved
