"""Profiles by name: published peaks of GPUs, and a small CPU machine. No torch.

Peaks are from the vendors' data sheets: 16-bit tensor FLOP/s are dense, with 32-bit accumulation.
PCIe is nominal per direction (4.0: 1.969 GB/s a lane, 5.0: 3.938), of which large pinned copies
reach about 82 % (measured by others on 5.0 x16: 52 of 63 GB/s). The launch costs are usual values
for an eager framework, not measurements of each card.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from beamwright.errors import InputError
from beamwright.hardware.cache import read_profile
from beamwright.hardware.profile import HardwareProfile

DEFAULT_PROFILE = "rtx-4090"
MEASURED = "measured"

_GIB = 2**30
_PCIE4_X8, _PCIE4_X16, _PCIE5_X16 = 15.75e9, 31.5e9, 63.0e9

# Fitted, one number for all cards: the LBS paper's layer-wise baseline (eager, a copy per beam)
# stalls 70 to 90 % of its time on an RTX 4090 (Fig. 11). With the link's time known, that leaves
# about six passes over the KV per token at `_BANDWIDTH_SHARE`; copies read exactly once would stall
# 97 % at 64 beams. The same number then gives speedups within the paper's range, unfitted.
_BANDWIDTH_SHARE = 0.85
_COPIES_SHARE = _BANDWIDTH_SHARE / 6


def _gpu(
    name: str, memory_gib: int, device_bandwidth: float, flops: float, link_bandwidth: float
) -> HardwareProfile:
    return HardwareProfile(
        name=name,
        device_memory_bytes=memory_gib * _GIB,
        device_bandwidth=device_bandwidth,
        flops=flops,
        h2d_bandwidth=link_bandwidth,
        d2h_bandwidth=link_bandwidth,
        launch_s=5e-6,
        copy_launch_s=1e-6,
        decode_ops_per_layer=16,
        bandwidth_share=_BANDWIDTH_SHARE,
        copies_share=_COPIES_SHARE,
        flops_share=0.6,
        link_share=0.82,
        element_bytes=2,
    )


_RTX_4090 = _gpu(DEFAULT_PROFILE, 24, 1008e9, 165.2e12, _PCIE4_X8)  # the link of the LBS paper

NAMED_PROFILES = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            _gpu("rtx-3080-ti", 12, 912e9, 68.2e12, _PCIE4_X16),
            _RTX_4090,
            replace(
                _RTX_4090,
                name="rtx-4090-x16",
                h2d_bandwidth=_PCIE4_X16,
                d2h_bandwidth=_PCIE4_X16,
            ),
            _gpu("rtx-5090", 32, 1792e9, 209.5e12, _PCIE5_X16),
            _gpu("a100", 80, 2039e9, 312e12, _PCIE4_X16),
            _gpu("h100", 80, 3350e9, 989e12, _PCIE5_X16),
            _gpu("h200", 141, 4800e9, 989e12, _PCIE5_X16),
            # Two cores of a server CPU with AVX-512 under a hypervisor, from `measure_profile`.
            HardwareProfile(
                name="epyc-2core",
                device_memory_bytes=24 * _GIB,
                device_bandwidth=22e9,
                flops=200e9,
                h2d_bandwidth=16e9,
                d2h_bandwidth=16e9,
                launch_s=3.2e-6,
                copy_launch_s=7e-6,
                decode_ops_per_layer=35,
                bandwidth_share=1.0,
                copies_share=1.0,
                flops_share=0.62,
                link_share=1.0,
                element_bytes=4,
            ),
        )
    }
)


def find_profile(name: str, cache_file: Path | None = None) -> HardwareProfile:
    """A profile by name; "measured" is the one of this machine, from the cache.

    cache_file: where the measured profile is kept (default: `default_cache_file()`).

    Raises:
        InputError: for an unknown name, or if nothing valid has been measured yet.
    """
    key = name.lower()
    if key == MEASURED:
        return read_profile(cache_file)
    if key not in NAMED_PROFILES:
        raise InputError(
            f"--gpu {name}: no such profile; known: {', '.join(NAMED_PROFILES)}, {MEASURED}"
        )
    return NAMED_PROFILES[key]
