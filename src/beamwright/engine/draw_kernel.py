"""`sampling`'s draw, in Triton: one read of the logits, no temporaries.

The vocabulary is cut into pieces of fixed size. Each program finds of one row and piece the token
with the largest noisy logit, and the largest logit and the sum of exponentials that a
log-probability takes; a second kernel merges a row's pieces. So a row's bits are a function of its
own logits and of the vocabulary's size. What a row's filters leave, `filter_kernel` finds ahead; a
piece of which nothing is left makes no noise. Loaded only where the kernels run; `sampling` has the
specification. Noise is made of `tl.log`, which compiles to the accurate logarithm that torch has
too, but of those tokens alone that come near the best by approximate noise: exact noise and
quotients for all are most of what a draw computes, and it is bound by that.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from beamwright.attention.kernels import is_interpreted
from beamwright.engine.filter_kernel import borders_of, in_order
from beamwright.engine.noise import NOISE_BITS

PIECE_TOKENS = 2048
_PIECE_WARPS = 4
_MERGE_WARPS = 1
# By how much an approximate score may be off, twice over: noise, and what a quotient is rounded by.
_SLACK = tl.constexpr(1e-3)
_ROUNDED = tl.constexpr(1e-5)


@triton.jit
def _mix(x):
    """`sampling`'s hash of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(keys, positions, row, token, SHIFT: tl.constexpr, STEP: tl.constexpr):
    """Between 0 and 1, of one row's tokens, from the hash without its lowest SHIFT bits."""
    position = tl.load(positions + row).to(tl.uint32) * 0x9E3779B1
    first = _mix(tl.load(keys + 2 * row).to(tl.uint32) ^ position)
    second = _mix(tl.load(keys + 2 * row + 1).to(tl.uint32) + first)
    x = _mix(token.to(tl.uint32) * 0x85EBCA77 + 374761393) ^ first
    x = (x ^ (x >> 16)) * 0x85EBCA6B + second
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x >> SHIFT).to(tl.float32) + 0.5) * STEP


@triton.jit
def _log(x, FAST: tl.constexpr):
    """To within 2^-22 of log2, absolute near 1 and relative elsewhere, if FAST."""
    if FAST:
        return libdevice.fast_log2f(x) * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def _near_noise(uniform, FAST: tl.constexpr):
    """`sampling.gumbel_noise` to within 1e-4: near 1, where logarithms are worst, a series."""
    rest = 1.0 - uniform
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -_log(tl.where(rest < 0.0625, series, -_log(uniform, FAST)), FAST)


@triton.jit
def _first_best(scores, tokens, num_tokens):
    """The lowest of the tokens with the largest score; some token of the row if all are NaN."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, num_tokens - 1), axis=0)


# Alignment of what is read one number at a time must not be a reason to compile again.
@triton.jit(do_not_specialize_on_alignment=["keys", "positions", "greedy", "temperature"])
def draw_pieces(
    logits, keys, positions, greedy, temperature, borders, lasts, piece_tokens, pieces, num_tokens,
    row_stride, TOKENS: tl.constexpr, SHIFT: tl.constexpr, STEP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One program per row and piece of TOKENS tokens.

    borders, lasts: see `filter_kernel.borders_of`; None if no row filters.
    piece_tokens [rows, pieces] int32: of the tokens that are left the one with the best score.
    pieces [rows, pieces, 3] float32: its score, the largest logit, the sum of exponentials.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * TOKENS + tl.arange(0, TOKENS)
    logits += row.to(tl.int64) * row_stride
    given = tl.load(logits + token, token < num_tokens, other=float("-inf"))
    logit = given.to(tl.float32)
    largest = tl.max(logit, axis=0)
    # A piece of tokens without any probability adds none; a row of them has no distribution.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    out = row * tl.num_programs(1) + piece
    tl.store(pieces + 3 * out + 1, largest)
    tl.store(pieces + 3 * out + 2, tl.sum(tl.exp(logit - shift), axis=0))
    best, chosen = _first_best(logit, token, num_tokens)
    heat = tl.load(temperature + row)
    races = (tl.load(greedy + row) == 0) & (best > float("-inf"))
    if borders is not None:
        order, border = in_order(given, heat), tl.load(borders + row)
        left = (order > border) | ((order == border) & (token <= tl.load(lasts + row)))
        any_left = tl.max(left.to(tl.int32), axis=0) > 0
        best = tl.where(races & (any_left == 0), float("-inf"), best)
        races &= any_left
    if races:
        noise = _near_noise(_uniform(keys, positions, row, token, SHIFT, STEP), FAST)
        near = logit * (1.0 / heat) + noise
        if borders is not None:
            near = tl.where(left, near, float("-inf"))
        most = tl.max(near, axis=0)
        slack = tl.minimum(tl.abs(most) * _ROUNDED, 1e30) + _SLACK  # of infinity something
        may_win = near >= most - slack
        if borders is not None:
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
    """Tokens [rows] and their log-probabilities [rows]. One program per row."""
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
    """Token ids [rows] and their log-probabilities [rows] under the untempered model.

    logits [rows, tokens] of any float type, the tokens of a row side by side; keys [rows, 2] and
    positions [rows] as in `Sampler.sample`; greedy [rows] and temperature [rows, 1] as in
    `RowSampling`, and so top_k, top_p and min_p, if some row filters. NaN among a row's logits
    makes its log-probability NaN.
    """
    num_rows, num_tokens = logits.shape
    num_pieces = triton.cdiv(num_tokens, PIECE_TOKENS)
    device = logits.device
    piece_tokens = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=device)
    pieces = torch.empty(num_rows, num_pieces, 3, device=device)
    tokens = torch.empty(num_rows, dtype=torch.long, device=device)
    logprobs = torch.empty(num_rows, device=device)
    greedy, temperature = greedy.contiguous(), temperature.contiguous()
    borders = borders_of(logits, greedy, temperature, *filters) if filters else (None, None)
    draw_pieces[(num_rows, num_pieces)](
        logits, keys.contiguous(), positions.contiguous(), greedy, temperature, *borders,
        piece_tokens, pieces, num_tokens, logits.stride(0),
        TOKENS=PIECE_TOKENS, SHIFT=32 - NOISE_BITS, STEP=2.0**-NOISE_BITS,
        FAST=not is_interpreted() and torch.version.hip is None, num_warps=_PIECE_WARPS,
    )  # fmt: skip
    merge_pieces[(num_rows,)](
        logits, piece_tokens, pieces, tokens, logprobs, num_tokens, logits.stride(0), num_pieces,
        PIECES=triton.next_power_of_2(num_pieces), num_warps=_MERGE_WARPS,
    )  # fmt: skip
    return tokens, logprobs
