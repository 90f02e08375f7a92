"""The random streams: Gumbel noise keyed by (seed, lineage, position, token id); and fast draws.

A token's noise is a hash of those four, so a node's tokens do not depend on the batch, and
removing tokens from the vocabulary never shifts the draws of the others
(docs/concepts/sameness.md).

One row's token from a large vocabulary, on a CPU: Gumbel noise made of 23 bits is bounded both ways
(`MOST_NOISE`, `LEAST_NOISE`): a token whose scaled logit lies further than their difference below
the largest cannot be drawn, and no filter takes the largest away. Where that leaves too many, few
of them have the noise that it takes to beat the best of those with the most. Token for token what
`sampling` draws from the whole row. NumPy finds them faster than torch.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from beamwright.tree.node import Lineage

NOISE_BITS = 23  # u + 0.5 is then exact in float32, so noise is always finite
MOST_NOISE = -math.log(-math.log1p(-(2.0 ** -(NOISE_BITS + 1))))
LEAST_NOISE = -math.log((NOISE_BITS + 1) * math.log(2))

_ROUNDING = 1e-5  # of sums and quotients in float32, relative, and then some
_FEW = 0.1  # of the tokens; beyond, whole rows are about as fast
_TRIED_FIRST = 256  # tokens, those with the most noise

HashWords: TypeAlias = npt.NDArray[np.uint32]
"""A word for each token [tokens]: the upper `NOISE_BITS` of each make its noise."""


def lineage_key(seed: int, lineage: Lineage, purpose: str = "") -> tuple[int, int]:
    """Two signed 32-bit keys of one node's random stream.

    purpose: a tag for streams beside the tree's own (rollouts, revisions).
    """
    text = "\x1f".join([str(seed), purpose, *(f"{type(x).__name__}:{x}" for x in lineage)])
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    first, second = struct.unpack("<ii", digest)
    return first, second


def stack_keys(keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """[rows, 2] int32 of several nodes' keys."""
    return torch.tensor(list(keys), dtype=torch.int32, device=device)


def spread_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids [tokens] as well-mixed int32, once per vocabulary."""
    return _mix(token_ids.to(torch.int32) * -2048144777 + 374761393)


def gumbel_noise(keys: torch.Tensor, positions: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [rows, tokens] in float32.

    keys: [rows, 2] int32 from `lineage_key`; positions: [rows]; spread: `spread_tokens`.
    """
    first, second = row_words(keys, positions)
    return noise_of(first.unsqueeze(1), second.unsqueeze(1), spread)


def row_words(keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What two rounds of a row's hash start with [rows], int32."""
    first = _mix(keys[:, 0] ^ (positions.to(torch.int32) * -1640531535))
    return first, _mix(keys[:, 1] + first)


def noise_of(first: torch.Tensor, second: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """The noise of tokens, for the words of one row or of several."""
    # Two multiply rounds with a key before each. Rows and tokens come in mixed already, and only
    # the high bits are used, so a third xor-shift would change nothing that can be seen. In place:
    # this is [rows, vocabulary], and runs once per token.
    x = spread ^ first
    x.bitwise_xor_(_shift(x, 16)).mul_(-2048144789).add_(second)
    x.bitwise_xor_(_shift(x, 13)).mul_(-1028477387)
    uniform = _shift(x, 32 - NOISE_BITS).float().add_(0.5).mul_(2.0**-NOISE_BITS)
    return uniform.log_().neg_().log_().neg_()


class RowStream(NamedTuple):
    """One row's noise. words: its `row_words`; spread: `spread_tokens`, on a CPU."""

    words: tuple[int, int]
    spread: torch.Tensor

    def noise(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of these tokens, float32."""
        first, second = torch.tensor(self.words, dtype=torch.int32)
        return noise_of(first, second, self.spread[token_ids])

    def hashed(self) -> HashWords:
        """The same hash of all tokens, without the logarithms. NumPy is faster than torch here."""
        first, second = (np.uint32(word & 0xFFFFFFFF) for word in self.words)
        x: HashWords = self.spread.numpy().view(np.uint32) ^ first
        shifted = x >> 16
        x ^= shifted
        x *= np.uint32(-2048144789 & 0xFFFFFFFF)
        x += second
        np.right_shift(x, 13, out=shifted)
        x ^= shifted
        x *= np.uint32(-1028477387 & 0xFFFFFFFF)
        return x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32 (the tensor type has only the arithmetic one)."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3; int32 multiplication wraps."""
    x = (x ^ _shift(x, 16)) * -2048144789
    x = (x ^ _shift(x, 13)) * -1028477387
    return x ^ _shift(x, 16)


# --- one row's token ----------------------------------------------------------------------------


class RowWay(NamedTuple):
    """How a row draws. Filters that it does not use: top_k 0, top_p infinity, min_p 0."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def draw_candidate(logits: torch.Tensor, way: RowWay, stream: RowStream) -> int | None:
    """The token drawn from logits [tokens] in float32, or None: ask the whole row."""
    scaled = logits / way.temperature
    highest = float(scaled.amax())
    if not math.isfinite(highest):
        return None
    least = _below(highest, MOST_NOISE - LEAST_NOISE)
    if way.min_p:
        least = max(least, _below(highest, -math.log(way.min_p)))
    few = int(_FEW * len(scaled))
    tokens = _not_below(least, scaled)
    if len(tokens) > few and way.top_k:
        tokens = _top(scaled, way.top_k)
    if len(tokens) > few:
        if way.top_k or way.top_p < math.inf or way.min_p:
            return None
        return _loudest(scaled, highest, stream)
    return _best(_filtered(tokens, scaled, highest, way), scaled, stream)[0]


def _below(highest: float, distance: float) -> float:
    """So far below, and as much further as rounding may hide."""
    return highest - distance - _ROUNDING * (2 * abs(highest) + abs(distance) + 1)


def _not_below(least: float, scaled: torch.Tensor) -> torch.Tensor:
    """Tokens whose scaled logit is at least so large, ascending."""
    return torch.from_numpy(np.flatnonzero(scaled.numpy() >= least))


def _top(scaled: torch.Tensor, top_k: int) -> torch.Tensor:
    """What top-k leaves of a whole row, ascending."""
    return _not_below(float(scaled.topk(min(top_k, len(scaled))).values[-1]), scaled)


def _best(tokens: torch.Tensor, scaled: torch.Tensor, stream: RowStream) -> tuple[int, float]:
    """The token that wins among these, ascending, and its noisy logit."""
    noisy = stream.noise(tokens).add_(scaled[tokens])
    place = int(noisy.argmax())
    return int(tokens[place]), float(noisy[place])


def _loudest(scaled: torch.Tensor, highest: float, stream: RowStream) -> int | None:
    """The token drawn, found among those with the most noise; None if that takes most of them."""
    hashed, size = stream.hashed(), len(scaled)
    first = 1 - min(_TRIED_FIRST / size, 1)
    tokens = _at_least(first, hashed)
    if not len(tokens):
        return None
    token, noisy = _best(tokens, scaled, stream)
    # Whoever beats it has more noise than its lead over the largest logit.
    lead = _below(noisy, highest + _ROUNDING * abs(highest))
    needed = math.exp(-math.exp(-lead)) if lead > LEAST_NOISE else 0.0
    if 1 - needed > _FEW:
        return None
    return token if needed >= first else _best(_at_least(needed, hashed), scaled, stream)[0]


def _at_least(uniform: float, hashed: HashWords) -> torch.Tensor:
    """Tokens whose uniform number is at least so large, give or take a few steps of it."""
    step = max(int(uniform * 2**NOISE_BITS) - 4, 0)
    return torch.from_numpy(np.flatnonzero(hashed >= np.uint32(step << (32 - NOISE_BITS))))


def _filtered(
    tokens: torch.Tensor, scaled: torch.Tensor, highest: float, way: RowWay
) -> torch.Tensor:
    """The tokens, ascending, that top-k, top-p and min-p leave, in that order."""
    all_of_top_k = 0 < way.top_k <= len(tokens)
    if all_of_top_k:
        values = scaled[tokens]
        tokens = tokens[values >= values.topk(way.top_k).values[-1]]
    if way.top_p < math.inf:
        whole = scaled
        if all_of_top_k or 0 < way.top_k < len(scaled):
            whole = scaled[tokens if all_of_top_k else _top(scaled, way.top_k)]
        ordered, index = scaled[tokens].sort(descending=True, stable=True)
        probs = (ordered - highest).exp_().div_((whole - highest).exp_().sum())
        kept = probs.cumsum(-1) - probs < way.top_p
        tokens = tokens[torch.zeros_like(kept).scatter_(0, index, kept)]
    if way.min_p:
        probs = scaled[tokens].softmax(-1)
        tokens = tokens[probs >= probs.amax() * way.min_p]
    return tokens
