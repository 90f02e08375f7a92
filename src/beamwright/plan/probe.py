"""Measured ceilings. The only file of this room that imports torch, and only when it measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from beamwright.plan.machines import HardwareProfile

_COPY_PIECE_BYTES = 2**19  # a KV block of a large model
_DECODE_ROWS = 32
# Operator calls of one layer in one decode step (docs/log/2026-11-21-where-a-step-goes.md).
_DECODE_OPS_PER_LAYER = 35


def measure_profile(
    *,
    gemm_size: int = 1024,
    read_bytes: int = 2**28,
    copy_bytes: int = 2**27,
    num_small_ops: int = 2000,
    repeats: int = 7,
) -> HardwareProfile:
    """The profile of this machine's CPU, in float32.

    Device and host memory are the same RAM here; the link is a copy made by another thread. The
    sizes exceed the caches, and take about two seconds.
    """
    import torch  # noqa: PLC0415 (the room above must import without torch)

    left, right = torch.randn(gemm_size, gemm_size), torch.randn(gemm_size, gemm_size)
    peak_flops = 2 * gemm_size**3 / _best_s(lambda: left @ right, repeats)
    rows, linear = torch.randn(_DECODE_ROWS, gemm_size), torch.nn.functional.linear
    decode_s = _best_s(lambda: linear(rows, left), 4 * repeats)
    decode_flops = 2 * _DECODE_ROWS * gemm_size**2 / decode_s
    # A matrix-vector product reads its matrix once, as decoding reads weights.
    matrix, vector = torch.ones(max(1, read_bytes // 2**14), 2**12), torch.ones(2**12)
    bandwidth = matrix.numel() * 4 / _best_s(lambda: matrix @ vector, repeats)
    copy_bandwidth, copy_launch_s = _copy_costs(copy_bytes, repeats)
    return HardwareProfile(
        name="measured",
        device_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        device_bandwidth=bandwidth,
        flops=max(peak_flops, decode_flops),
        h2d_bandwidth=copy_bandwidth,
        d2h_bandwidth=copy_bandwidth,
        launch_s=_small_op_s(num_small_ops, repeats),
        copy_launch_s=copy_launch_s,
        decode_ops_per_layer=_DECODE_OPS_PER_LAYER,
        # The rates above were reached by the very kind of work that they stand for.
        bandwidth_share=1.0,
        copies_share=1.0,
        flops_share=min(1.0, decode_flops / peak_flops),
        link_share=1.0,
        element_bytes=4,
    )


def _copy_costs(copy_bytes: int, repeats: int) -> tuple[float, float]:
    """(bytes/s, seconds per queued copy) of a background thread that copies KV blocks."""
    import numpy as np  # noqa: PLC0415

    num_pieces = max(1, copy_bytes // _COPY_PIECE_BYTES)
    source = np.ones((num_pieces, _COPY_PIECE_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)

    def copy_all() -> None:
        for piece in range(num_pieces):
            np.copyto(target[piece], source[piece])

    with ThreadPoolExecutor(max_workers=1) as thread:
        rate = source.nbytes / _best_s(lambda: thread.submit(copy_all).result(), repeats)

        def queue_tiny() -> None:
            tiny = [thread.submit(np.copyto, target[0, :64], source[0, :64]) for _ in range(100)]
            for copy in tiny:
                copy.result()

        return rate, _best_s(queue_tiny, repeats) / 100


def _small_op_s(num_ops: int, repeats: int) -> float:
    """Mean seconds of operators as a decoder uses them, on tensors so small that launches rule."""
    import torch  # noqa: PLC0415

    rows, weight = torch.ones(8, 32), torch.ones(32, 32)
    rounds = max(1, num_ops // 5)

    def run_all() -> None:
        for _ in range(rounds):
            product = torch.nn.functional.linear(rows, weight)
            both = torch.stack([product[:, :16], rows[:, :16]], dim=1)
            scores = torch.softmax(both, dim=-1)
            torch.addcmul(product, rows, rows)
            scores.sum(dim=1)

    return _best_s(run_all, repeats) / (5 * rounds)


def _best_s(work: Callable[[], object], repeats: int) -> float:
    """Least seconds of a few runs: what disturbs a run only ever slows it down."""
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
