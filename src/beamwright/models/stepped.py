"""Recurrent modules of `transformers` that read and write states where they lie, by our kernels.

What is a family's own runs as it is: a copy of a module's forward finds other functions where it
looks for those that make one token's step. They get what says where a state lies in place of it,
and nothing is copied. Knows no family's name: a module whose forward has such steps for all that it
keeps is tried on random rows. Loaded only where the kernels run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.kv.states import GOES_ON, Placed, StateBlocks
from beamwright.models.recurrent import Recurrent, StateCache, cache_of
from beamwright.models.step_kernels import convolution_step, delta_step, scan_step

_Step = Callable[[Tensor, StateCache], Tensor]
_ROWS = 3
_NEAR = 0.02
"""How far from the module's own a value may be, of the largest: both round to half precision."""


def _convolve(
    x: Tensor, state: Placed, weight: Tensor, bias: Tensor | None = None, activation: Any = None
) -> Tensor:
    """Inputs and outputs [rows, channels, 1]."""
    silu = activation in ("silu", "swish")
    assert silu or activation is None
    found = convolution_step(state.blocks, state.offset, x[..., 0], weight, bias, silu=silu)
    return found.unsqueeze(-1)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Placed,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Placed]:
    """All [rows, 1 token, heads, ...]."""
    blocks, offset, kept = initial_state
    query, key, value, g, beta = (each[:, 0] for each in (query, key, value, g, beta))
    normed = use_qk_l2norm_in_kernel
    found = delta_step(blocks, offset, query, key, value, g, beta, kept, normed=normed)
    return found.unsqueeze(1), initial_state


def _scan(
    state: Placed,
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
    found = scan_step(state.blocks, state.offset, x, dt[..., 0], B, C, *own, state.dtype)
    return found if z is None else found * F.silu(z)


_STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_update": ("conv", _convolve),
    "torch_recurrent_gated_delta_rule": ("recurrent", _delta_rule),
    "mamba2_selective_state_update": ("recurrent", _scan),
}
"""What it steps on, by the name that modules call it by."""


def put_in(recurrent: Recurrent, width: int, device: torch.device) -> None:
    """Have it step by the kernels, if they do what its module does."""
    step = _step_of(recurrent.module, set(recurrent.parts))
    if step is not None and _agrees(recurrent, step, width, device):
        recurrent.in_place = step


def _step_of(module: torch.nn.Module, kinds: set[str]) -> _Step | None:
    """The module's forward with the kernels; None if it steps on any part by other means."""
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
def _agrees(recurrent: Recurrent, step: _Step, width: int, device: torch.device) -> bool:
    """Whether a step of random rows behind random states is the module's own."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, 1, width, generator=generator).to(device, recurrent.dtype)
    table = torch.arange(_ROWS, dtype=torch.int32, device=device)[:, None]
    ways = torch.full((_ROWS,), GOES_ON, dtype=torch.int32, device=device)
    states, placed = dict[str, Tensor](), dict[str, Placed]()
    for kind, (size, dtype) in recurrent.parts.items():
        states[kind] = torch.randn(_ROWS, *size, generator=generator).to(device, dtype)
        storage = states[kind].view(torch.uint8).flatten(1)  # a row's block is its state
        placed[kind] = Placed(StateBlocks(storage, table, table, ways), 0, dtype)
    own = StateCache({kind: state.clone() for kind, state in states.items()})
    expected = recurrent.plain(hidden, own)
    try:
        found = step(hidden, StateCache(placed))
    except (AssertionError, TypeError):  # it is called with what the kernels do not know
        return False
    pairs = [(found, expected), *((states[kind], own.parts[kind]) for kind in states)]
    return all(
        float((one.float() - other.float()).abs().max()) <= _NEAR * float(other.abs().max())
        for one, other in pairs
    )
