"""Sizes of KV blocks, and of the buffers beside them, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from beamwright.plan.workload import BLOCK_TOKENS


def choose_block_size(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Choose the KV block size in bytes, and return it with the tokens per block of each group.

    A group is a set of layers with equal KV bytes per token. All groups take blocks from one pool,
    so their blocks have equal bytes.

    sizes: KV bytes per token of each group.

    Tokens per block are powers of two, as the kernels require. The chosen size wastes the fewest
    bytes per token; a tie goes to the size closest to eight tokens per block.
    """

    def tokens(block_bytes: int) -> list[int]:
        return [1 << ((block_bytes // size).bit_length() - 1) for size in sizes]

    def costs(block_bytes: int) -> tuple[float, float]:
        counts = tokens(block_bytes)
        per_token = sum(block_bytes / count for count in counts)
        return per_token, abs(sum(counts) / len(counts) - BLOCK_TOKENS)

    wanted = {size * BLOCK_TOKENS // part for size in sizes for part in (1, 2)}
    best = min((size for size in sorted(wanted) if size >= max(sizes)), key=costs)
    return best, tokens(best)


# Parts into which the attention kernels split a row's path of 4,096 tokens (split-KV decoding).
ROW_PARTS = 32


def attention_partial_bytes(heads: int, head_dim: int) -> int:
    """Return the bytes of the buffer for one row's partial attention results (split-KV decoding).

    Each part of the path, and the row's own tokens, has an output vector and a log-sum-exp in
    float32. Layers run one at a time and share the buffer.
    """
    return (ROW_PARTS + 1) * heads * (head_dim + 1) * 4


def aligned_tensor_bytes(size: Sequence[int], element_bytes: int) -> int:
    """Return the bytes of one tensor in the packed record of a row's recurrent states.

    size: the tensor's shape.

    The bytes are rounded up, so that every tensor begins at a multiple of 16.
    """
    return -(-prod(size) * element_bytes // 16) * 16
