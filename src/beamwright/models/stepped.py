"""A token of `transformers`' recurrent modules by steps of ours, in torch or by kernels.

What is a family's own runs as it is: a copy of a module's forward finds other functions where it
looks for those that make one token's step. They write into a state's tensor, or get what says where
states lie in blocks in place of it (`kv.states.Placed`), and then nothing is copied. Knows no
family's name: a module whose forward has such steps for all that it keeps is tried on random rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.kv.states import GOES_ON, Placed, StateBlocks
from beamwright.models import steps
from beamwright.models.recurrent import Recurrent, StateCache, cache_of, near

_Step = Callable[[Tensor, StateCache], Tensor]
_ROWS = 3
_NEAR = 0.02
"""How far from the module's own a value may be, of the largest: both round to half precision."""


def _by(state: Tensor | Placed) -> Any:
    """Who steps on it."""
    if not isinstance(state, Placed):
        return steps
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
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, 1, width, generator=generator).to(device, recurrent.dtype)
    states = {
        kind: torch.randn(_ROWS, *size, generator=generator).to(device, dtype)
        for kind, (size, dtype) in recurrent.parts.items()
    }
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
