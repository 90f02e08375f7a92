"""Measured ceilings. The only file of this room that imports torch, and only when it measures."""

from __future__ import annotations

import time


def measure_gemm_flops(size: int = 1024, repeats: int = 12) -> float:
    """Best float32 matrix-product rate in FLOP/s over a few square products."""
    import torch  # noqa: PLC0415 (the room above must import without torch)

    left, right = torch.randn(size, size), torch.randn(size, size)
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        left @ right
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s
