"""Measured ceilings. The only file of this room that imports torch, and only when it measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from beamwright.plan.machines import HardwareProfile

_COPY_PIECE_BYTES = 2**19  # a KV block of a large model
_DECODE_ROWS = 32
# Operator calls of one layer of this package's decoder in one decode step (docs/experiments.md).
_DECODE_OPS_PER_LAYER = 35


@dataclass(frozen=True)
class ProbeSizes:
    """How much a probe works. The defaults exceed the caches and take about two seconds."""

    gemm_size: int = 1024
    read_bytes: int = 2**28
    copy_bytes: int = 2**27
    num_small_ops: int = 2000
    repeats: int = 7


def measure_gemm_flops(size: int = 1024, repeats: int = 12) -> float:
    """Best float32 matrix-product rate in FLOP/s over a few square products."""
    import torch  # noqa: PLC0415 (the room above must import without torch)

    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _best_s(lambda: left @ right, repeats)


def measure_profile(sizes: ProbeSizes | None = None, name: str = "measured") -> HardwareProfile:
    """The profile of this machine's CPU, in float32.

    Device and host memory are the same RAM here; the link is a copy made by another thread.
    """
    sizes = sizes or ProbeSizes()
    peak_flops = measure_gemm_flops(sizes.gemm_size, sizes.repeats)
    decode_flops = _few_rows_flops(sizes.gemm_size, sizes.repeats)
    copy_bandwidth, copy_launch_s = _copy_costs(sizes)
    return HardwareProfile(
        name=name,
        device_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        device_bandwidth=_read_bandwidth(sizes),
        flops=max(peak_flops, decode_flops),
        h2d_bandwidth=copy_bandwidth,
        d2h_bandwidth=copy_bandwidth,
        launch_s=_small_op_s(sizes),
        copy_launch_s=copy_launch_s,
        decode_ops_per_layer=_DECODE_OPS_PER_LAYER,
        # The rates above were reached by the very kind of work that they stand for.
        bandwidth_share=1.0,
        copies_share=1.0,
        flops_share=min(1.0, decode_flops / peak_flops),
        link_share=1.0,
        element_bytes=4,
    )


def _few_rows_flops(size: int, repeats: int) -> float:
    """FLOP/s of a product with as many rows as a decode step has beams."""
    import torch  # noqa: PLC0415

    weight, rows = torch.randn(size, size), torch.randn(_DECODE_ROWS, size)
    took_s = _best_s(lambda: torch.nn.functional.linear(rows, weight), 4 * repeats)
    return 2 * _DECODE_ROWS * size**2 / took_s


def _read_bandwidth(sizes: ProbeSizes) -> float:
    """Bytes/s of a matrix-vector product, which reads its matrix once as decoding reads weights."""
    import torch  # noqa: PLC0415

    columns = 4096
    matrix = torch.ones(max(1, sizes.read_bytes // (4 * columns)), columns)
    vector = torch.ones(columns)
    return matrix.numel() * 4 / _best_s(lambda: matrix @ vector, sizes.repeats)


def _copy_costs(sizes: ProbeSizes) -> tuple[float, float]:
    """(bytes/s, seconds per queued copy) of a background thread that copies KV blocks."""
    import numpy as np  # noqa: PLC0415

    num_pieces = max(1, sizes.copy_bytes // _COPY_PIECE_BYTES)
    source = np.ones((num_pieces, _COPY_PIECE_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)

    def copy_all() -> None:
        for piece in range(num_pieces):
            np.copyto(target[piece], source[piece])

    with ThreadPoolExecutor(max_workers=1) as thread:
        rate = source.nbytes / _best_s(lambda: thread.submit(copy_all).result(), sizes.repeats)

        def queue_tiny() -> None:
            tiny = [thread.submit(np.copyto, target[0, :64], source[0, :64]) for _ in range(100)]
            for each in tiny:
                each.result()

        return rate, _best_s(queue_tiny, sizes.repeats) / 100


def _small_op_s(sizes: ProbeSizes) -> float:
    """Mean seconds of operators as a decoder uses them, on tensors so small that launches rule."""
    import torch  # noqa: PLC0415

    rows, weight = torch.ones(8, 32), torch.ones(32, 32)

    def run_all() -> None:
        for _ in range(max(1, sizes.num_small_ops // 5)):
            product = torch.nn.functional.linear(rows, weight)
            both = torch.stack([product[:, :16], rows[:, :16]], dim=1)
            scores = torch.softmax(both, dim=-1)
            torch.addcmul(product, rows, rows)
            scores.sum(dim=1)

    return _best_s(run_all, sizes.repeats) / (5 * max(1, sizes.num_small_ops // 5))


def _best_s(work: Callable[[], object], repeats: int) -> float:
    """Least seconds of a few runs: what disturbs a run only ever slows it down."""
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
