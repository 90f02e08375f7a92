"""`sampling`'s draw for rows without filters, in Triton: one read of the logits, no temporaries.

The vocabulary is cut into pieces of fixed size. Each program finds of one row and piece the token
with the largest noisy logit, and the largest logit and the sum of exponentials that a
log-probability takes; a second kernel merges a row's pieces. So a row's bits are a function of its
own logits and of the vocabulary's size. Loaded only where the kernels run; `sampling` has the
specification. Noise is made of `tl.log`, which compiles to the accurate logarithm that torch has
too: an approximate one is worst near 1, where the winners' noise comes from.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from beamwright.engine.noise import NOISE_BITS

PIECE_TOKENS = 2048
_PIECE_WARPS = 4
_MERGE_WARPS = 1


@triton.jit
def _mix(x):
    """`sampling`'s hash of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _noise(keys, positions, row, token, SHIFT: tl.constexpr, STEP: tl.constexpr):
    """`sampling.gumbel_noise` of one row's tokens, of the hash without its lowest SHIFT bits."""
    position = tl.load(positions + row).to(tl.uint32) * 0x9E3779B1
    first = _mix(tl.load(keys + 2 * row).to(tl.uint32) ^ position)
    second = _mix(tl.load(keys + 2 * row + 1).to(tl.uint32) + first)
    x = _mix(token.to(tl.uint32) * 0x85EBCA77 + 374761393) ^ first
    x = (x ^ (x >> 16)) * 0x85EBCA6B + second
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    uniform = ((x >> SHIFT).to(tl.float32) + 0.5) * STEP
    return -tl.log(-tl.log(uniform))


@triton.jit
def _first_best(scores, tokens, num_tokens):
    """The lowest of the tokens with the largest score; some token of the row if all are NaN."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, num_tokens - 1), axis=0)


# Alignment of what is read one number at a time must not be a reason to compile again.
@triton.jit(do_not_specialize_on_alignment=["keys", "positions", "greedy", "temperature"])
def draw_pieces(
    logits, keys, positions, greedy, temperature, piece_tokens, pieces, num_tokens, row_stride,
    TOKENS: tl.constexpr, SHIFT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per row and piece of TOKENS tokens.

    piece_tokens [rows, pieces] int32: the token with the best score.
    pieces [rows, pieces, 3] float32: its score, the largest logit, the sum of exponentials.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * TOKENS + tl.arange(0, TOKENS)
    place = row.to(tl.int64) * row_stride + token
    logit = tl.load(logits + place, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    noisy = tl.div_rn(logit, tl.load(temperature + row)) + _noise(
        keys, positions, row, token, SHIFT, STEP
    )
    best, chosen = _first_best(
        tl.where(tl.load(greedy + row) != 0, logit, noisy), token, num_tokens
    )
    largest = tl.max(logit, axis=0)
    # A piece of tokens without any probability adds none; a row of them has no distribution.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    out = row * tl.num_programs(1) + piece
    tl.store(piece_tokens + out, chosen)
    tl.store(pieces + 3 * out, best)
    tl.store(pieces + 3 * out + 1, largest)
    tl.store(pieces + 3 * out + 2, tl.sum(tl.exp(logit - shift), axis=0))


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
    logits: Tensor, keys: Tensor, positions: Tensor, greedy: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Token ids [rows] and their log-probabilities [rows] under the untempered model.

    logits [rows, tokens] of any float type, the tokens of a row side by side; keys [rows, 2] and
    positions [rows] as in `Sampler.sample`; greedy [rows] and temperature [rows, 1] as in
    `RowSampling`. NaN among a row's logits makes its log-probability NaN.
    """
    num_rows, num_tokens = logits.shape
    num_pieces = triton.cdiv(num_tokens, PIECE_TOKENS)
    device = logits.device
    piece_tokens = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=device)
    pieces = torch.empty(num_rows, num_pieces, 3, device=device)
    tokens = torch.empty(num_rows, dtype=torch.long, device=device)
    logprobs = torch.empty(num_rows, device=device)
    draw_pieces[(num_rows, num_pieces)](
        logits, keys.contiguous(), positions.contiguous(), greedy.contiguous(),
        temperature.contiguous(), piece_tokens, pieces, num_tokens, logits.stride(0),
        TOKENS=PIECE_TOKENS, SHIFT=32 - NOISE_BITS, STEP=2.0**-NOISE_BITS, num_warps=_PIECE_WARPS,
    )  # fmt: skip
    merge_pieces[(num_rows,)](
        logits, piece_tokens, pieces, tokens, logprobs, num_tokens, logits.stride(0), num_pieces,
        PIECES=triton.next_power_of_2(num_pieces), num_warps=_MERGE_WARPS,
    )  # fmt: skip
    return tokens, logprobs
