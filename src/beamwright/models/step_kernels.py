"""Triton kernels that compute one token of recurrent layers on states in the pool's blocks.

A row's states form one flat record in blocks of the memory pool. One program computes a part of one
row's state, so the kernels are batch-invariant. Each number of a state is read once and written
once. This traffic is nearly all of a token's cost. Sums are in float32, whatever dtype stores the
state.

At its first token a row reads the blocks of its parent node and writes its own blocks. A row whose
step is decoded (`kv.states.IDLE`) writes no state. Launches are captured in CUDA graphs.
`layer_kernels` explains the parameter EARLY. `steps` is the specification of these kernels.

This module is imported only where the kernels run. It does not postpone annotations, because Triton
reads `tl.constexpr` from them.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from beamwright.kv.states import StatePlace
from beamwright.models.layer_kernels import launch, silu

# Maximum number of a head's state values per program, and the warps of a program.
_NUMBERS, _WARPS = 8192, 4
_CHANNELS = 256  # convolution channels per program


@triton.jit
def _places(table, row, number, BLOCKS: tl.constexpr, BLOCK_NUMBERS: tl.constexpr):
    """Return the offsets in the pool, int64, of elements `number` of a row's state record.

    The code avoids `%`: Triton does not know what divides a remainder, and would then load each
    element separately.
    """
    at = number // BLOCK_NUMBERS
    block = tl.load(table + row * BLOCKS + at).to(tl.int64)
    return block * BLOCK_NUMBERS + (number - at * BLOCK_NUMBERS)


@triton.jit(do_not_specialize=["offset", "query_stride", "key_stride", "value_stride"])
def delta_rows(
    value, query, key, decay, beta, out, states, sources, targets, ways,
    offset, query_stride, key_stride, value_stride,
    BLOCKS: tl.constexpr, BLOCK_NUMBERS: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr,
    SHARED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr,
    TILE: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Apply the gated delta rule to one head of one row, for TILE of the head's values.

    states: [HEADS, KEYS, VALUES] in each record. value and out: [rows, HEADS, VALUES].
    query and key: [rows, HEADS / SHARED, KEYS]. NORMED: first scale both to length 1.
    decay (a logarithm) and beta: [rows, HEADS].
    offset: the layer's start in a record, in lines of VALUES numbers. No line straddles blocks.
    WHOLE: True if no head straddles blocks.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    parts: tl.constexpr = (VALUES + TILE - 1) // TILE
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // parts
    at_key = tl.arange(0, KEY_BLOCK)
    at_value = (tl.program_id(0) % parts) * TILE + tl.arange(0, TILE)
    a_key, a_value = at_key < KEYS, at_value < VALUES
    held = a_key[:, None] & a_value[None, :]
    place = at_key[:, None] * VALUES + at_value[None, :]
    put = out + (row * HEADS + head) * VALUES + at_value
    way = tl.load(ways + row)
    if way == 0:
        tl.store(put, tl.zeros((TILE,), out.dtype.element_ty), a_value)
    else:
        first = (offset + head * KEYS) * VALUES
        if WHOLE:
            read = states + _places(sources, row, first, BLOCKS, BLOCK_NUMBERS) + place
            write = states + _places(targets, row, first, BLOCKS, BLOCK_NUMBERS) + place
        else:
            first += tl.where(a_key, at_key, 0) * VALUES
            read = states + _places(sources, row, first, BLOCKS, BLOCK_NUMBERS)[:, None]
            write = states + _places(targets, row, first, BLOCKS, BLOCK_NUMBERS)[:, None]
            read, write = read + at_value[None, :], write + at_value[None, :]
        before = held & (way == 2)
        state = tl.load(read, before, other=0.0, eviction_policy="evict_first")
        shared = head // SHARED * KEYS + at_key
        asks = tl.load(query + row * query_stride + shared, a_key, other=0.0).to(tl.float32)
        keys = tl.load(key + row * key_stride + shared, a_key, other=0.0).to(tl.float32)
        fresh = tl.load(value + row * value_stride + head * VALUES + at_value, a_value, other=0.0)
        kept = tl.exp(tl.load(decay + row * HEADS + head).to(tl.float32))
        rate = tl.load(beta + row * HEADS + head).to(tl.float32)
        if NORMED:
            asks *= tl.rsqrt(tl.sum(asks * asks, axis=0) + 1e-6)
            keys *= tl.rsqrt(tl.sum(keys * keys, axis=0) + 1e-6)
        state = state.to(tl.float32) * kept
        known = tl.sum(state * keys[:, None], axis=0)
        state += keys[:, None] * ((fresh.to(tl.float32) - known) * rate)[None, :]
        rounded = state.to(states.dtype.element_ty)
        tl.store(write, rounded, held, eviction_policy="evict_first")
        result = tl.sum(state * asks[:, None], axis=0) * (KEYS**-0.5)
        tl.store(put, result.to(out.dtype.element_ty), a_value)


@triton.jit(
    do_not_specialize=["offset", "x_stride", "rate_stride", "enters_stride", "leaves_stride"]
)
def scan_rows(
    x, rate, enters, leaves, shift, decay, skip, out, states, sources, targets, ways,
    offset, x_stride, rate_stride, enters_stride, leaves_stride,
    BLOCKS: tl.constexpr, BLOCK_NUMBERS: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr,
    SHARED: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute Mamba-2's step for one head of one row, for TILE of the head's values.

    states: [HEADS, VALUES, KEYS] in each record. x and out: [rows, HEADS, VALUES].
    rate: [rows, HEADS]. enters and leaves: [rows, HEADS / SHARED, KEYS].
    shift (added to the rate), decay and skip: [HEADS].
    offset: the layer's start in a record, in lines of KEYS numbers. WHOLE: as in `delta_rows`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    parts: tl.constexpr = (VALUES + TILE - 1) // TILE
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // parts
    at_key = tl.arange(0, KEY_BLOCK)
    at_value = (tl.program_id(0) % parts) * TILE + tl.arange(0, TILE)
    a_key, a_value = at_key < KEYS, at_value < VALUES
    held = a_value[:, None] & a_key[None, :]
    place = at_value[:, None] * KEYS + at_key[None, :]
    put = out + (row * HEADS + head) * VALUES + at_value
    way = tl.load(ways + row)
    if way == 0:
        tl.store(put, tl.zeros((TILE,), out.dtype.element_ty), a_value)
    else:
        first = (offset + head * VALUES) * KEYS
        if WHOLE:
            read = states + _places(sources, row, first, BLOCKS, BLOCK_NUMBERS) + place
            write = states + _places(targets, row, first, BLOCKS, BLOCK_NUMBERS) + place
        else:
            first += tl.where(a_value, at_value, 0) * KEYS
            read = states + _places(sources, row, first, BLOCKS, BLOCK_NUMBERS)[:, None]
            write = states + _places(targets, row, first, BLOCKS, BLOCK_NUMBERS)[:, None]
            read, write = read + at_key[None, :], write + at_key[None, :]
        before = held & (way == 2)
        state = tl.load(read, before, other=0.0, eviction_policy="evict_first").to(tl.float32)
        shared = head // SHARED * KEYS + at_key
        enter = tl.load(enters + row * enters_stride + shared, a_key, other=0.0).to(tl.float32)
        leave = tl.load(leaves + row * leaves_stride + shared, a_key, other=0.0).to(tl.float32)
        fresh = tl.load(x + row * x_stride + head * VALUES + at_value, a_value, other=0.0)
        fresh = fresh.to(tl.float32)
        step = tl.load(rate + row * rate_stride + head).to(tl.float32)
        step += tl.load(shift + head).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        state *= tl.exp(step * tl.load(decay + head).to(tl.float32))
        state += (fresh * step)[:, None] * enter[None, :]
        kept = state.to(states.dtype.element_ty)
        tl.store(write, kept, held, eviction_policy="evict_first")
        result = tl.sum(state * leave[None, :], axis=1)
        result += fresh * tl.load(skip + head).to(tl.float32)
        tl.store(put, result.to(out.dtype.element_ty), a_value)


@triton.jit(do_not_specialize=["offset", "stride"])
def convolve_rows(
    x, weight, out, states, sources, targets, ways, bias, offset, stride,
    BLOCKS: tl.constexpr, BLOCK_NUMBERS: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, TILE: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a causal convolution's newest output, for TILE channels of one row.

    states: [CHANNELS, TAPS] in each record, `offset` numbers after its start.
    x and out: [rows, CHANNELS]. weight: [CHANNELS, TAPS].
    One thread holds all numbers of a channel, so it can shift them in place without a barrier.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    put = out + row * CHANNELS + channel
    way = tl.load(ways + row)
    if way == 0:
        tl.store(put, tl.zeros((TILE,), out.dtype.element_ty), inside)
    else:
        number = offset + tl.where(inside, channel, 0) * TAPS
        fresh = tl.load(x + row * stride + channel, inside, other=0.0)
        total = tl.zeros((TILE,), tl.float32)
        for tap in tl.static_range(TAPS):
            if tap + 1 < TAPS:
                place = _places(sources, row, number + tap + 1, BLOCKS, BLOCK_NUMBERS)
                moved = tl.load(states + place, inside & (way == 2), other=0.0)
            else:
                moved = fresh.to(states.dtype.element_ty)
            place = _places(targets, row, number + tap, BLOCKS, BLOCK_NUMBERS)
            tl.store(states + place, moved, inside)
            factor = tl.load(weight + channel * TAPS + tap, inside, other=0.0).to(tl.float32)
            total += moved.to(tl.float32) * factor
        if bias is not None:
            total += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32)
        if SILU:
            total = silu(total)
        tl.store(put, total.to(out.dtype.element_ty), inside)


def delta_step(
    state: StatePlace,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    normed: bool = True,
) -> Tensor:
    """Compute `steps.delta_step` with a kernel, and return the output [rows, heads, value_dim].

    state: where the pool stores the states, which are updated there.
    query, key: [rows, key_heads, key_dim]. value: [rows, heads, value_dim]. The heads of a row must
        be contiguous in memory.
    """
    blocks, (rows, heads, values), keys = state.blocks, value.shape, key.shape[2]
    where, sizes = _lines_in(state, keys, values)
    out = value.new_empty(rows, heads, values)
    block, tile = _tile(keys, values)
    sizes = *sizes, heads, heads // key.shape[1], keys, values, block, tile, normed
    gates = decay.float().contiguous(), beta.to(value.dtype).contiguous()
    tensors = value, query, key, *gates, out, blocks.storage.view(state.dtype), *blocks[1:]
    numbers = where, query.stride(0), key.stride(0), value.stride(0)
    grid = heads * -(-values // tile), rows, 1
    launch(delta_rows, grid, tensors, numbers, sizes, _WARPS)
    return out


def scan_step(
    state: StatePlace,
    x: Tensor,
    rate: Tensor,
    enters: Tensor,
    leaves: Tensor,
    shift: Tensor,
    decay: Tensor,
    skip: Tensor,
) -> Tensor:
    """Compute `steps.scan_step` with a kernel, and return the output [rows, heads, head_dim].

    state: where the pool stores the states, which are updated there.
    x: [rows, heads, head_dim]. enters, leaves: [rows, groups, state_size]. The heads of a row must
        be contiguous in memory.
    """
    blocks, (rows, heads, values), keys = state.blocks, x.shape, enters.shape[2]
    where, sizes = _lines_in(state, values, keys)
    out = x.new_empty(rows, heads, values)
    block, tile = _tile(keys, values)
    sizes = *sizes, heads, heads // enters.shape[1], values, keys, block, tile
    own = (each.float().contiguous() for each in (shift, decay, skip))
    tensors = x, rate.to(x.dtype), enters, leaves, *own, out
    tensors = *tensors, blocks.storage.view(state.dtype), *blocks[1:]
    numbers = where, x.stride(0), rate.stride(0), enters.stride(0), leaves.stride(0)
    grid = heads * -(-values // tile), rows, 1
    launch(scan_rows, grid, tensors, numbers, sizes, _WARPS)
    return out


def convolution_step(
    state: StatePlace, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """Compute `steps.convolution_step` with a kernel, and return the output [rows, channels].

    state: where the pool stores the states, which are updated there.
    x: [rows, channels], in the dtype of weights and states.
    """
    blocks, rows, (channels, taps) = state.blocks, x.shape[0], weight.shape
    out = x.new_empty(rows, channels)
    block_numbers = blocks.storage.shape[1] // x.itemsize
    sizes = blocks.sources.shape[1], block_numbers, channels, taps, _CHANNELS, silu
    tensors = x, weight, out, blocks.storage.view(x.dtype), *blocks[1:], bias
    numbers = state.offset // x.itemsize, x.stride(0)
    grid = -(-channels // _CHANNELS), rows, 1
    launch(convolve_rows, grid, tensors, numbers, sizes, _WARPS)
    return out


def _lines_in(state: StatePlace, lines: int, width: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of the layer's first line in a record, and the kernels' first parameters.

    A line has `width` numbers, and a head has `lines` lines. The parameters are BLOCKS (blocks of a
    record), BLOCK_NUMBERS (numbers of a block) and WHOLE (True if no head straddles blocks).
    """
    blocks, offset, kept = state
    block_bytes, line_bytes = blocks.storage.shape[1], width * kept.itemsize
    whole = block_bytes % (lines * line_bytes) == 0 == offset % (lines * line_bytes)
    return offset // line_bytes, (blocks.sources.shape[1], block_bytes // kept.itemsize, whole)


def _tile(keys: int, values: int) -> tuple[int, int]:
    """Return KEY_BLOCK and TILE, the keys and values per program, for one head's sizes."""
    block = triton.next_power_of_2(keys)
    return block, min(triton.next_power_of_2(values), max(1, _NUMBERS // block))
