"""Stage: ceilings of the card and its link, our transfers against them, and a profile of both.

The profile is what the simulator's predictions of this run are made from. The ceilings need torch
alone.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from beamwright_lab.gpu.ceilings import (
    SMOKE,
    Sizes,
    copies_bandwidth,
    copy_bandwidth,
    few_rows_flops,
    gemm_flops,
    link_peaks,
    small_op_s,
    weights_bandwidth,
)
from beamwright_lab.gpu.context import Context, one_line, release
from beamwright_lab.gpu.machine import device_name

if TYPE_CHECKING:
    from beamwright.plan.machines import HardwareProfile

# Operators of one layer in one decode step without a graph (docs/experiments.md).
_DECODE_OPS_PER_LAYER = 35


def run(context: Context) -> dict[str, Any]:
    """See the module."""
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
    except Exception as error:  # the ceilings above are worth keeping whatever our link does
        data["own_transfers_error"] = one_line(error)
        return data
    data["profile"] = asdict(profile_of(data, context))
    return data


def profile_of(data: dict[str, Any], context: Context) -> HardwareProfile:
    """The card as the cost model sees it: peaks, and the shares that our kind of work reaches."""
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
