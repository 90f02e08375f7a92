"""Counter-based random numbers for sampling, and a fast way to sample one row on a CPU.

A token's Gumbel noise is a hash of (seed, lineage, position, token id). A node's tokens therefore
do not depend on the batch, and removing tokens from the vocabulary never changes the noise of the
others (docs/concepts/sameness.md).

`RowSampler` samples one row's token from a large vocabulary on a CPU without computing all noise.
Gumbel noise from 23 bits is bounded on both sides (`MOST_NOISE`, `LEAST_NOISE`). A token cannot be
sampled if its scaled logit is below the largest one by more than the difference of these bounds,
because no filter removes the largest. If too many tokens remain, the token is found by its noise:
first the best of some tokens is computed, then only tokens with enough noise to beat that one. The
result equals sampling from the whole row, token for token. NumPy finds these tokens faster than
torch, and without threads of its own, so that several threads can sample.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from beamwright.tree.node import Lineage

NOISE_BITS = 23  # u + 0.5 is then exact in float32, so noise is always finite
MOST_NOISE = -math.log(-math.log1p(-(2.0 ** -(NOISE_BITS + 1))))
LEAST_NOISE = -math.log((NOISE_BITS + 1) * math.log(2))

_ROUNDING = 1e-5  # bound on the relative rounding error of float32 sums and quotients
# The largest shares of a row's tokens that are worth picking out:
_MOST_FILTERED = 0.1  # with filters; beyond it, computing the whole row is about as fast
_MOST_LIKELY = 0.01  # without filters, by logits; beyond it, hashing all tokens is faster
_MOST_LOUD = 0.1  # without filters, by noise; beyond it, computing the whole row is about as fast
_NEAR = 4.0  # distance of scaled logits below the largest one that counts as likely
_TRIED_FIRST = 256  # tokens with the most noise that are tried first if many are likely

# A hash word per token [tokens]; its upper `NOISE_BITS` bits make the token's noise.
HashWords: TypeAlias = npt.NDArray[np.uint32]
Logits: TypeAlias = npt.NDArray[np.float32]
# Token ids in ascending order.
TokenIds: TypeAlias = npt.NDArray[np.int64]


def lineage_key(seed: int, lineage: Lineage, purpose: str = "") -> tuple[int, int]:
    """Return the two signed 32-bit keys of a node's random numbers.

    purpose: a tag for random numbers besides those of the node's step (rollouts, revisions).
    """
    text = "\x1f".join([str(seed), purpose, *[f"{type(x).__name__}:{x}" for x in lineage]])
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    first, second = struct.unpack("<ii", digest)
    return first, second


def stack_keys(keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return several nodes' keys as an int32 tensor [rows, 2]."""
    return torch.tensor(list(keys), dtype=torch.int32, device=device)


def spread_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """Return hashes of token ids [tokens], int32; computed once per vocabulary."""
    return _mix(token_ids.to(torch.int32) * -2048144777 + 374761393)


def gumbel_noise(keys: torch.Tensor, positions: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise [rows, tokens] in float32.

    keys: [rows, 2] int32 from `lineage_key`.
    positions: [rows].
    spread: result of `spread_tokens`.
    """
    first, second = row_words(keys, positions)
    # Two rounds of multiplication, each with a key before it. Rows and tokens are mixed already,
    # and only the high bits are used, so a third xor-shift would have no visible effect. In place,
    # because x is [rows, vocabulary] and this runs once per token.
    x = spread ^ first.unsqueeze(1)
    x.bitwise_xor_(_shift(x, 16)).mul_(-2048144789).add_(second.unsqueeze(1))
    x.bitwise_xor_(_shift(x, 13)).mul_(-1028477387)
    return _gumbel(_shift(x, 32 - NOISE_BITS).float())


def row_words(keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's part of the hash: two int32 words [rows], one for each of its two rounds."""
    first = _mix(keys[:, 0] ^ (positions.to(torch.int32) * -1640531535))
    return first, _mix(keys[:, 1] + first)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Turn random bits into Gumbel noise, in place.

    bits: whole numbers of `NOISE_BITS` bits in float32.
    """
    return bits.add_(0.5).mul_(2.0**-NOISE_BITS).log_().neg_().log_().neg_()


def half_spread(spread: torch.Tensor) -> HashWords:
    """Return `spread_tokens` after the hash's first xor-shift, which is the same for all rows.

    The shift is linear over xor, so a row's word can be combined with the result later.
    """
    words: HashWords = spread.numpy().view(np.uint32)
    return words ^ (words >> np.uint32(16))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of int32; torch has only the arithmetic one."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the 32-bit finaliser of MurmurHash3; int32 multiplication wraps."""
    x = (x ^ _shift(x, 16)) * -2048144789
    x = (x ^ _shift(x, 13)) * -1028477387
    return x ^ _shift(x, 16)


# --- one row's token ----------------------------------------------------------------------------


@dataclass
class RowSampler:
    """Sampler of one row's token from logits [tokens], on a CPU.

    words: the row's `row_words`. half: the `half_spread` of the vocabulary.
    top_k, top_p, min_p: the filters; 0, infinity and 0 turn them off.
    """

    logits: Logits
    words: tuple[int, int]
    half: HashWords
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    def sample(self) -> int | None:
        """Return the sampled token; None if the whole row must be computed."""
        if not math.isfinite(self._highest):
            return None
        filters = self.top_k or self.top_p < math.inf or self.min_p
        few = int((_MOST_FILTERED if filters else _MOST_LIKELY) * len(self.logits))
        distance = MOST_NOISE - LEAST_NOISE
        distance = min(distance, -math.log(self.min_p)) if self.min_p else distance
        tokens = self._tokens_near_largest(distance, few)
        if tokens is None and self.top_k:
            tokens = _indices_if_few(self._top_k_mask(self._whole).numpy(), few)
        if tokens is not None:
            return self._find_best(self._filter_tokens(tokens))[0]
        return None if filters else self._sample_by_noise(few)

    def _scale_logits(self, tokens: Any) -> Any:
        """Return the logits of these tokens, divided by the temperature."""
        with np.errstate(over="ignore"):
            return self.logits[tokens] / np.float32(self.temperature)

    @cached_property
    def _highest(self) -> float:
        return float(self._scale_logits(self.logits.argmax()))

    @cached_property
    def _whole(self) -> torch.Tensor:
        return torch.from_numpy(self._scale_logits(slice(None)))

    def _hash_tokens(self, tokens: TokenIds | None = None) -> HashWords:
        """Return hash words as in `gumbel_noise`, before the logarithms. tokens: None for all."""
        first, second = (np.uint32(word & 0xFFFFFFFF) for word in self.words)
        half = self.half if tokens is None else self.half[tokens]
        x: HashWords = half ^ (first ^ (first >> 16))
        x *= np.uint32(-2048144789 & 0xFFFFFFFF)
        x += second
        x ^= x >> 13
        x *= np.uint32(-1028477387 & 0xFFFFFFFF)
        return x

    def _tokens_near_largest(self, distance: float, most: int) -> TokenIds | None:
        """Return the tokens whose scaled logit is within `distance` of the largest one.

        None if there are more than `most`. Rounding may add tokens that are slightly further away.
        """
        least = _below(self._highest, distance) * float(np.float32(self.temperature))
        return _indices_if_few(self.logits >= np.float32(least), most)

    def _top_k_mask(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return a mask of the logits that top-k keeps."""
        return scaled >= scaled.topk(min(self.top_k, len(scaled))).values[-1]

    def _find_best(self, tokens: TokenIds, hashed: HashWords | None = None) -> tuple[int, float]:
        """Return the token with the largest noisy logit among `tokens`, and that logit.

        hashed: hash words of all tokens, if already computed.
        """
        words = self._hash_tokens(tokens) if hashed is None else hashed[tokens]
        noise = _gumbel(torch.from_numpy((words >> (32 - NOISE_BITS)).astype(np.float32)))
        noisy = noise.numpy() + self._scale_logits(tokens)
        place = int(noisy.argmax())
        return int(tokens[place]), float(noisy[place])

    def _sample_by_noise(self, few: int) -> int | None:
        """Return the sampled token, searched among tokens with much noise; None if too many."""
        hashed, first = self._hash_tokens(), 1.0
        tried, distance = self._tokens_near_largest(_NEAR, few), _NEAR
        if tried is None:
            first, distance = 1 - min(_TRIED_FIRST / len(hashed), 1), 0.0
            tried = _tokens_with_noise(first, hashed)
        if not len(tried):
            return None
        best = self._find_best(tried, hashed)
        # A token that beats `best` needs noise above the lead of `best` over the other logits.
        lead = _below(best[1], self._highest + _ROUNDING * abs(self._highest) - distance)
        needed = math.exp(-math.exp(-lead)) if lead > LEAST_NOISE else 0.0
        if 1 - needed > _MOST_LOUD:
            return None
        loud = _tokens_with_noise(needed, hashed) if needed < first else tried[:0]
        if len(loud):
            best = max(best, self._find_best(loud, hashed), key=lambda each: (each[1], -each[0]))
        return best[0]

    def _filter_tokens(self, tokens: TokenIds) -> TokenIds:
        """Return the tokens that top-k, top-p and min-p keep, applied in this order."""
        scaled, all_of_top_k = torch.from_numpy(self._scale_logits(tokens)), False
        if 0 < self.top_k <= len(tokens):
            kept, all_of_top_k = self._top_k_mask(scaled), True
            tokens, scaled = tokens[kept.numpy()], scaled[kept]
        if self.top_p < math.inf:
            whole = scaled if all_of_top_k else self._whole
            if self.top_k and not all_of_top_k:
                whole = whole[self._top_k_mask(whole)]
            ordered, index = scaled.sort(descending=True, stable=True)
            probs = (ordered - self._highest).exp_().div_((whole - self._highest).exp_().sum())
            kept = probs.cumsum(-1) - probs < self.top_p
            kept = torch.zeros_like(kept).scatter_(0, index, kept)
            tokens, scaled = tokens[kept.numpy()], scaled[kept]
        if self.min_p:
            probs = scaled.softmax(-1)
            tokens = tokens[(probs >= probs.amax() * self.min_p).numpy()]
        return tokens


def _below(highest: float, distance: float) -> float:
    """Return `highest - distance`, lowered by the largest possible rounding error."""
    return highest - distance - _ROUNDING * (2 * abs(highest) + abs(distance) + 1)


def _indices_if_few(chosen: npt.NDArray[np.bool_], most: int) -> TokenIds | None:
    """Return the indices of the chosen tokens; None if there are more than `most`."""
    return np.flatnonzero(chosen) if np.count_nonzero(chosen) <= most else None


def _tokens_with_noise(uniform: float, hashed: HashWords) -> TokenIds:
    """Return the tokens whose uniform number is at least `uniform`, less a margin for rounding."""
    step = max(int(uniform * 2**NOISE_BITS) - 4, 0)
    return np.flatnonzero(hashed >= np.uint32(step << (32 - NOISE_BITS)))
