"""Triton kernels for a layer's norms, rotary positions and gates: four launches, not torch's ten.

The kernels are batch-invariant: a single program computes each sum over a row. Sums are in float32.
Numbers are rounded at the same places as in `dense`, whose torch operations are the specification.

Most launches are captured in CUDA graphs. For launches outside graphs, time on the host matters, so
kernels have few arguments, and arguments that vary cause no new compilation.

EARLY, a parameter of every kernel that `launch` starts, is CUDA's programmatic dependent launch:
the kernel begins while the previous kernel is still running. It waits for the end of that kernel
before it reads anything except weights and tables, which no kernel writes.

This module is imported only where the kernels run. It does not postpone annotations, because Triton
reads `tl.constexpr` from them.
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
_WARP_NUMBERS = 256  # numbers per warp: 8 per thread, which are 16 bytes in 16-bit precision
_ALIGNED = 16  # bytes of alignment for which Triton compiles faster code


@triton.jit(do_not_specialize=["adds"])
def add_norm_rows(
    x, delta, weight, bias, normed, eps, adds,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add delta to x if `adds` is not 0, then write the norm of x to `normed`, one row per program.

    x, delta and normed are [rows, WIDTH]. The norm is x / RMS(x) * weight.
    PARTS: if not 0, delta is float32 [PARTS, rows, WIDTH], and the sum of its parts is added.
    CENTRED: compute layer norm with a bias in place of RMS norm.
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
    scaled = whole * tl.rsqrt(tl.sum(whole * whole, axis=0) / WIDTH + eps) * factor
    if CENTRED:
        scaled += shift
    tl.store(normed + place, scaled.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotate_rows(
    heads, positions, cos, sin, query_weight, key_weight, eps,
    QUERIES: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Apply rotary positions to the first TURNED heads of each row in place.

    The first QUERIES of these heads are queries, the others are keys.
    positions: [rows]. cos, sin: [context, 2 * HALF].
    query_weight, key_weight: weights of RMS norms [2 * HALF], which are applied first; or None.
    HEADS, DIM: TURNED and HALF, rounded up to powers of two.
    STRIDE: numbers from the start of one row to the next.
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
        low = low * scale * _select_weight(asks, query_weight + dim, key_weight + dim, wide)
        dim += HALF
        high = high * scale * _select_weight(asks, query_weight + dim, key_weight + dim, wide)
        low = low.to(heads.dtype.element_ty).to(tl.float32)
        high = high.to(heads.dtype.element_ty).to(tl.float32)
    kept_low = (low * cosine).to(heads.dtype.element_ty).to(tl.float32)
    kept_high = (high * cosine).to(heads.dtype.element_ty).to(tl.float32)
    tl.store(low_place, (kept_low - high * sine).to(heads.dtype.element_ty), inside)
    tl.store(high_place, (kept_high + low * sine).to(heads.dtype.element_ty), inside)


@triton.jit
def _select_weight(first, one, other, inside):
    """Load a weight from `one` where `first` is true, otherwise from `other`, in float32."""
    here = tl.load(one, inside, other=0.0).to(tl.float32)
    there = tl.load(other, inside, other=0.0).to(tl.float32)
    return tl.where(first, here, there)


@triton.jit
def silu(x):
    """Return x * sigmoid(x), in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate_rows(
    inner, out, WIDTH: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write activation(gate) * up to out [rows, WIDTH].

    inner: [rows, 2 * WIDTH], gate and up next to each other. KIND: the activation.
    """
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
        # Uses 1 + tanh(y) = 2 sigmoid(2 y).
        bent = gate + 0.044715 * gate * gate * gate
        opened = gate * tl.sigmoid(1.5957691216057308 * bent)
    opened = opened.to(inner.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + at, (opened * up).to(out.dtype.element_ty), inside)


def add_norm(x: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
    """Add `delta` to x [rows, width] in place, and return x after `norm`, a `dense.Norm`.

    delta: [rows, width], its partial sums (`decoder.Linear.partial_sums`), or None to add nothing.
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
    """Apply rotary positions to queries and keys in place. Values do not change.

    heads: [rows, heads, head_dim]: `queries` query heads, then `keys` key heads, then values.
    positions: [rows]. cos, sin: [positions, head_dim]; the first half of sin is negated.
    query_norm, key_norm: each a `dense.Norm` of kind "rms" that is applied first, or None.
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
    """Return activation(gate) * up [rows, width]; `inner` [rows, 2 * width] holds gate, then up.

    kind: the activation, one of `GATED`.
    """
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
    """Launch a kernel, without Triton's look-up if it was compiled for such tensors before.

    With Triton's look-up of the compiled kernel, a launch takes as long as three operations of
    torch. With a stored handle to it, a launch takes little longer than one.

    Args:
        kernel: the Triton kernel. Its arguments are `tensors`, `numbers`, `sizes` and EARLY.
        grid: number of programs in each dimension.
        tensors: pointers; only their dtype, device and alignment may select the compiled form.
        numbers: values that do not cause a compilation.
        sizes: compile-time constants.
        warps, stages: as in Triton.
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
    """Return the dictionary of handles to compiled kernels, by kernel, dtype, device and sizes.

    Triton's interpreter compiles nothing, so its handles are None.
    """
    return {}


@cache
def _row_sizes(width: int) -> tuple[int, int]:
    """Return the number of elements in a block that holds a row, and its number of warps."""
    block = triton.next_power_of_2(width)
    return block, _warps(block)


@cache
def _head_sizes(heads: int, half: int) -> tuple[int, int, int]:
    """Return HEADS, DIM and the number of warps of `rotate_rows`.

    Triton requires powers of two: HEADS is `heads` rounded up, and DIM is `half` rounded up.
    """
    block, dim = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    return block, dim, _warps(block * dim)


def _warps(numbers: int) -> int:
    return min(_MOST_WARPS, max(1, numbers // _WARP_NUMBERS))
