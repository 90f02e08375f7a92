"""Tile sizes of the kernels: constants of the model's shape, never of the batch.

A tile decides in which order a row's sums are taken, so it may depend on nothing that changes with
who else is decoded (docs/architecture.md, "Sameness").
"""

from __future__ import annotations

from dataclasses import dataclass

_STAGE_BYTES = 32 * 1024
"""Keys and values of one tile: two such stages fit the shared memory of every card since Ampere."""
_LEAST = 16  # a matrix instruction's rows, and the least depth of a product
_LARGE_ACCUMULATOR = 64 * 128


@dataclass(frozen=True)
class HeadLayout:
    """Heads of one layer: `group` query heads read each KV head."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Tile:
    """Sizes of one program.

    pairs: (query token, head of the group) pairs, the rows of the matrix products.
    queries: whole query tokens that fit in `pairs`.
    tokens: keys per step of the loop.
    dim: head_dim, padded to a power of two.
    """

    pairs: int
    queries: int
    tokens: int
    dim: int
    warps: int
    stages: int


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and at least `least`."""
    return max(least, 1 << max(0, value - 1).bit_length())


def decode_tile(heads: HeadLayout, element_bytes: int) -> Tile:
    """Few queries per key: small groups get few rows, as the rest of a tile would be idle."""
    pairs = 16 if heads.group <= 2 else 32 if heads.group <= 4 else 64
    return _tile(heads, element_bytes, 16 if element_bytes == 4 else pairs)


def prefill_tile(heads: HeadLayout, element_bytes: int) -> Tile:
    """Many queries per key. float32 has no matrix unit, and larger tiles spill registers."""
    return _tile(heads, element_bytes, 16 if element_bytes == 4 else 64)


def _tile(heads: HeadLayout, element_bytes: int, pairs: int) -> Tile:
    pairs = max(pairs, power_of_two(heads.group))
    dim = power_of_two(heads.head_dim, _LEAST)
    tokens = min(64, max(_LEAST, _STAGE_BYTES // (2 * dim * element_bytes)))
    warps = 8 if pairs * dim > _LARGE_ACCUMULATOR else 4
    return Tile(pairs, pairs // heads.group, tokens, dim, warps, stages=2)
