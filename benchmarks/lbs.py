"""What the scripts of the LBS paper's figures share: schedules, simulated runs, output.

A simulated run uses a named shape on a named GPU; sizes follow section 5.1 of the paper. Real
runs are in `lbs_real`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import torch

from beamwright.config import ScheduleSettings, StepSettings
from beamwright.cost import Layout, LbsCase, ModelCosts
from beamwright.hardware import HardwareProfile, find_profile
from beamwright.memory import ModelBytes
from beamwright.models import ModelShape
from beamwright.models.named_shapes import shape_from_text
from beamwright.runtime.simulation import (
    RooflineCosts,
    Simulation,
    SimulationResult,
    StepTree,
    SyntheticSearch,
    VirtualClock,
    grow,
    simulate_if_fits,
)
from beamwright.runtime.simulation import simulate as run_simulation
from beamwright.runtime.timeline import Timeline
from common import RESULTS, finish, say, table

GIB, MIB = 2**30, 2**20
PROMPT_TOKENS, GENERATE_TOKENS = 128, 1920
PAPER_KV_BYTES = 7 * GIB  # of Figure 7
SMALL_MODEL = (
    "random:llama,layers=8,hidden=128,heads=4,kv_heads=4,intermediate=256,vocab=512,context=4096"
)
# 22 GB/s of memory bandwidth (profile epyc-2core) over the RTX 4090's 1,008 : 12.9 (PCIe 4.0 x8).
LINK_BANDWIDTH = 280_000_000
_COLUMNS = ("what", "paper", "simulated", "measured")
_HALF = 2  # bytes per element of the simulated models
BASELINE = "layerwise"

SearchName = Literal["beam", "best-of-n"]


@dataclass(frozen=True)
class Variant:
    """A schedule with some of its parts, and how plots call it."""

    label: str
    options: Mapping[str, Any]


def _locality(label: str, **options: bool) -> Variant:
    return Variant(label, MappingProxyType({"schedule": "locality", **options}))


_BARE = {"inter_beam": False, "balance": False, "prefetch": False}
VARIANTS = MappingProxyType(
    {
        BASELINE: Variant("layer-wise", {"schedule": "layerwise"}),
        "no-reuse": _locality("inter-token, nothing kept between steps", **_BARE, reuse=False),
        "inter-token": _locality("inter-token", **_BARE),
        "prefetch": _locality("+ prefetch, balance", inter_beam=False),
        "inter-beam": _locality("+ inter-beam"),
        "in-gpu": Variant("in-GPU", {"schedule": "in-gpu"}),
    }
)
LOCALITY = ("no-reuse", "inter-token", "prefetch", "inter-beam")


# --- simulated -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedCase:
    """A search of the paper's evaluation.

    kv_bytes: device memory for KV; None for what weights and activations leave of the GPU's.
    link: "instant" moves any number of bytes in no time.
    """

    model: str = "opt-6.7b"
    gpu: str = "rtx-4090"
    num_beams: int = 64
    step_tokens: int = 32
    kv_bytes: int | None = PAPER_KV_BYTES
    search: SearchName = "beam"
    width: int = 2
    link: Literal["nominal", "instant"] = "nominal"


def shape_of(case: SimulatedCase) -> ModelShape:
    return shape_from_text(case.model)


def activation_bytes(case: SimulatedCase) -> int:
    return ModelBytes(shape_of(case), _HALF).activations(case.num_beams)


def kv_budget_bytes(case: SimulatedCase) -> int:
    if case.kv_bytes is not None:
        return case.kv_bytes
    rest = find_profile(case.gpu).device_memory_bytes - activation_bytes(case)
    return rest - ModelCosts.of(shape_of(case), _HALF).weight_bytes


def analytic_case(case: SimulatedCase) -> LbsCase:
    """The same search in the paper's equations."""
    model = ModelCosts.of(shape_of(case), _HALF)
    return LbsCase(
        num_layers=model.num_layers,
        kv_bytes_per_token=model.kv_bytes_per_token,
        num_beams=case.num_beams,
        prompt_tokens=PROMPT_TOKENS,
        generate_tokens=GENERATE_TOKENS,
        step_tokens=case.step_tokens,
        kv_budget_bytes=kv_budget_bytes(case),
    )


@lru_cache(maxsize=64)
def _tree(num_beams: int, width: int, step_tokens: int, search: SearchName) -> StepTree:
    return grow(
        SyntheticSearch(
            num_beams, width, PROMPT_TOKENS, GENERATE_TOKENS, step_tokens, search=search
        )
    )


def _hardware(case: SimulatedCase) -> HardwareProfile:
    profile = find_profile(case.gpu)
    if case.link == "nominal":
        return profile
    return replace(profile, h2d_bandwidth=1e30, d2h_bandwidth=1e30, copy_launch_s=1e-30)


def _simulation(case: SimulatedCase, variant: str, layout: Layout) -> Simulation:
    shape, step = shape_of(case), case.step_tokens
    model = ModelCosts.of(shape, _HALF)
    return Simulation(
        _tree(case.num_beams, case.width, step, case.search),
        model,
        RooflineCosts.of(model, _hardware(case), layout),
        kv_budget_bytes(case),
        ScheduleSettings(**VARIANTS[variant].options),
        StepSettings(step_tokens=step, max_step_tokens=step, max_tokens=GENERATE_TOKENS),
        shape.context,
    )


@lru_cache(maxsize=1024)
def simulate(
    case: SimulatedCase, variant: str, layout: Layout = Layout.DENSE
) -> SimulationResult | None:
    """One simulated run; None if it does not fit."""
    return simulate_if_fits(_simulation(case, variant, layout))


def simulated_steps_s(case: SimulatedCase, variant: str, layout: Layout) -> list[float]:
    """Seconds of each step (round), stalls included."""
    clock = VirtualClock()
    timeline = Timeline(lambda: clock.now_s)
    run_simulation(_simulation(case, variant, layout), clock, timeline)
    ends = [span.end_s for span in timeline.spans if span.name == "verify"]
    starts = [min(span.start_s for span in timeline.spans if span.name == "decode"), *ends]
    return [end - start for start, end in zip(starts, ends, strict=False)]


def speedup_rows(
    cases: Iterable[SimulatedCase], layouts: Sequence[Layout] = (Layout.DENSE, Layout.TREE)
) -> list[dict[str, Any]]:
    """Seconds of all variants, and their speedup over layer-wise with a copy per beam."""
    rows = []
    for case in cases:
        say(f"  simulating {case.model}, {case.num_beams} beams, steps of {case.step_tokens}")
        baseline = simulate(case, BASELINE)
        for layout in layouts:
            for name in VARIANTS:
                found = simulate(case, name, layout)
                both = baseline and found
                rows.append(
                    {
                        "model": case.model,
                        "beams": case.num_beams,
                        "step": case.step_tokens,
                        "layout": str(layout),
                        "variant": name,
                        "time_s": found and round(found.time_s, 2),
                        "stall_s": found and round(found.stall_s, 2),
                        "io_share": found and round(found.io_share, 4),
                        "h2d_gib": found and round(found.h2d_bytes / GIB, 1),
                        "groups": found and found.groups,
                        "speedup": round(baseline.time_s / found.time_s, 2) if both else None,
                        "offloads": baseline is not None and baseline.h2d_bytes > 0,
                    }
                )
    return rows


# --- output ----------------------------------------------------------------------------------


def parse(doc: str) -> argparse.Namespace:
    """The options that every figure has. rounds: of each real run."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs")
    parser.add_argument("--keep-measured", action="store_true", help="real runs of the last result")
    parser.add_argument("--no-measured", action="store_true", help="no real runs")
    parser.add_argument("--rounds", type=int, help="of real runs (default: 3, quick: 1)")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    torch.set_num_threads(1)  # the link's copiers have the other cores
    return args


def real_rows(name: str, args: argparse.Namespace, measure: Callable[[], Any]) -> Any:
    """The rows of real runs: measured here, kept from the last result file, or None."""
    if args.no_measured:
        return None
    if args.keep_measured:
        return json.loads((RESULTS / f"{name}.json").read_text())["measured"]
    say("real runs")
    return measure()


def compared(what: str, paper: Any, simulated: Any, measured: Any = None) -> dict[str, Any]:
    """A row of the comparison; None where there is no such figure."""
    return {"what": what, "paper": paper, "simulated": simulated, "measured": measured}


def span(values: Iterable[float | None], digits: int = 2) -> str | None:
    """Least and greatest, as `3.39-9.72`."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    low, high = f"{min(found):.{digits}f}", f"{max(found):.{digits}f}"
    return low if low == high else f"{low}-{high}"


def axes(num_axes: int, width: float = 5.0) -> tuple[Any, Any]:
    """A figure with that many plots side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, found = pyplot.subplots(1, num_axes, figsize=(width * num_axes, 4), squeeze=False)
    for each in found[0]:
        each.grid(axis="y", alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, found[0]


def report(
    name: str, figure: Any, comparison: Sequence[Mapping[str, Any]], details: Mapping[str, Any]
) -> None:
    """Write plot and JSON, print the comparison, end with the JSON line."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=130)
    extra = [name for name in comparison[0] if name not in _COLUMNS]
    say(table(comparison, [*_COLUMNS, *extra]))
    link = f"emulated, {LINK_BANDWIDTH / 1e6:.0f} MB/s each way, unless a row says otherwise"
    measured = {"model": SMALL_MODEL, "link": link}
    finish(name, {"comparison": list(comparison), "measured_on": measured, **details})
