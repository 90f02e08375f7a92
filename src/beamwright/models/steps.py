"""One token of recurrent layers, in plain torch: what the kernels of `step_kernels` compute.

Each number of a state is read and written where it is, with no copy as large beside it, which is
what modules' own steps spend their time on. In float32 (or wider) however a state is kept.
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
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464): out [rows, heads, value_dim].

    state: [rows, heads, key_dim, value_dim], which becomes the next one. query, key: [rows,
    key_heads, key_dim]; normed: to length 1, first. value: [rows, heads, value_dim]. decay (a
    logarithm), beta: [rows, heads].
    """
    kept = _wide(state)
    asks, keys = (x.to(kept.dtype) for x in (query, key))
    if normed:
        asks, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (asks, keys))
    heads = value.shape[1] // key.shape[1]
    asks, keys = (x.repeat_interleave(heads, dim=1) for x in (asks, keys))
    held, asked = torch.matmul(torch.stack([keys, asks], dim=2), kept).unbind(2)  # read once
    gate, rate = (x.to(kept.dtype).unsqueeze(-1) for x in (decay, beta))
    gate = gate.exp()
    fresh = (value.to(kept.dtype) - held * gate) * rate
    kept.mul_(gate.unsqueeze(-1)).addcmul_(keys.unsqueeze(-1), fresh.unsqueeze(-2))
    found: Tensor = asked * gate + (asks * keys).sum(-1, keepdim=True) * fresh
    _put(kept, state)
    return found.mul(key.shape[2] ** -0.5).to(value.dtype)


def scan_step(
    state: Tensor,
    x: Tensor,
    rate: Tensor,
    enters: Tensor,
    leaves: Tensor,
    shift: Tensor,
    decay: Tensor,
    skip: Tensor,
) -> Tensor:
    """Mamba-2's step (arXiv 2405.21060): out [rows, heads, head_dim].

    state: [rows, heads, head_dim, state_size], which becomes the next one. x: [rows, heads,
    head_dim]; rate (of time, before its shift and softplus): [rows, heads]; what enters the state
    (B) and how it leaves (C): [rows, groups, state_size]. shift, decay, skip: [heads].
    """
    kept = _wide(state)
    heads = x.shape[1] // enters.shape[1]
    enter, leave = (
        part.to(kept.dtype).repeat_interleave(heads, dim=1) for part in (enters, leaves)
    )
    step = F.softplus(rate.to(kept.dtype) + shift.to(kept.dtype)).unsqueeze(-1)
    fresh = x.to(kept.dtype)
    kept.mul_((step * decay.to(kept.dtype)[:, None]).exp().unsqueeze(-1))
    kept.addcmul_((fresh * step).unsqueeze(-1), enter.unsqueeze(-2))
    found = torch.bmm(kept.flatten(0, 1), leave.flatten(0, 1).unsqueeze(-1)).view(x.shape)
    _put(kept, state)
    return (found + fresh * skip.to(kept.dtype)[:, None]).to(x.dtype)


def convolution_step(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """A causal convolution's newest output [rows, channels].

    state: the last inputs of a channel, [rows, channels, taps], which become the next ones. x:
    [rows, channels]; weight: [channels, taps].
    """
    state.copy_(torch.cat([state[..., 1:], x.to(state.dtype).unsqueeze(-1)], dim=-1))
    wide = torch.promote_types(x.dtype, torch.float32)
    found = (state.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        found = found + bias.to(wide)
    found = found.to(x.dtype)
    return F.silu(found) if silu else found


def _wide(state: Tensor) -> Tensor:
    """What is computed on: the state itself, where it is wide enough."""
    return state.to(torch.promote_types(state.dtype, torch.float32))


def _put(kept: Tensor, state: Tensor) -> None:
    if kept is not state:
        state.copy_(kept)
