"""What a machine can do, in the few numbers that the cost model needs. No torch.

Peaks are a vendor's or a measurement's; the shares say how much of a peak real work reaches, so
that both stay visible. By name: cards from their data sheets, a small CPU machine, and this machine
as `probe` measured it, kept as JSON in the user's cache folder.

Cards' FLOP/s are dense: 16-bit matrix products with 32-bit accumulation, and float32 outside the
tensor cores. Where a source gives no figure for a card, its multiprocessors at boost clock times
512 operations are taken, which is what the same source counts for its siblings (Ampere, Ada and
Blackwell GeForce); of a laptop's, the highest clock that its maker may allow. Memory is the nominal
size: what a driver, a desktop or ECC keeps is not known. Only what PyTorch calls a CUDA device is
here, which Radeons are to its build for ROCm.

What a data sheet does not say is assumed, alike for all cards: large pinned copies reach 82 % of
the link (measured by others on PCIe 5.0 x16: 52 of 63 GB/s), and the launch costs are usual values
for an eager framework. Those of `captured` steps are fitted to an H100's and counted, and bring its
decode steps to within 3.5 % in the mean (`python -m beamwright_lab.gpu.costs`).
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
from beamwright.io import write_whole
from beamwright.units import GIB, parse_size

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


@checked(frozen=True, config=ConfigDict(extra="forbid", strict=True))
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
    coded_bandwidth, coded_flops: of the C library's products with quantised weights, bytes/s of one
    row and FLOP/s of a batch; None without the library.
    Shares are 1 of rates that were measured by the very kind of work that they stand for.

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


_VARIANTS = {"ti", "super", "laptop"}  # of a name: other chips

# Nominal bytes/s of sixteen PCIe lanes in one direction, by generation.
_PCIE_X16 = MappingProxyType({3: 15.75e9, 4: 31.5e9, 5: 63.0e9})


@dataclass(frozen=True)
class PassCosts:
    """Seconds of one forward pass by the cost model, and the link's bytes a second.

    weights_s: all weights are read; row_s: arithmetic of a row; launch_s: beside the longer of the
    two; byte_s: a byte of KV is read; state_s: a row's state is read and written. By themselves
    passes are counted, and nothing else costs anything.
    """

    weights_s: float = 1.0
    row_s: float = 0.0
    launch_s: float = 0.0
    link_bandwidth: float = inf
    byte_s: float = 0.0
    state_s: float = 0.0

    def seconds(self, num_rows: float) -> float:
        """Of a pass with so many rows."""
        read_s = self.weights_s + num_rows * self.state_s
        return max(read_s, num_rows * self.row_s) + self.launch_s


@checked(frozen=True)
class Card:
    """One GPU, a line of `cards.csv`.

    tflops: of 16-bit matrix products; float32_tflops: of float32 without tensor cores.
    bandwidth_gb: GB/s of its memory. pcie: generation and lanes. capability: CUDA's compute
    capability, (0, 0) for others' cards. source: the data sheet. note: what differs from it.
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
        """True if ours run here: they need bfloat16 (compute capability 8.0)."""
        return self.capability >= (8, 0)


def _read_cards() -> Iterator[Card]:
    table = Path(__file__).with_name("cards.csv").read_text(encoding="ascii")
    for row in csv.DictReader(table.splitlines()):
        pcie, capability = row["pcie"].split("x"), row["capability"].split(".")
        yield Card(**{**row, "pcie": pcie, "capability": capability})  # type: ignore[arg-type]


CARDS = MappingProxyType({card.name: card for card in _read_cards()})


def card_of_device(device_name: str, memory_bytes: int) -> Card | None:
    """The card that CUDA calls so; None if it is none of these.

    memory_bytes: what CUDA says that it has, which tells cards of one name apart.
    """
    words = re.sub(r"[^a-z0-9]+", " ", device_name.lower()).split()
    if "max" in words:  # Max-Q: another clock
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

# Fitted, one number for all cards: the LBS paper's layer-wise baseline (eager, a copy per beam)
# stalls 70 to 90 % of its time on an RTX 4090 (Fig. 11). With the link's time known, that leaves
# about six passes over the KV per token at `_BANDWIDTH_SHARE`; copies read exactly once would stall
# 97 % at 64 beams. Every time of a schedule with copies, and every speedup over one, follows from
# this number and is no test of the paper's: `python -m beamwright_lab.lbs.figures` prints both
# for 1 to 12 passes. Shared KV is read once, at `_BANDWIDTH_SHARE`, and does not depend on it.
_BANDWIDTH_SHARE = 0.85
_COPIES_SHARE = _BANDWIDTH_SHARE / 6


def card_profile(card: Card, element_bytes: int = _HALF) -> HardwareProfile:
    """A card with models in elements of so many bytes."""
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


def captured(profile: HardwareProfile) -> HardwareProfile:
    """The machine with steps that are replayed as graphs, in place of operators one by one."""
    launch_s = min(profile.launch_s, CAPTURED_LAUNCH_S)
    return replace(profile, launch_s=launch_s, decode_ops_per_layer=CAPTURED_LAUNCHES)


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
    with suppress(OSError):  # of which the next line complains
        file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(asdict(profile), indent=2), option="measured profile ")
    return file


def read_profile(file: Path | None = None) -> HardwareProfile:
    """The stored profile.

    Raises:
        InputError: if there is none, or it is not a valid profile.
    """
    file = file or default_cache_file()
    try:
        return TypeAdapter(HardwareProfile).validate_json(file.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"no measured profile ({file}): {_ADVICE}") from error
    except (OSError, ValidationError) as error:
        reason = error if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise InputError(f"{file}: not a hardware profile ({reason}); {_ADVICE}") from error


# Two cores of a server CPU with AVX-512 under a hypervisor, from `measure_profile`.
_EPYC_2CORE = read_profile(Path(__file__).with_name("epyc-2core.json"))

NAMED_PROFILES = MappingProxyType(
    {**{name: card_profile(card) for name, card in CARDS.items()}, _EPYC_2CORE.name: _EPYC_2CORE}
)


def processor() -> HardwareProfile:
    """This machine's, as `doctor --probe` found it, else a named one."""
    try:
        return find_profile(MEASURED)
    except InputError:
        return _EPYC_2CORE


def over_link(profile: HardwareProfile, bytes_per_s: float | None) -> HardwareProfile:
    """The same machine with a link that is emulated, if one is (not None)."""
    if bytes_per_s is None:
        return profile
    return replace(profile, h2d_bandwidth=bytes_per_s, d2h_bandwidth=bytes_per_s, link_share=1.0)


def in_precision(profile: HardwareProfile, element_bytes: int) -> HardwareProfile:
    """The same machine with models in another precision: a card's FLOP/s differ by it."""
    if profile.element_bytes == element_bytes or profile.name not in CARDS:
        return profile
    card = card_profile(CARDS[profile.name], element_bytes)
    return replace(card, device_memory_bytes=profile.device_memory_bytes)


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
