"""Triton kernels that sample tokens (Gumbel-max) in one read of the logits, without temporaries.

`sampling` is the specification. The vocabulary is cut into pieces of fixed size. For one row and
piece, each program finds the token with the largest noisy logit, the largest logit, and the sum of
exponentials for the log-probability. A second kernel merges a row's pieces, so a row's result is a
function of its own logits and the vocabulary's size. If a row has filters (top-k, top-p, min-p),
`filter_kernel` first finds the tokens that they keep. This module is imported only where the
kernels run.

Exact noise uses `tl.log`, which compiles to the accurate logarithm that torch also uses. Computing
exact noise and quotients for all tokens would dominate the runtime. They are computed only for
tokens whose approximate score is near the best one.

This module does not postpone annotations, because Triton reads `tl.constexpr` from them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from beamwright.attention.kernels import is_interpreted
from beamwright.engine.filter_kernel import compute_thresholds, order_value
from beamwright.engine.noise import NOISE_BITS

PIECE_TOKENS = 2048  # tokens of the vocabulary per piece
_PIECE_WARPS = 4
_MERGE_WARPS = 1
# Twice the error bounds of an approximate score: absolute (noise) and relative (rounded quotient).
_SLACK = tl.constexpr(1e-3)
_ROUNDED = tl.constexpr(1e-5)


@triton.jit
def _mix(x):
    """Mix uint32 words as `noise._mix` does: the 32-bit finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(keys, positions, row, token, SHIFT: tl.constexpr, STEP: tl.constexpr):
    """Return uniform random numbers between 0 and 1 for tokens of a row, as `noise` defines them.

    SHIFT: low bits of the hash that are dropped. STEP: the distance between two results.
    """
    position = tl.load(positions + row).to(tl.uint32) * 0x9E3779B1
    first = _mix(tl.load(keys + 2 * row).to(tl.uint32) ^ position)
    second = _mix(tl.load(keys + 2 * row + 1).to(tl.uint32) + first)
    x = _mix(token.to(tl.uint32) * 0x85EBCA77 + 374761393) ^ first
    x = (x ^ (x >> 16)) * 0x85EBCA6B + second
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x >> SHIFT).to(tl.float32) + 0.5) * STEP


@triton.jit
def _log(x, FAST: tl.constexpr):
    """Return the logarithm of x.

    If FAST, the error of log2 is below 2^-22: absolute near 1, relative elsewhere.
    """
    if FAST:
        return libdevice.fast_log2f(x) * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def _near_noise(uniform, FAST: tl.constexpr):
    """Return the Gumbel noise of uniform numbers, with an error below 1e-4.

    A series replaces the inner logarithm near 1, where fast logarithms are least accurate.
    """
    rest = 1.0 - uniform
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -_log(tl.where(rest < 0.0625, series, -_log(uniform, FAST)), FAST)


@triton.jit
def _first_best(scores, tokens, num_tokens):
    """Return the largest score and the lowest token with it; any token if all are NaN."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, num_tokens - 1), axis=0)


# These tensors are read one number at a time, so their alignment must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["keys", "positions", "greedy", "temperature"])
def draw_pieces(
    logits, keys, positions, greedy, temperature, thresholds, lasts, piece_tokens, pieces,
    num_tokens, row_stride, TOKENS: tl.constexpr, SHIFT: tl.constexpr, STEP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Find the best token of each piece: one program per row and piece of TOKENS tokens.

    thresholds, lasts: see `filter_kernel.compute_thresholds`; None if no row has filters.
    piece_tokens [rows, pieces] int32: output, the kept token with the best score.
    pieces [rows, pieces, 3] float32: output, that score, the largest logit, and the sum of
    exponentials relative to the largest logit.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * TOKENS + tl.arange(0, TOKENS)
    logits += row.to(tl.int64) * row_stride
    given = tl.load(logits + token, token < num_tokens, other=float("-inf"))
    logit = given.to(tl.float32)
    largest = tl.max(logit, axis=0)
    # A piece with only -inf logits adds 0 to the sum. A row of such pieces has no distribution.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    out = row * tl.num_programs(1) + piece
    tl.store(pieces + 3 * out + 1, largest)
    tl.store(pieces + 3 * out + 2, tl.sum(tl.exp(logit - shift), axis=0))
    best, chosen = _first_best(logit, token, num_tokens)
    heat = tl.load(temperature + row)
    races = (tl.load(greedy + row) == 0) & (best > float("-inf"))
    if thresholds is not None:
        order, threshold = order_value(given, heat), tl.load(thresholds + row)
        left = (order > threshold) | ((order == threshold) & (token <= tl.load(lasts + row)))
        any_left = tl.max(left.to(tl.int32), axis=0) > 0
        best = tl.where(races & (any_left == 0), float("-inf"), best)
        races &= any_left
    if races:
        noise = _near_noise(_uniform(keys, positions, row, token, SHIFT, STEP), FAST)
        near = logit * (1.0 / heat) + noise
        if thresholds is not None:
            near = tl.where(left, near, float("-inf"))
        most = tl.max(near, axis=0)
        slack = tl.minimum(tl.abs(most) * _ROUNDED, 1e30) + _SLACK  # finite even if `most` is not
        may_win = near >= most - slack
        if thresholds is not None:
            may_win &= left
        best = float("-inf")
        one = tl.min(tl.where(may_win, token, num_tokens), axis=0)
        while one < num_tokens:
            uniform = _uniform(keys, positions, row, one, SHIFT, STEP)
            score = tl.div_rn(tl.load(logits + one).to(tl.float32), heat)
            score += -tl.log(-tl.log(uniform))
            chosen = tl.where(score > best, one, chosen)
            best = tl.maximum(score, best)
            one = tl.min(tl.where(may_win & (token > one), token, num_tokens), axis=0)
    tl.store(piece_tokens + out, chosen)
    tl.store(pieces + 3 * out, best)


@triton.jit
def merge_pieces(
    logits, piece_tokens, pieces, tokens, logprobs, num_tokens, row_stride, num_pieces,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Merge each row's pieces into its token and log-probability [rows]: one program per row."""
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    here = piece < num_pieces
    place = row * num_pieces + piece
    score = tl.load(pieces + 3 * place, mask=here, other=float("-inf"))
    token = tl.load(piece_tokens + place, mask=here, other=num_tokens - 1)
    chosen = _first_best(score, token, num_tokens)[1]
    largest = tl.load(pieces + 3 * place + 1, mask=here, other=float("-inf"))
    total = tl.load(pieces + 3 * place + 2, mask=here, other=0.0)
    highest = tl.max(largest, axis=0)
    total = tl.sum(total * tl.exp(largest - highest), axis=0)
    logit = tl.load(logits + row.to(tl.int64) * row_stride + chosen).to(tl.float32)
    tl.store(tokens + row, chosen)
    tl.store(logprobs + row, logit - highest - tl.log(total))


def draw(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    *filters: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sample a token of every row, and return ids [rows] and log-probabilities [rows].

    Log-probabilities ignore temperature and filters. A row with a NaN logit gets NaN.

    logits: [rows, tokens] of any float type; the tokens of a row are contiguous.
    keys, positions: [rows, 2] and [rows], as in `Sampler.sample`.
    greedy, temperature: [rows] and [rows, 1], as in `RowSampling`.
    filters: top_k, top_p and min_p as in `RowSampling`, if some row filters; else nothing.
    """
    num_rows, num_tokens = logits.shape
    num_pieces = triton.cdiv(num_tokens, PIECE_TOKENS)
    device = logits.device
    piece_tokens = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=device)
    pieces = torch.empty(num_rows, num_pieces, 3, device=device)
    tokens = torch.empty(num_rows, dtype=torch.long, device=device)
    logprobs = torch.empty(num_rows, device=device)
    greedy, temperature = greedy.contiguous(), temperature.contiguous()
    filtered = (logits, greedy, temperature, *filters)
    thresholds = compute_thresholds(*filtered) if filters else (None, None)
    draw_pieces[(num_rows, num_pieces)](
        logits, keys.contiguous(), positions.contiguous(), greedy, temperature, *thresholds,
        piece_tokens, pieces, num_tokens, logits.stride(0),
        TOKENS=PIECE_TOKENS, SHIFT=32 - NOISE_BITS, STEP=2.0**-NOISE_BITS,
        FAST=not is_interpreted() and torch.version.hip is None, num_warps=_PIECE_WARPS,
    )  # fmt: skip
    merge_pieces[(num_rows,)](
        logits, piece_tokens, pieces, tokens, logprobs, num_tokens, logits.stride(0), num_pieces,
        PIECES=triton.next_power_of_2(num_pieces), num_warps=_MERGE_WARPS,
    )  # fmt: skip
    return tokens, logprobs
