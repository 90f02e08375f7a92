"""A layer's elementwise work on a card, in Triton: four launches where torch's operations take ten.

What a row gets is a function of that row alone, at any batch: one program has all of a row that is
summed up. Sums are in float32, and numbers are rounded where the operations of torch in `dense`
round them, which are the specification. Launches are captured in CUDA graphs, and where they are
not the host's time counts: arguments are few, and what varies compiles nothing anew. Loaded only
where the kernels run.

EARLY, of every kernel that `launch` starts: it begins while the one before it ends, and waits for
that before it reads anything but weights and tables, which nothing writes.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from beamwright.attention.kernels import can_overlap

GATED = ("silu", "gelu", "gelu_tanh")
_PIECE, _PIECE_WARPS = 1024, 4
_MOST_WARPS = 16
_WARP_NUMBERS = 256  # 8 numbers for each thread: 16 bytes of a half precision
_ALIGNED = 16  # bytes: what Triton compiles for


@triton.jit(do_not_specialize=["adds"])
def add_norm_rows(
    x, delta, weight, bias, normed, eps, adds,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x += delta, if it `adds`; normed = x / its root mean square * weight. [rows, WIDTH] each.

    PARTS: delta is [PARTS, rows, WIDTH] in float32, and their sum is what is added; 0: it is whole.
    CENTRED: layer normalisation, with a bias.
    """
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + at
    factor = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    fresh = tl.load(delta + place, inside & (adds != 0), other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            size = tl.num_programs(0).to(tl.int64) * WIDTH
            fresh += tl.load(delta + part * size + place, inside, other=0.0)
        fresh = fresh.to(x.dtype.element_ty).to(tl.float32)
    whole = tl.load(x + place, inside, other=0.0).to(tl.float32) + fresh
    rounded = whole.to(x.dtype.element_ty)
    tl.store(x + place, rounded, inside)
    whole = rounded.to(tl.float32)
    if CENTRED:
        shift = tl.load(bias + at, inside, other=0.0).to(tl.float32)
        whole = tl.where(inside, whole - tl.sum(whole, axis=0) / WIDTH, 0.0)
    found = whole * tl.rsqrt(tl.sum(whole * whole, axis=0) / WIDTH + eps) * factor
    if CENTRED:
        found += shift
    tl.store(normed + place, found.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotate_rows(
    heads, positions, cos, sin, query_weight, key_weight, eps,
    QUERIES: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first TURNED heads of a row, QUERIES of them queries, in place; positions [rows].

    cos, sin [context, 2 * HALF]. Where there are weights [2 * HALF], heads are normalised first.
    STRIDE: from a row to the next.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    wide = dim < HALF
    inside = (head < TURNED) & wide
    angle = tl.load(positions + row).to(tl.int64) * (2 * HALF) + dim
    cosine = tl.load(cos + angle, wide, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle + HALF, wide, other=0.0).to(tl.float32)
    low_place = heads + row * STRIDE + head * (2 * HALF) + dim
    high_place = low_place + HALF
    low = tl.load(low_place, inside, other=0.0).to(tl.float32)
    high = tl.load(high_place, inside, other=0.0).to(tl.float32)
    if query_weight is not None:
        squares = tl.sum(low * low + high * high, axis=1)[:, None]
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        asks = head < QUERIES
        low = low * scale * _either(asks, query_weight + dim, key_weight + dim, wide)
        dim += HALF
        high = high * scale * _either(asks, query_weight + dim, key_weight + dim, wide)
        low = low.to(heads.dtype.element_ty).to(tl.float32)
        high = high.to(heads.dtype.element_ty).to(tl.float32)
    kept_low = (low * cosine).to(heads.dtype.element_ty).to(tl.float32)
    kept_high = (high * cosine).to(heads.dtype.element_ty).to(tl.float32)
    tl.store(low_place, (kept_low - high * sine).to(heads.dtype.element_ty), inside)
    tl.store(high_place, (kept_high + low * sine).to(heads.dtype.element_ty), inside)


@triton.jit
def _either(first, one, other, inside):
    """What is at `one` where it is the first's, else what is at `other`; float32."""
    here = tl.load(one, inside, other=0.0).to(tl.float32)
    there = tl.load(other, inside, other=0.0).to(tl.float32)
    return tl.where(first, here, there)


@triton.jit
def silu(x):
    """x * sigmoid(x), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate_rows(
    inner, out, WIDTH: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [rows, WIDTH] of a gate and what it lets through, side by side: [rows, 2 * WIDTH]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < WIDTH
    place = inner + row * (2 * WIDTH) + at
    gate = tl.load(place, inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        opened = silu(gate)
    elif KIND == "gelu":
        opened = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 1 + tanh(y) is 2 sigmoid(2 y).
        bent = gate + 0.044715 * gate * gate * gate
        opened = gate * tl.sigmoid(1.5957691216057308 * bent)
    opened = opened.to(inner.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + at, (opened * up).to(out.dtype.element_ty), inside)


def add_norm(x: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
    """x [rows, width] normalised as by a `dense.Norm`, behind delta's addition to it in place.

    delta: as x, or parts of it, see `decoder.Linear.unadded`.
    """
    normed, width = torch.empty_like(x), x.shape[1]
    block, warps = _row_sizes(width)
    tensors = x, x if delta is None else delta, norm.weight, norm.bias, normed
    parts = len(delta) if delta is not None and delta.ndim == 3 else 0
    sizes = width, block, parts, norm.kind == "layer"
    numbers = norm.eps, int(delta is not None)
    launch(add_norm_rows, (x.shape[0], 1, 1), tensors, numbers, sizes, warps)
    return normed


def rotate(
    heads: Tensor,
    queries: int,
    keys: int,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Any = None,
    key_norm: Any = None,
) -> None:
    """Queries and keys of heads [rows, heads, head_dim], in place; values behind them stay.

    positions: [rows]. cos, sin: of each position [head_dim], sin's first half negated.
    query_norm, key_norm: a `dense.Norm` by root mean squares, where heads are normalised first.
    """
    half = heads.shape[2] // 2
    block, dim, warps = _head_sizes(queries + keys, half)
    weights, eps = (None, None), 0.0
    if query_norm is not None and key_norm is not None:
        weights, eps = (query_norm.weight, key_norm.weight), query_norm.eps
    sizes = queries, queries + keys, block, half, dim, heads.stride(0)
    tensors = heads, positions, cos, sin, *weights
    launch(rotate_rows, (heads.shape[0], 1, 1), tensors, (eps,), sizes, warps)


def gated(inner: Tensor, kind: str) -> Tensor:
    """activation(gate) * up [rows, width] of both in one product's rows [rows, 2 * width]."""
    rows, width = inner.shape[0], inner.shape[1] // 2
    out = inner.new_empty(rows, width)
    grid = rows, -(-width // _PIECE), 1
    launch(gate_rows, grid, (inner, out), (), (width, _PIECE, kind), _PIECE_WARPS)
    return out


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    sizes: tuple[int | str, ...],
    warps: int,
    stages: int = 3,
) -> None:
    """The kernel on tensors and numbers that it does not look at before it runs.

    Triton's own way to a launch takes the host as long as three of torch's operations; by a handle
    to what it has compiled for tensors of the same kind it takes little more than one.
    """
    first, places = tensors[0], 0
    for tensor in tensors:
        if tensor is not None:
            places |= tensor.data_ptr()
    early = can_overlap(first.device)
    key = id(kernel), first.dtype, first.get_device(), tensors[-1] is None, sizes
    handle = _handles().get(key)
    if handle is not None and places % _ALIGNED == 0:
        handle[grid](*tensors, *numbers, *sizes, early)
        return
    how: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if early:
        how["launch_pdl"] = True
    handle = kernel[grid](*tensors, *numbers, *sizes, early, **how)
    if places % _ALIGNED == 0:
        _handles()[key] = handle


@cache
def _handles() -> dict[tuple[object, ...], Any]:
    """What has been compiled, by what for; the interpreter compiles nothing."""
    return {}


@cache
def _row_sizes(width: int) -> tuple[int, int]:
    """Numbers of a block that holds a row, and warps that share them."""
    block = triton.next_power_of_2(width)
    return block, _warps(block)


@cache
def _head_sizes(heads: int, half: int) -> tuple[int, int, int]:
    """Heads and numbers of a block that holds half of each, and its warps."""
    block, dim = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    return block, dim, _warps(block * dim)


def _warps(numbers: int) -> int:
    return min(_MOST_WARPS, max(1, numbers // _WARP_NUMBERS))
