"""What the hardware can do, measured: copies, matrix products, the link's peak, launches.

Random data everywhere: zeros can be faster than anything real. Best of a few repeats, because what
disturbs a copy only slows it down. On a CPU both tiers are RAM, so that the same code runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from beamwright_lab.gpu.context import synchronize

_TILE_BYTES = 2**24


@dataclass(frozen=True)
class Sizes:
    """How much each measurement works. The defaults are several times a large card's cache."""

    copy_bytes: int = 2**31
    link_bytes: int = 2**29
    gemm_size: int = 8192
    weight_rows: int = 2**15
    small_ops: int = 2000
    repeats: int = 7


SMOKE = Sizes(2**20, 2**20, 128, 256, 50, 2)


class Timer:
    """Seconds of queued work, by device events on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def once(self, work: Callable[[], object]) -> float:
        """One run, from an idle device to an idle device."""
        synchronize(self.device)
        if self.device == "cpu":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def best(self, work: Callable[[], object], repeats: int) -> float:
        """Least of a few runs, after one that warms up."""
        work()
        return min(self.once(work) for _ in range(repeats))

    def median(self, work: Callable[[], object], repeats: int) -> float:
        """Median of a few runs, after one that warms up."""
        work()
        return statistics.median(self.once(work) for _ in range(repeats))


def random_bytes(num_bytes: int, device: str, *, pinned: bool = False) -> torch.Tensor:
    """Bytes that no compression can shorten."""
    tile = torch.randint(0, 256, (min(num_bytes, _TILE_BYTES),), dtype=torch.uint8, device=device)
    drawn = tile.repeat(-(-num_bytes // len(tile)))[:num_bytes].contiguous()
    return drawn.pin_memory() if pinned else drawn


def copy_bandwidth(device: str, sizes: Sizes) -> float:
    """Bytes/s of a copy within the device, read and written bytes both counted."""
    source = random_bytes(sizes.copy_bytes, device)
    target = torch.empty_like(source)
    took_s = Timer(device).best(lambda: target.copy_(source), sizes.repeats)
    return 2 * sizes.copy_bytes / took_s


def weights_bandwidth(device: str, sizes: Sizes, dtype: torch.dtype, num_rows: int = 16) -> float:
    """Bytes/s at which a product of few rows reads its weights, as decoding does.

    Several weights in turn, so that none of them stays in a cache.
    """
    columns = min(8192, sizes.weight_rows)
    shape = (sizes.weight_rows, columns)
    weights = [torch.randn(shape, device=device).to(dtype) for _ in range(3)]
    rows = torch.randn(num_rows, columns, device=device).to(dtype)

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows, weight)

    num_bytes = sum(weight.nbytes for weight in weights)
    return num_bytes / Timer(device).best(work, sizes.repeats)


def copies_bandwidth(device: str, sizes: Sizes, dtype: torch.dtype) -> float:
    """Bytes/s at which attention of one new token reads a KV copy per row (LBS's layout)."""
    heads, head_dim, length = 32, 128, 1024
    each = 2 * heads * length * head_dim * dtype.itemsize
    rows = max(1, sizes.copy_bytes // each)
    keys, values = (
        torch.randn(rows, heads, length, head_dim, device=device).to(dtype) for _ in range(2)
    )
    query = torch.randn(rows, heads, 1, head_dim, device=device).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    took_s = Timer(device).best(lambda: attend(query, keys, values), sizes.repeats)
    return rows * each / took_s


def gemm_flops(device: str, size: int, dtype: torch.dtype, repeats: int) -> float:
    """FLOP/s of a square product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / Timer(device).best(lambda: left @ right, repeats)


def few_rows_flops(device: str, sizes: Sizes, dtype: torch.dtype) -> float:
    """FLOP/s of a product with as many rows as a prefill chunk, or a large group, has."""
    size, rows = sizes.gemm_size, max(8, sizes.gemm_size // 16)
    weight = torch.randn(size, size, device=device).to(dtype)
    batch = torch.randn(rows, size, device=device).to(dtype)
    took_s = Timer(device).best(
        lambda: torch.nn.functional.linear(batch, weight), 2 * sizes.repeats
    )
    return 2 * rows * size**2 / took_s


def small_op_s(device: str, sizes: Sizes) -> float:
    """Seconds of one operator so small that launching it is all there is."""
    rows = torch.ones(8, 32, device=device)

    def work() -> None:
        for _ in range(sizes.small_ops):
            torch.add(rows, 1.0)

    work()
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - start) / sizes.small_ops


def link_peaks(device: str, sizes: Sizes) -> dict[str, float]:
    """Bytes/s of one large pinned copy each way, and of both at once (their sum)."""
    on_gpu = device != "cpu"
    on_device = [random_bytes(sizes.link_bytes, device) for _ in range(2)]
    on_host = [random_bytes(sizes.link_bytes, "cpu", pinned=on_gpu) for _ in range(2)]
    timer = Timer(device)
    sides = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []

    def to_device() -> None:
        on_device[0].copy_(on_host[0], non_blocking=True)

    def to_host() -> None:
        on_host[1].copy_(on_device[1], non_blocking=True)

    def both() -> None:
        if not on_gpu:
            to_device()
            to_host()
            return
        compute = torch.cuda.current_stream(device)
        for side, copy in zip(sides, (to_device, to_host), strict=True):
            side.wait_stream(compute)
            with torch.cuda.stream(side):
                copy()
        for side in sides:
            compute.wait_stream(side)

    return {
        "h2d": sizes.link_bytes / timer.best(to_device, sizes.repeats),
        "d2h": sizes.link_bytes / timer.best(to_host, sizes.repeats),
        "both": 2 * sizes.link_bytes / timer.best(both, sizes.repeats),
    }
