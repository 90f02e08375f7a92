"""`--gpu`: which machine figures are for, where they come from, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from rich.console import Console, Group

from beamwright.cli.options import option
from beamwright.cli.output import add_row, figures_table, format_bytes, print_json
from beamwright.plan.cards import CARDS, card_of_device
from beamwright.plan.machines import (
    CUSTOM,
    DEFAULT_PROFILE,
    MEASURED,
    NAMED_PROFILES,
    HardwareProfile,
    card_profile,
    find_profile,
)

LIST = "list"
_SHEET = "data sheet, not measured"
_CPU_SOURCE = "two cores of a server CPU, measured once"

GpuOption = Annotated[
    str | None,
    option(
        "--gpu",
        "Hardware profile; list shows them; measured, or cpu, is this machine's (doctor --probe); "
        "custom:12GB,360GB/s,25TFLOPS is any card, by its memory, memory bandwidth and dense "
        f"16-bit rate. Default: the CUDA device of this machine, else {DEFAULT_PROFILE}.",
        "NAME",
    ),
]


@dataclass(frozen=True)
class Machine:
    """A profile, the source of its figures, and why it was taken where nobody named one."""

    profile: HardwareProfile
    source: str
    why: str | None = None


def find_machine(name: str | None) -> Machine:
    """The machine that `--gpu` names; without it the CUDA device that is here, or a default.

    Raises:
        InputError: for an unknown name, or if nothing has been measured here yet.
    """
    if name is not None:
        profile = find_profile(name)
        return Machine(profile, _source_of(profile.name))
    profile = find_profile(DEFAULT_PROFILE)
    instead = f"figures are for {DEFAULT_PROFILE}; --gpu list shows the others"
    device = cuda_device()
    if device is None:
        return Machine(
            profile, _source_of(profile.name), f"no --gpu, and no CUDA device here: {instead}"
        )
    device_name, memory_bytes = device
    card = card_of_device(device_name, memory_bytes)
    if card is None:
        why = f"no --gpu, and no profile of this machine's {device_name}: {instead}"
        return Machine(profile, _source_of(profile.name), why)
    here = replace(card_profile(card), device_memory_bytes=memory_bytes)
    why = f"no --gpu: figures are for this machine's {device_name}, by its data sheet"
    return Machine(here, _source_of(card.name), why)


def cuda_device() -> tuple[str, int] | None:
    """Name and memory of this machine's first CUDA device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return str(found.name), int(found.total_memory)


def _source_of(name: str) -> str:
    if name in CARDS:
        return f"{CARDS[name].source}; {_SHEET}"
    if name == CUSTOM:
        return "as given; its link is taken for PCIe 4.0 x16"
    return _CPU_SOURCE if name in NAMED_PROFILES else "measured on this machine by doctor --probe"


def _cited(name: str) -> str:
    return CARDS[name].source if name in CARDS else _source_of(name)


def print_profiles(*, as_json: bool) -> None:
    """Print what `--gpu list` asks for."""
    if as_json:
        print_json(profiles_report())
    else:
        Console().print(profiles_table())


def profiles_report() -> dict[str, Any]:
    """All profiles with their sources, for JSON."""
    return {
        "profiles": [
            {**asdict(profile), "source": _source_of(name)}
            for name, profile in NAMED_PROFILES.items()
        ]
    }


def profiles_table() -> Group:
    """All profiles, for reading."""
    columns = ("memory", "GB/s", "16-bit", "float32", "PCIe", "usable", "source")
    table = figures_table("--gpu", columns, f"Profiles ({_SHEET}, but for the CPU)")
    sources = list(dict.fromkeys(map(_cited, NAMED_PROFILES)))
    for name, profile in NAMED_PROFILES.items():
        add_row(table, *_cells(name, profile), str(sources.index(_cited(name)) + 1))
    lines = [f"{number}: {source}" for number, source in enumerate(sources, start=1)]
    notes = [f"{card.name}: {card.note}" for card in CARDS.values() if card.note]
    rest = (
        "16-bit, float32: TFLOP/s of dense matrix products",
        f"{MEASURED}, or cpu: this machine's CPU, by `beamwright doctor --probe`",
        "custom:12GB,360GB/s,25TFLOPS: any card, by memory, GB/s and 16-bit TFLOP/s",
        "usable: GB/s of the link that large pinned copies reach (82 %, measured by others)",
    )
    return Group(table, *lines, *notes, *rest)


def _cells(name: str, profile: HardwareProfile) -> Iterator[str]:
    yield name
    yield format_bytes(profile.device_memory_bytes).replace(".0", "")
    yield f"{profile.device_bandwidth / 1e9:,.0f}"
    card = CARDS.get(name)
    yield "" if card is None else f"{card.tflops:g}"
    yield f"{(profile.flops / 1e12 if card is None else card.float32_tflops):g}"
    yield "RAM" if card is None else f"{card.pcie[0]}.0 x{card.pcie[1]}"
    yield f"{profile.h2d_bandwidth * profile.link_share / 1e9:.1f}"
