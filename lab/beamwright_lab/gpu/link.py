"""Stage `link`: measure peak rates of the card and its link, and our KV transfers against them.

They become the hardware profile that the simulator uses in this run. Peak rates need torch only.
Data are random, as zeros can be faster; the best of a few repeats counts, because disturbances only
slow a copy down. On a CPU both tiers are RAM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from beamwright_lab.gpu.context import Context, device_name, one_line, release, synchronize

if TYPE_CHECKING:
    from beamwright.plan.machines import HardwareProfile

# Operators per layer of a decode step without graphs (docs/log/2026-11.md#where-a-step-goes).
_DECODE_OPS_PER_LAYER = 35


def run(context: Context) -> dict[str, Any]:
    """Return rates, link peaks, transfers and the hardware profile."""
    sizes = SMOKE if context.smoke else Sizes()
    device = context.device
    half = torch.bfloat16 if context.on_gpu else torch.float32
    data: dict[str, Any] = {"dtype": str(half).removeprefix("torch.")}
    rates: dict[str, float] = {}
    data["rates"] = rates
    for name, measure in (
        ("copy_bandwidth", lambda: copy_bandwidth(device, sizes)),
        ("weights_bandwidth", lambda: weights_bandwidth(device, sizes, half)),
        ("copies_bandwidth", lambda: copies_bandwidth(device, sizes, half)),
        ("gemm_flops", lambda: gemm_flops(device, sizes.gemm_size, half, sizes.repeats)),
        (
            "gemm_flops_float32",
            lambda: gemm_flops(device, sizes.gemm_size // 2, torch.float32, sizes.repeats),
        ),
        ("few_rows_flops", lambda: few_rows_flops(device, sizes, half)),
        ("small_op_s", lambda: small_op_s(device, sizes)),
    ):
        try:
            rates[name] = measure()
        except Exception as error:
            data.setdefault("errors", {})[name] = one_line(error)
        release(device)
        context.save(data)
    data["link_peaks"] = link_peaks(device, sizes)
    context.save(data)
    try:
        from beamwright_lab.gpu import own_link

        traffic = own_link.SMOKE if context.smoke else own_link.Traffic()
        data["own_transfers"] = own_link.own_transfers(device, data["link_peaks"], traffic)
        rates["copy_launch_s"] = own_link.copy_launch_s(device, traffic)
        context.save(data)
        release(device)
        small = own_link.SMOKE if context.smoke else own_link.SMALL
        data["own_small_blocks"] = own_link.own_transfers(device, data["link_peaks"], small)
    except Exception as error:  # keep the peak rates above
        data["own_transfers_error"] = one_line(error)
        return data
    data["profile"] = asdict(profile_of(data, context))
    return data


def profile_of(data: dict[str, Any], context: Context) -> HardwareProfile:
    """Build the cost model's hardware profile: peaks, and the shares that decoding reaches."""
    from beamwright.plan.machines import HardwareProfile

    rates, peaks = data["rates"], data["link_peaks"]
    bandwidth = max(rates["copy_bandwidth"], rates["weights_bandwidth"], rates["copies_bandwidth"])
    flops = max(rates["gemm_flops"], rates["few_rows_flops"])
    own = {row["direction"]: row["efficiency"] for row in data.get("own_transfers", [])}
    memory = 2**30
    if context.on_gpu:
        memory = torch.cuda.get_device_properties(context.device).total_memory
    link_share = min(1.0, max(1e-3, own.get("h2d", 1.0)))
    emulated = context.link_bandwidth
    return HardwareProfile(
        name=device_name(context.device),
        device_memory_bytes=memory,
        device_bandwidth=bandwidth,
        flops=flops,
        h2d_bandwidth=emulated or peaks["h2d"],
        d2h_bandwidth=emulated or peaks["d2h"],
        launch_s=rates["small_op_s"],
        copy_launch_s=rates.get("copy_launch_s", rates["small_op_s"]),
        decode_ops_per_layer=_DECODE_OPS_PER_LAYER,
        bandwidth_share=rates["weights_bandwidth"] / bandwidth,
        copies_share=rates["copies_bandwidth"] / bandwidth,
        flops_share=rates["few_rows_flops"] / flops,
        link_share=1.0 if emulated else link_share,
        element_bytes=2 if context.on_gpu else 4,
    )


# --- ceilings --------------------------------------------------------------------------------

_TILE_BYTES = 2**24


@dataclass(frozen=True)
class Sizes:
    """Amount of work per measurement. The defaults are several times a large card's cache."""

    copy_bytes: int = 2**31
    link_bytes: int = 2**29
    gemm_size: int = 8192
    weight_rows: int = 2**15
    small_ops: int = 2000
    repeats: int = 7


SMOKE = Sizes(2**20, 2**20, 128, 256, 50, 2)


class Timer:
    """Stopwatch for queued work: device events on a GPU, the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one run, until the device is idle again."""
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
        """Seconds of the fastest of several runs, after a warm-up."""
        work()
        return min(self.once(work) for _ in range(repeats))


def random_bytes(num_bytes: int, device: str, *, pinned: bool = False) -> torch.Tensor:
    """Return incompressible random bytes as uint8."""
    tile = torch.randint(0, 256, (min(num_bytes, _TILE_BYTES),), dtype=torch.uint8, device=device)
    drawn = tile.repeat(-(-num_bytes // len(tile)))[:num_bytes].contiguous()
    return drawn.pin_memory() if pinned else drawn


def copy_bandwidth(device: str, sizes: Sizes) -> float:
    """Bytes/s of a copy within the device; reads and writes both count."""
    source = random_bytes(sizes.copy_bytes, device)
    target = torch.empty_like(source)
    took_s = Timer(device).best(lambda: target.copy_(source), sizes.repeats)
    return 2 * sizes.copy_bytes / took_s


def weights_bandwidth(device: str, sizes: Sizes, dtype: torch.dtype, num_rows: int = 16) -> float:
    """Bytes/s at which a matrix product with few rows reads its weights, as in decoding.

    Three weights take turns, so that none stays in a cache.
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
    """Bytes/s at which decode attention reads one KV copy per row (LBS's layout)."""
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
    """FLOP/s of a square matrix product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / Timer(device).best(lambda: left @ right, repeats)


def few_rows_flops(device: str, sizes: Sizes, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product with the rows of a prefill chunk or a large group."""
    size, rows = sizes.gemm_size, max(8, sizes.gemm_size // 16)
    weight = torch.randn(size, size, device=device).to(dtype)
    batch = torch.randn(rows, size, device=device).to(dtype)
    took_s = Timer(device).best(
        lambda: torch.nn.functional.linear(batch, weight), 2 * sizes.repeats
    )
    return 2 * rows * size**2 / took_s


def small_op_s(device: str, sizes: Sizes) -> float:
    """Seconds of one tiny operator, which is its launch overhead."""
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
    """Bytes/s of one large pinned copy each way, and the sum of both at once."""
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
