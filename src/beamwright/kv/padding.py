"""Lengths that keys are padded to, so that a row's sums do not depend on how long others' are.

With zeros behind a row's own tokens its sums are the same at every length given here, because

- sums of vectors go to four accumulators in turn, and a rest of fewer than four vectors to the
  first: a length holds a multiple of four vectors, or is so short that all is rest;
- a product below some size is torch's own loop, which rounds differently: heads of few dimensions
  get more tokens;
- MKL cuts the sums of a product at 192 tokens, but in halves where fewer than 384 are left (seen on
  a CPU with AVX2 alone, four queries or more per head).

The start-up self-test asks the machine at hand.
"""

from __future__ import annotations

_LEAST_PRODUCT = 400
_SHORTEST = 16


def padded_tail(count: int, head_dim: int) -> int:
    """16, 32, 64, 128, 256: no tail is longer, and 192 and 256 do not go together."""
    tokens = _least(head_dim)
    while tokens < count:
        tokens *= 2
    return tokens


def padded_path(count: int, head_dim: int) -> int:
    """16, 32, 64, 128, 192, and from 384 on multiples of 64."""
    tokens = max(padded_tail(min(count, 64), head_dim), -(-count // 64) * 64 if count > 64 else 0)
    return 384 if 192 < tokens < 384 else tokens


def _least(head_dim: int) -> int:
    tokens = _SHORTEST
    while tokens * head_dim <= _LEAST_PRODUCT:
        tokens *= 2
    return tokens
