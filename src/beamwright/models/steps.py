"""One token of recurrent layers: a family's own forward, with steps of ours in it.

What is a family's own runs as it is: a copy of a module's forward finds other functions where it
looks for those that make one token's step. They write into a state's tensor, or get what says where
states lie in blocks in place of it (`kv.states.Placed`), and then nothing is copied. Knows no
family's name: a module whose forward has such steps for all that it keeps is tried on random rows.

The steps here are plain torch, and what the kernels of `step_kernels` compute. Each number of a
state is read and written where it is, with no copy as large beside it, which is what modules' own
steps spend their time on. In float32 (or wider) however a state is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.kv.states import GOES_ON, Placed, StateBlocks
from beamwright.models.recurrent import Recurrent, StateCache, cache_of, near

_Step = Callable[[Tensor, StateCache], Tensor]
_ROWS = 3
_NEAR = 0.02
"""How far from the module's own a value may be, of the largest: both round to half precision."""


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


_PLAIN = SimpleNamespace(
    convolution_step=convolution_step, delta_step=delta_step, scan_step=scan_step
)


# --- in a module's forward -------------------------------------------------------------------


def _by(state: Tensor | Placed) -> Any:
    """Who steps on it."""
    if not isinstance(state, Placed):
        return _PLAIN
    from beamwright.models import step_kernels  # noqa: PLC0415 (loads Triton)

    return step_kernels


def _convolve(
    x: Tensor, state: Any, weight: Tensor, bias: Tensor | None = None, activation: Any = None
) -> Tensor:
    """Inputs and outputs [rows, channels, 1]."""
    silu = activation in ("silu", "swish")
    assert silu or activation is None
    found: Tensor = _by(state).convolution_step(state, x[..., 0], weight, bias, silu=silu)
    return found.unsqueeze(-1)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Any,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Any]:
    """All [rows, 1 token, heads, ...]."""
    inputs = (each[:, 0] for each in (query, key, value, g, beta))
    normed = use_qk_l2norm_in_kernel
    found: Tensor = _by(initial_state).delta_step(initial_state, *inputs, normed=normed)
    return found.unsqueeze(1), initial_state


def _scan(
    state: Any,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """What is one number for a head comes expanded over its values."""
    assert dt_softplus
    own = dt_bias[:, 0], A[:, 0, 0], D[:, 0]
    found: Tensor = _by(state).scan_step(state, x, dt[..., 0], B, C, *own)
    return found if z is None else found * F.silu(z)


_STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_update": ("conv", _convolve),
    "torch_recurrent_gated_delta_rule": ("recurrent", _delta_rule),
    "mamba2_selective_state_update": ("recurrent", _scan),
}
"""What it steps on, by the name that modules call it by."""


def put_in(recurrent: Recurrent, width: int, device: torch.device, *, in_blocks: bool) -> None:
    """Have it step by these, where they do what its module does; in_blocks: by kernels, too."""
    step = _step_of(recurrent.module, set(recurrent.parts))
    if step is not None and _agrees(recurrent, step, width, device, in_blocks=False):
        recurrent.step = step
        if in_blocks and _agrees(recurrent, step, width, device, in_blocks=True):
            recurrent.in_place = step


def _step_of(module: torch.nn.Module, kinds: set[str]) -> _Step | None:
    """The module's forward with steps of ours; None if it steps on any part by other means."""
    plain = inspect.unwrap(type(module).forward)
    steps = {name: step for name, step in _STEPS.items() if name in plain.__code__.co_names}
    if {kind for kind, _ in steps.values()} != kinds:
        return None
    known = {**plain.__globals__, **{name: step for name, (_, step) in steps.items()}}
    code, defaults, closure = plain.__code__, plain.__defaults__, plain.__closure__
    own = FunctionType(code, known, plain.__name__, defaults, closure)
    own.__kwdefaults__ = plain.__kwdefaults__
    name = cache_of(module) or ""
    return lambda hidden, cache: own(module, hidden, **{name: cache})


@torch.inference_mode()
def _agrees(
    recurrent: Recurrent, step: _Step, width: int, device: torch.device, *, in_blocks: bool
) -> bool:
    """Whether a step of random rows behind random states is the module's own."""
    hidden, states = recurrent.drawn(_ROWS, 1, width, device)
    own = StateCache({kind: state.clone() for kind, state in states.items()})
    expected = recurrent.plain(hidden, own)
    try:
        found = step(hidden, StateCache(_placed(states) if in_blocks else dict(states)))
    except (AssertionError, TypeError):  # it is called with what our steps do not know
        return False
    pairs = [(found, expected), *((states[kind], own.parts[kind]) for kind in states)]
    return near(pairs, _NEAR)


def _placed(states: Mapping[str, Tensor]) -> dict[str, Placed]:
    """These tensors as blocks: one holds a row's part."""
    device = next(iter(states.values())).device
    table = torch.arange(_ROWS, dtype=torch.int32, device=device)[:, None]
    ways = torch.full((_ROWS,), GOES_ON, dtype=torch.int32, device=device)
    return {
        kind: Placed(
            StateBlocks(part.view(torch.uint8).flatten(1), table, table, ways), 0, part.dtype
        )
        for kind, part in states.items()
    }
