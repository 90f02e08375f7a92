"""One row's token from a large vocabulary: noise and filters for the tokens that can win.

Gumbel noise made of 23 bits is bounded both ways (`MOST_NOISE`, `LEAST_NOISE`): a token whose
scaled logit lies further than their difference below the largest cannot be drawn, and no filter
takes the largest away. Where that leaves too many, few of them have the noise that it takes to
beat the best of those with the most. Token for token what `sampling` draws from the whole row.
For CPUs: the host reads how many candidates there are. NumPy finds them faster than torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from beamwright.engine.noise import LEAST_NOISE, MOST_NOISE, NOISE_BITS, HashWords, RowStream

_ROUNDING = 1e-5  # of sums and quotients in float32, relative, and then some
_FEW = 0.1  # of the tokens; beyond, whole rows are about as fast
_TRIED_FIRST = 256  # tokens, those with the most noise


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
