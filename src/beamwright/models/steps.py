"""Faster one-token passes for recurrent layers of `transformers`: states are updated in place.

In this module a *step* is the recurrence's update by one token, not a reasoning step.

The functions with which a module's forward updates its states for one token are replaced. To this
end a copy of `forward` gets other globals, in which the names of these functions are bound to the
functions here. All other code of the family runs unchanged. A step updates a state tensor in place.
If it gets the state's place in the pool instead (`kv.states.StatePlace`), it updates the blocks.

No family's name is known here. A module qualifies if its forward calls such a function for each
part of its state, and if results on random rows agree with the module's own.

The steps here are plain torch, and specify what the kernels of `step_kernels` compute. The modules'
own functions spend most of their time on copies as large as the state. Steps compute in float32 or
wider, whatever dtype stores the state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.kv.states import GOES_ON, StateBlocks, StatePlace
from beamwright.models.recurrent_layers import Recurrent, StateCache, are_near, cache_argument

_Step = Callable[[Tensor, StateCache], Tensor]
_ROWS = 3  # rows of a trial
# Largest difference from the module's own result, as a share of the largest value.
#
# Both results round to half precision, so they need not be equal.
_NEAR = 0.02


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
    """Apply the gated delta rule (arXiv 2412.06464), and return [rows, heads, value_dim].

    state: [rows, heads, key_dim, value_dim], updated in place.
    query, key: [rows, key_heads, key_dim].
    value: [rows, heads, value_dim].
    decay (a logarithm), beta: [rows, heads].
    normed: first scale query and key to length 1.
    """
    kept = _widened(state)
    asks, keys = (x.to(kept.dtype) for x in (query, key))
    if normed:
        asks, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (asks, keys))
    heads = value.shape[1] // key.shape[1]
    asks, keys = (x.repeat_interleave(heads, dim=1) for x in (asks, keys))
    # One product for keys and queries reads the state once.
    held, asked = torch.matmul(torch.stack([keys, asks], dim=2), kept).unbind(2)
    gate, rate = (x.to(kept.dtype).unsqueeze(-1) for x in (decay, beta))
    gate = gate.exp()
    fresh = (value.to(kept.dtype) - held * gate) * rate
    kept.mul_(gate.unsqueeze(-1)).addcmul_(keys.unsqueeze(-1), fresh.unsqueeze(-2))
    result: Tensor = asked * gate + (asks * keys).sum(-1, keepdim=True) * fresh
    _write_back(kept, state)
    return result.mul(key.shape[2] ** -0.5).to(value.dtype)


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
    """Compute Mamba-2's step (arXiv 2405.21060), and return [rows, heads, head_dim].

    state: [rows, heads, head_dim, state_size], updated in place.
    x: [rows, heads, head_dim].
    rate: the time step [rows, heads], before `shift` is added and softplus is applied.
    enters, leaves: the paper's B and C [rows, groups, state_size].
    shift, decay, skip: [heads].
    """
    kept = _widened(state)
    heads = x.shape[1] // enters.shape[1]
    enter, leave = (
        part.to(kept.dtype).repeat_interleave(heads, dim=1) for part in (enters, leaves)
    )
    step = F.softplus(rate.to(kept.dtype) + shift.to(kept.dtype)).unsqueeze(-1)
    fresh = x.to(kept.dtype)
    kept.mul_((step * decay.to(kept.dtype)[:, None]).exp().unsqueeze(-1))
    kept.addcmul_((fresh * step).unsqueeze(-1), enter.unsqueeze(-2))
    result = torch.bmm(kept.flatten(0, 1), leave.flatten(0, 1).unsqueeze(-1)).view(x.shape)
    _write_back(kept, state)
    return (result + fresh * skip.to(kept.dtype)[:, None]).to(x.dtype)


def convolution_step(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """Return a causal convolution's newest output [rows, channels].

    state: the last inputs of each channel [rows, channels, taps], updated in place.
    x: the new inputs [rows, channels].
    weight: [channels, taps].
    """
    state.copy_(torch.cat([state[..., 1:], x.to(state.dtype).unsqueeze(-1)], dim=-1))
    wide = torch.promote_types(x.dtype, torch.float32)
    result = (state.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        result = result + bias.to(wide)
    result = result.to(x.dtype)
    return F.silu(result) if silu else result


def _widened(state: Tensor) -> Tensor:
    """Return the state in float32 or wider: itself if its dtype is wide enough, else a copy."""
    return state.to(torch.promote_types(state.dtype, torch.float32))


def _write_back(kept: Tensor, state: Tensor) -> None:
    if kept is not state:
        state.copy_(kept)


_PLAIN = SimpleNamespace(
    convolution_step=convolution_step, delta_step=delta_step, scan_step=scan_step
)


# --- in a module's forward -------------------------------------------------------------------


def _steps_for(state: Tensor | StatePlace) -> Any:
    """Return an object with the three step functions for a state: in torch, or as kernels."""
    if not isinstance(state, StatePlace):
        return _PLAIN
    from beamwright.models import step_kernels  # noqa: PLC0415 (loads Triton)

    return step_kernels


def _convolve(
    x: Tensor, state: Any, weight: Tensor, bias: Tensor | None = None, activation: Any = None
) -> Tensor:
    """Stand in for `causal_conv1d_update`. x and the result are [rows, channels, 1]."""
    silu = activation in ("silu", "swish")
    assert silu or activation is None
    result: Tensor = _steps_for(state).convolution_step(state, x[..., 0], weight, bias, silu=silu)
    return result.unsqueeze(-1)


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
    """Stand in for `torch_recurrent_gated_delta_rule`.

    Inputs and result are [rows, 1, heads, ...]; dimension 1 is the single token.
    """
    inputs = (each[:, 0] for each in (query, key, value, g, beta))
    normed = use_qk_l2norm_in_kernel
    result: Tensor = _steps_for(initial_state).delta_step(initial_state, *inputs, normed=normed)
    return result.unsqueeze(1), initial_state


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
    """Stand in for `mamba2_selective_state_update`.

    dt, A, D and dt_bias hold one number per head, which modules expand over the head's values.
    """
    assert dt_softplus
    own = dt_bias[:, 0], A[:, 0, 0], D[:, 0]
    result: Tensor = _steps_for(state).scan_step(state, x, dt[..., 0], B, C, *own)
    return result if z is None else result * F.silu(z)


# The functions that are replaced, by name: the kind of state that they update, and the replacement.
_STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_update": ("conv", _convolve),
    "torch_recurrent_gated_delta_rule": ("recurrent", _delta_rule),
    "mamba2_selective_state_update": ("recurrent", _scan),
}


def install_steps(
    recurrent: Recurrent, width: int, device: torch.device, *, in_blocks: bool
) -> None:
    """Replace a module's single-token step by one of this file, if both give equal results.

    width: the hidden size. in_blocks: also try the kernels, which update states in the pool.
    """
    step = _step_of(recurrent.module, set(recurrent.parts))
    if step is not None and _agrees(recurrent, step, width, device, in_blocks=False):
        recurrent.step = step
        if in_blocks and _agrees(recurrent, step, width, device, in_blocks=True):
            recurrent.in_place = step


def _step_of(module: torch.nn.Module, kinds: set[str]) -> _Step | None:
    """Return a copy of the module's forward that calls the step functions of this file.

    None: the module updates some part of its state with functions that are unknown here.
    """
    plain = inspect.unwrap(type(module).forward)
    steps = {name: step for name, step in _STEPS.items() if name in plain.__code__.co_names}
    if {kind for kind, _ in steps.values()} != kinds:
        return None
    known = {**plain.__globals__, **{name: step for name, (_, step) in steps.items()}}
    code, defaults, closure = plain.__code__, plain.__defaults__, plain.__closure__
    own = FunctionType(code, known, plain.__name__, defaults, closure)
    own.__kwdefaults__ = plain.__kwdefaults__
    name = cache_argument(module) or ""
    return lambda hidden, cache: own(module, hidden, **{name: cache})


@torch.inference_mode()
def _agrees(
    recurrent: Recurrent, step: _Step, width: int, device: torch.device, *, in_blocks: bool
) -> bool:
    """Return whether `step` agrees with the module's own step, on random rows and states."""
    hidden, states = recurrent.draw_inputs(_ROWS, 1, width, device)
    own = StateCache({kind: state.clone() for kind, state in states.items()})
    expected = recurrent.run_original(hidden, own)
    try:
        result = step(hidden, StateCache(_placed(states) if in_blocks else dict(states)))
    except (AssertionError, TypeError):  # the module passes arguments that our steps do not support
        return False
    pairs = [(result, expected), *((states[kind], own.parts[kind]) for kind in states)]
    return are_near(pairs, _NEAR)


def _placed(states: Mapping[str, Tensor]) -> dict[str, StatePlace]:
    """Present state tensors as blocks of a pool: one block holds the state of one row."""
    device = next(iter(states.values())).device
    table = torch.arange(_ROWS, dtype=torch.int32, device=device)[:, None]
    ways = torch.full((_ROWS,), GOES_ON, dtype=torch.int32, device=device)
    return {
        kind: StatePlace(
            StateBlocks(part.view(torch.uint8).flatten(1), table, table, ways), 0, part.dtype
        )
        for kind, part in states.items()
    }
