"""What a machine can do, in the few numbers that the cost model needs. No torch.

Peaks are a vendor's or a measurement's; the shares say how much of a peak real work reaches, so
that both stay visible. By name: cards from their data sheets, a small CPU machine, and this machine
as `probe` measured it, kept as JSON in the user's cache folder.

What a data sheet does not say is assumed here, alike for all cards: large pinned copies reach 82 %
of the link (measured by others on PCIe 5.0 x16: 52 of 63 GB/s), and the launch costs are usual
values for an eager framework.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from beamwright.errors import InputError
from beamwright.io import write_whole
from beamwright.plan.cards import CARDS, Card
from beamwright.units import GIB, parse_size


@dataclass(frozen=True)
class HardwareProfile:
    """One device, its host and the link between them. Rates are per second.

    device_memory_bytes: all of the device's memory.
    device_bandwidth: peak bytes/s of device memory.
    flops: peak dense FLOP/s in the precision that models run in there (see `element_bytes`).
    h2d_bandwidth, d2h_bandwidth: nominal bytes/s of the link, each direction.
    launch_s: cost of launching one operator or kernel that nothing hides.
    copy_launch_s: fixed cost of one queued copy.
    decode_ops_per_layer: operators of one layer in one decode step.
    bandwidth_share: of `device_bandwidth`, reached by reading weights and shared KV.
    copies_share: the same for attention over a copy of the KV per beam.
    flops_share: of `flops`, reached by the matrix products of a decode step or a prefill.
    link_share: of the link's rates, reached by large pieces in pinned memory.
    element_bytes: of the usual dtype: 2 (16 bits) on GPUs, 4 on CPUs.

    Raises:
        ValueError: if a number is not finite and positive, or a share is above 1.
    """

    name: str
    device_memory_bytes: int
    device_bandwidth: float
    flops: float
    h2d_bandwidth: float
    d2h_bandwidth: float
    launch_s: float
    copy_launch_s: float
    decode_ops_per_layer: int
    bandwidth_share: float
    copies_share: float
    flops_share: float
    link_share: float
    element_bytes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be positive, not {value!r}")
            if field.name.endswith("_share") and value > 1:
                raise ValueError(f"{field.name} is a share of a peak, not {value!r}")


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


_ADVICE = "run `beamwright doctor --probe`"


def default_cache_file() -> Path:
    """`~/.cache/beamwright/profile.json`."""
    return Path.home() / ".cache" / "beamwright" / "profile.json"


def write_profile(profile: HardwareProfile, file: Path | None = None) -> Path:
    """Store the profile and return where. A reader sees the old file or the whole of the other.

    Raises:
        InputError: if the folder or the file cannot be written.
    """
    file = file or default_cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file}: the measured profile cannot be written ({error})") from error
    write_whole(file, json.dumps(asdict(profile), indent=2), option="measured profile ")
    return file


def read_profile(file: Path | None = None) -> HardwareProfile:
    """The stored profile.

    Raises:
        InputError: if there is none, or it is not a valid profile.
    """
    file = file or default_cache_file()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return HardwareProfile(**_checked(content))
    except FileNotFoundError as error:
        raise InputError(f"no measured profile ({file}): {_ADVICE}") from error
    except (OSError, ValueError) as error:  # both JSON and text decoding errors are ValueErrors
        raise InputError(f"{file}: not a hardware profile ({error}); {_ADVICE}") from error


def _checked(content: Any) -> dict[str, Any]:
    """The JSON content with exactly the profile's keys and kinds of values."""
    expected = {field.name: str(field.type) for field in fields(HardwareProfile)}
    if not isinstance(content, dict) or set(content) != set(expected):
        raise ValueError("keys differ")
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    for key, kind in expected.items():
        value = content[key]
        if isinstance(value, bool) or not isinstance(value, kinds[kind]):
            raise ValueError(f"{key} is {value!r}")
    return content
