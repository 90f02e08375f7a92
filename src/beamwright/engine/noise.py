"""The random streams: Gumbel noise keyed by (seed, lineage, position, token id).

A token's noise is a hash of those four, so a node's tokens do not depend on the batch, and
removing tokens from the vocabulary never shifts the draws of the others
(docs/architecture.md, "Sameness"). Knows no logits and no settings.
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
