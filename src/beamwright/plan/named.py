"""Profiles by name: cards from their data sheets, and a small CPU machine. No torch.

What a data sheet does not say is assumed here, alike for all cards: large pinned copies reach 82 %
of the link (measured by others on PCIe 5.0 x16: 52 of 63 GB/s), and the launch costs are usual
values for an eager framework.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from beamwright.errors import InputError
from beamwright.plan.cache import read_profile
from beamwright.plan.cards import CARDS, Card
from beamwright.plan.profile import HardwareProfile
from beamwright.units import GIB, parse_size

DEFAULT_PROFILE = "rtx-4090"
MEASURED = "measured"
CUSTOM = "custom"
_CUSTOM_FORM = f"{CUSTOM}:12GB,360GB/s,25TFLOPS"

_HALF = 2
_ALIASES = MappingProxyType({"a100": "a100-80gb", "cpu": MEASURED})
_NO_DEVICE = ("apple", "m1", "m2", "m3", "m4", "m5", "mps", "arc", "intel")  # of this engine's

# Fitted, one number for all cards: the LBS paper's layer-wise baseline (eager, a copy per beam)
# stalls 70 to 90 % of its time on an RTX 4090 (Fig. 11). With the link's time known, that leaves
# about six passes over the KV per token at `_BANDWIDTH_SHARE`; copies read exactly once would stall
# 97 % at 64 beams. Every time of a schedule with copies, and every speedup over one, follows from
# this number and is no test of the paper's: `python -m beamwright_lab.paper.figures` prints both
# for 1 to 12 passes. Shared KV is read once, at `_BANDWIDTH_SHARE`, and does not depend on it.
_BANDWIDTH_SHARE = 0.85
_COPIES_SHARE = _BANDWIDTH_SHARE / 6


def card_profile(card: Card, element_bytes: int = _HALF) -> HardwareProfile:
    """A card with models in elements of so many bytes."""
    return HardwareProfile(
        name=card.name,
        device_memory_bytes=card.memory_bytes,
        device_bandwidth=card.bandwidth_gb * 1e9,
        flops=card.flops(element_bytes),
        h2d_bandwidth=card.link_bandwidth,
        d2h_bandwidth=card.link_bandwidth,
        launch_s=5e-6,
        copy_launch_s=1e-6,
        decode_ops_per_layer=16,
        bandwidth_share=_BANDWIDTH_SHARE,
        copies_share=_COPIES_SHARE,
        flops_share=0.6,
        link_share=0.82,
        element_bytes=element_bytes,
    )


# Two cores of a server CPU with AVX-512 under a hypervisor, from `measure_profile`.
_EPYC_2CORE = HardwareProfile(
    name="epyc-2core",
    device_memory_bytes=24 * GIB,
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
)

NAMED_PROFILES = MappingProxyType(
    {
        **{name: card_profile(card) for name, card in CARDS.items()},
        _EPYC_2CORE.name: _EPYC_2CORE,
    }
)


def in_precision(profile: HardwareProfile, element_bytes: int) -> HardwareProfile:
    """The same machine with models in another precision: a card's FLOP/s differ by it."""
    if profile.element_bytes == element_bytes or profile.name not in CARDS:
        return profile
    card = CARDS[profile.name]
    return replace(profile, flops=card.flops(element_bytes), element_bytes=element_bytes)


def find_profile(name: str, cache_file: Path | None = None) -> HardwareProfile:
    """A profile by name; "measured", or "cpu", is the one of this machine, from the cache, and
    "custom:MEMORY,RATE,TFLOPS" a card of which only that is known.

    cache_file: where the measured profile is kept (default: `default_cache_file()`).

    Raises:
        InputError: for an unknown name, or if nothing valid has been measured yet.
    """
    key = "-".join(name.lower().split())
    key = _ALIASES.get(key, key)
    if key == MEASURED:
        return read_profile(cache_file)
    if key.startswith(f"{CUSTOM}:"):
        return _custom_profile(name)
    if key not in NAMED_PROFILES:
        raise InputError(f"--gpu {name}: no such profile; {_instead(key)}")
    return NAMED_PROFILES[key]


def _instead(key: str) -> str:
    """The nearest names, and how to describe a card that is none of them."""
    if set(key.split("-")) & set(_NO_DEVICE):
        return f"models run on CUDA devices and CPUs here; {MEASURED} is this machine's CPU"
    near = [name for name in NAMED_PROFILES if set(key.split("-")) <= set(name.split("-"))]
    near = near or get_close_matches(key, NAMED_PROFILES, n=3)
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}--gpu list shows all; or write {_CUSTOM_FORM}, or {MEASURED} for this machine"


def _custom_profile(text: str) -> HardwareProfile:
    """A card by its memory, its memory's bytes/s and its dense 16-bit TFLOP/s, on PCIe 4.0 x16."""
    parts = text.partition(":")[2].split(",")
    try:
        memory, rate, tflops = parts
        bandwidth = float(parse_size(rate.strip().lower().removesuffix("/s")))
        return replace(
            card_profile(CARDS["rtx-3060"]),  # whose link it is given
            name=CUSTOM,
            device_memory_bytes=parse_size(memory),
            device_bandwidth=bandwidth,
            flops=1e12 * float(tflops.strip().lower().removesuffix("tflops")),
        )
    except (ValueError, InputError) as error:
        raise InputError(f"--gpu {text}: write {_CUSTOM_FORM}") from error
