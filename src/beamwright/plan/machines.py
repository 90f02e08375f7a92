"""Hardware profiles: memory, bandwidth and FLOP/s of GPUs and CPUs, for the cost model.

A peak comes from a vendor or from a measurement. A share says how much of the peak real work
reaches. `find_profile` knows three kinds by name: GPUs from their data sheets, a small CPU machine,
and this machine as `doctor --probe` measured it. The last one is a JSON file in the user's cache.

FLOP/s of GPUs are dense: 16-bit matrix products with 32-bit accumulation, and float32 outside the
tensor cores. Where a source gives no FLOP/s for a card, they are multiprocessors times boost
clock times 512 operations, as the same source counts for related cards (Ampere, Ada and Blackwell
GeForce). For a laptop GPU, the clock is the highest that the vendor allows. Memory is the nominal
size, since the part that a driver, a desktop or ECC reserves is not known. Only devices that
PyTorch calls CUDA are listed, which includes Radeons in its ROCm build.

Figures that a data sheet does not give are assumed, the same for all cards. Large pinned copies
reach 82 % of the link (others measured 52 of 63 GB/s on PCIe 5.0 x16). Launch costs are usual
values for an eager framework. The launch costs of CUDA graphs (`with_cuda_graphs`) are fitted to an
H100: its predicted decode steps are then within 3.5 % of the measured ones in the mean (`python -m
beamwright_lab.gpu.costs`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from beamwright.errors import InputError
from beamwright.io import write_atomically
from beamwright.units import GIB, parse_size

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


@checked(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class HardwareProfile:
    """Speed and memory of one device, its host, and the link between them. Rates are per second.

    device_memory_bytes: all of the device's memory.
    device_bandwidth: peak bytes/s of device memory.
    flops: peak dense FLOP/s in the precision that models use there (see `element_bytes`).
    h2d_bandwidth, d2h_bandwidth: nominal bytes/s of the link in each direction.
    launch_s: seconds to launch one operator or kernel, as far as no other work hides them.
    copy_launch_s: fixed seconds of one queued copy.
    decode_ops_per_layer: operators of one layer in one decode step.
    bandwidth_share: share of `device_bandwidth` reached when weights and shared KV are read.
    copies_share: share of `device_bandwidth` reached by attention over a KV copy per beam.
    flops_share: share of `flops` reached by the matrix products of a decode step or a prefill.
    link_share: share of the link's rates reached by large copies in pinned memory.
    element_bytes: bytes of an element of the usual dtype: 2 (16 bits) on GPUs, 4 on CPUs.
    coded_bandwidth: bytes/s at which the C library multiplies one row with quantised weights; None
        without the library.
    coded_flops: FLOP/s at which the C library multiplies a batch with quantised weights; None
        without the library.

    A share is 1 if the rate that it scales was measured with the same kind of work.

    Raises:
        ValueError: if a number is not finite and positive, or a share is above 1.
    """

    name: str
    device_memory_bytes: Annotated[int, Field(gt=0)]
    device_bandwidth: Rate
    flops: Rate
    h2d_bandwidth: Rate
    d2h_bandwidth: Rate
    launch_s: Rate
    copy_launch_s: Rate
    decode_ops_per_layer: Annotated[int, Field(gt=0)]
    flops_share: Share
    element_bytes: Annotated[int, Field(gt=0)]
    bandwidth_share: Share = 1.0
    copies_share: Share = 1.0
    link_share: Share = 1.0
    coded_bandwidth: Rate | None = None
    coded_flops: Rate | None = None


_VARIANTS = {"ti", "super", "laptop"}  # words of a card's name that stand for a different chip

# Nominal bytes/s of sixteen PCIe lanes in one direction, by generation.
_PCIE_X16 = MappingProxyType({3: 15.75e9, 4: 31.5e9, 5: 63.0e9})


@dataclass(frozen=True)
class PassCosts:
    """What a schedule knows about time: the parts of a forward pass in seconds, and the link.

    weights_s: seconds to read all weights.
    row_s: seconds of one row's arithmetic.
    launch_s: seconds of kernel launches, added to the longer of reading and arithmetic.
    link_bandwidth: bytes per second between host and device.
    byte_s: seconds to read one byte of KV.
    state_s: seconds to read and write one row's recurrent states.

    With the default values, a pass costs 1 and everything else 0, so a sum of costs counts passes.
    """

    weights_s: float = 1.0
    row_s: float = 0.0
    launch_s: float = 0.0
    link_bandwidth: float = inf
    byte_s: float = 0.0
    state_s: float = 0.0

    def seconds(self, num_rows: float) -> float:
        """Return the seconds of a pass with `num_rows` rows, without KV."""
        read_s = self.weights_s + num_rows * self.state_s
        return max(read_s, num_rows * self.row_s) + self.launch_s


@checked(frozen=True)
class Card:
    """One GPU, a line of `cards.csv`.

    tflops: TFLOP/s of 16-bit matrix products.
    float32_tflops: TFLOP/s of float32 without tensor cores.
    bandwidth_gb: GB/s of device memory.
    pcie: PCIe generation and number of lanes.
    capability: CUDA compute capability; (0, 0) for cards of other vendors.
    source: the data sheet.
    note: differences from the data sheet.
    """

    name: str
    memory_gib: int
    bandwidth_gb: float
    tflops: float
    float32_tflops: float
    pcie: tuple[int, int]
    capability: tuple[int, int]
    source: str
    note: str = ""

    @property
    def has_kernels(self) -> bool:
        """True if Beamwright's kernels run here. They need bfloat16 (compute capability 8.0)."""
        return self.capability >= (8, 0)


def _read_cards() -> Iterator[Card]:
    table = Path(__file__).with_name("cards.csv").read_text(encoding="ascii")
    for row in csv.DictReader(table.splitlines()):
        pcie, capability = row["pcie"].split("x"), row["capability"].split(".")
        yield Card(**{**row, "pcie": pcie, "capability": capability})  # type: ignore[arg-type]


CARDS = MappingProxyType({card.name: card for card in _read_cards()})


def card_of_device(device_name: str, memory_bytes: int) -> Card | None:
    """Return the table entry of the GPU that CUDA calls `device_name`; None if it is not listed.

    memory_bytes: the memory that CUDA reports, which tells variants with the same name apart.
    """
    words = re.sub(r"[^a-z0-9]+", " ", device_name.lower()).split()
    if "max" in words:  # Max-Q variants have another clock than the card in the table
        return None
    for card in CARDS.values():
        named = [word for word in card.name.split("-") if not word.endswith("gb")]
        variant = _VARIANTS & set(words) == _VARIANTS & set(named)
        near = 0.85 <= memory_bytes / (card.memory_gib * GIB) <= 1.05
        if variant and near and set(named) <= set(words):
            return card
    return None


DEFAULT_PROFILE = "rtx-4090"
MEASURED = "measured"
CUSTOM = "custom"
_CUSTOM_FORM = f"{CUSTOM}:12GB,360GB/s,25TFLOPS"

_HALF = 2
_ALIASES = MappingProxyType({"a100": "a100-80gb", "cpu": MEASURED})

# Shares of a card's memory bandwidth that attention reaches: `_BANDWIDTH_SHARE` where it reads
# shared KV once, `_COPIES_SHARE` where every beam reads a copy of its own.
#
# `_COPIES_SHARE` is fitted to one figure of the LBS paper, for all cards. Its baseline (layer-wise,
# eager attention, a copy per beam) waits for the link 70 to 90 % of the time on an RTX 4090
# (Fig. 11). The link's time is known. The rest is as long as six passes over the copies, per token,
# at `_BANDWIDTH_SHARE`; with one pass, the baseline would wait 97 % of the time at 64 beams.
#
# So our times of schedules with copies, and speedups over them, follow from that figure and cannot
# confirm it. `python -m beamwright_lab.lbs.figures` prints them for 1 to 12 passes.
_BANDWIDTH_SHARE = 0.85
_COPIES_SHARE = _BANDWIDTH_SHARE / 6


def card_profile(card: Card, element_bytes: int = _HALF) -> HardwareProfile:
    """Return the hardware profile of a GPU for models with elements of `element_bytes` bytes."""
    generation, lanes = card.pcie
    link_bandwidth = _PCIE_X16[generation] * lanes / 16
    return HardwareProfile(
        name=card.name,
        device_memory_bytes=card.memory_gib * GIB,
        device_bandwidth=card.bandwidth_gb * 1e9,
        flops=1e12 * (card.tflops if element_bytes <= _HALF else card.float32_tflops),
        h2d_bandwidth=link_bandwidth,
        d2h_bandwidth=link_bandwidth,
        launch_s=5e-6,
        copy_launch_s=1e-6,
        decode_ops_per_layer=16,
        bandwidth_share=_BANDWIDTH_SHARE,
        copies_share=_COPIES_SHARE,
        flops_share=0.6,
        link_share=0.82,
        element_bytes=element_bytes,
    )


CAPTURED_LAUNCH_S, CAPTURED_LAUNCHES = 3.5e-6, 10


def with_cuda_graphs(profile: HardwareProfile) -> HardwareProfile:
    """Return `profile` with the launch costs of decode steps that are replayed as CUDA graphs."""
    launch_s = min(profile.launch_s, CAPTURED_LAUNCH_S)
    return replace(profile, launch_s=launch_s, decode_ops_per_layer=CAPTURED_LAUNCHES)


_ADVICE = "Run `beamwright doctor --probe`"


def default_cache_file() -> Path:
    """Return `~/.cache/beamwright/profile.json`."""
    return Path.home() / ".cache" / "beamwright" / "profile.json"


def write_profile(profile: HardwareProfile, file: Path | None = None) -> Path:
    """Write a measured profile to `file` (default: the cache file), and return the path.

    A concurrent reader sees either the old file or the whole new one.

    Raises:
        InputError: if the folder or the file cannot be written.
    """
    file = file or default_cache_file()
    with suppress(OSError):  # without the folder, `write_atomically` fails and names the file
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(profile), indent=2), option="measured profile ")
    return file


def read_profile(file: Path | None = None) -> HardwareProfile:
    """Read a measured profile from `file` (default: the cache file).

    Raises:
        InputError: if the file does not exist or is not a valid profile.
    """
    file = file or default_cache_file()
    try:
        return TypeAdapter(HardwareProfile).validate_json(file.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"no measured profile at {file}. {_ADVICE}") from error
    except (OSError, ValidationError) as error:
        reason = error if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise InputError(f"{file}: not a hardware profile ({reason}). {_ADVICE}") from error


# Measured by `measure_profile` on two cores of a server CPU with AVX-512 under a hypervisor.
_EPYC_2CORE = read_profile(Path(__file__).with_name("epyc-2core.json"))

NAMED_PROFILES = MappingProxyType(
    {**{name: card_profile(card) for name, card in CARDS.items()}, _EPYC_2CORE.name: _EPYC_2CORE}
)


def cpu_profile() -> HardwareProfile:
    """Return this machine's measured profile (`doctor --probe`), or that of a small CPU machine."""
    try:
        return find_profile(MEASURED)
    except InputError:
        return _EPYC_2CORE


def with_link_bandwidth(profile: HardwareProfile, bytes_per_s: float | None) -> HardwareProfile:
    """Return `profile` with a link of `bytes_per_s` in both directions; None: unchanged."""
    if bytes_per_s is None:
        return profile
    return replace(profile, h2d_bandwidth=bytes_per_s, d2h_bandwidth=bytes_per_s, link_share=1.0)


def for_element_bytes(profile: HardwareProfile, element_bytes: int) -> HardwareProfile:
    """Return `profile` with the peak FLOP/s for models with elements of `element_bytes` bytes."""
    if profile.element_bytes == element_bytes or profile.name not in CARDS:
        return profile
    card = card_profile(CARDS[profile.name], element_bytes)
    return replace(card, device_memory_bytes=profile.device_memory_bytes)


def find_profile(name: str, cache_file: Path | None = None) -> HardwareProfile:
    """Return the profile for a value of `--gpu`.

    "measured" and "cpu" are this machine's profile from the cache. "custom:MEMORY,RATE,TFLOPS"
    describes a GPU that is not in the table.
    cache_file: the file of the measured profile (default: `default_cache_file()`).

    Raises:
        InputError: for an unknown name, or if no valid profile has been measured yet.
    """
    key = "-".join(name.lower().split())
    key = _ALIASES.get(key, key)
    if key == MEASURED:
        return read_profile(cache_file)
    if key.startswith(f"{CUSTOM}:"):
        return _custom_profile(name)
    if key not in NAMED_PROFILES:
        raise InputError(f"--gpu {name}: no such profile. {_instead(key)}")
    return NAMED_PROFILES[key]


def _instead(key: str) -> str:
    """Return the end of an error message for an unknown GPU: similar names and the custom form."""
    near = [name for name in NAMED_PROFILES if set(key.split("-")) <= set(name.split("-"))]
    near = near or get_close_matches(key, NAMED_PROFILES, n=3)
    meant = f"Did you mean {', '.join(near)}? " if near else ""
    return f"{meant}--gpu list shows all; {_CUSTOM_FORM} describes another card"


def _custom_profile(text: str) -> HardwareProfile:
    """Parse "custom:MEMORY,BYTES/s,TFLOPS" into a profile with a PCIe 4.0 x16 link."""
    parts = text.partition(":")[2].split(",")
    try:
        memory, rate, tflops = parts
        bandwidth = float(parse_size(rate.strip().lower().removesuffix("/s")))
        return replace(
            card_profile(CARDS["rtx-3060"]),  # its PCIe 4.0 x16 link is kept
            name=CUSTOM,
            device_memory_bytes=parse_size(memory),
            device_bandwidth=bandwidth,
            flops=1e12 * float(tflops.strip().lower().removesuffix("tflops")),
        )
    except (ValueError, InputError) as error:
        raise InputError(f"--gpu {text}: expected a form like {_CUSTOM_FORM}") from error
