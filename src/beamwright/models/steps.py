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


def scan_step(
    state: Tensor,
    x: Tensor,
    rate: Tensor,
    enters: Tensor,
    leaves: Tensor,
    shift: Tensor,
    decay: Tensor,
    skip: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's step (arXiv 2405.21060): out [rows, heads, head_dim], and the next state.

    state: [rows, heads, head_dim, state_size]. x: [rows, heads, head_dim], rate (of time, before
    its shift and softplus): [rows, heads]; what enters the state (B) and how it leaves (C): [rows,
    groups, state_size]. shift, decay, skip: [heads].
    """
    wide = torch.promote_types(state.dtype, torch.float32)
    heads = x.shape[1] // enters.shape[1]
    enter, leave = (
        part.to(wide).repeat_interleave(heads, dim=1).unsqueeze(-2) for part in (enters, leaves)
    )
    step, fresh = F.softplus(rate.to(wide) + shift.to(wide)).unsqueeze(-1), x.to(wide)
    kept = state.to(wide) * (step * decay.to(wide)[:, None]).exp().unsqueeze(-1)
    kept = kept + (fresh * step).unsqueeze(-1) * enter
    found = (kept * leave).sum(-1) + fresh * skip.to(wide)[:, None]
    return found.to(x.dtype), kept.to(state.dtype)


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
