"""Simulate the searches of the LBS paper's evaluation: sizes of section 5.1, and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from beamwright.engine.timeline import Timeline
from beamwright.models.named import shape_from_text
from beamwright.models.shape import ModelShape
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.solver.model_bytes import ModelBytes
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.run import SimulationResult, simulate_if_fits
from beamwright_lab.simulator.run import simulate as run_simulation
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.studies.lbs import LbsCase

GIB = 2**30
PROMPT_TOKENS, GENERATE_TOKENS = 128, 1920
PAPER_KV_BYTES = 7 * GIB  # in Figure 7
_HALF = 2  # bytes per element of the simulated models
_PCIE4_X8 = 15.75e9
BASELINE = "layerwise"

SearchName = Literal["beam", "best-of-n"]


@dataclass(frozen=True)
class Variant:
    """A schedule with options, and its label in tables."""

    label: str
    options: Mapping[str, Any]


def _locality(label: str, **options: Any) -> Variant:
    return Variant(label, MappingProxyType({"schedule": "locality", **options}))


# Algorithm 1. No KV stays on the device between groups or steps.
_PUBLISHED = {"planner": "greedy", "reuse": False, "batching": "grouped", "write_back": "eager"}
_BARE = {"inter_beam": False, "balance": False, "prefetch": False}
VARIANTS = MappingProxyType(
    {
        BASELINE: Variant("layer-wise", {"schedule": "layerwise"}),
        "lbs-inter-token": _locality("LBS: inter-token", **_PUBLISHED, **_BARE),
        "lbs-prefetch": _locality("LBS: + prefetch, balance", **_PUBLISHED, inter_beam=False),
        "lbs": _locality("LBS as published: + inter-beam", **_PUBLISHED),
        "locality": _locality(
            "Beamwright: ranges, cross-step reuse, prefetch, farthest-use eviction"
        ),
        "in-gpu": Variant("in-GPU", {"schedule": "in-gpu"}),
    }
)
LBS = "lbs"
OURS = "locality"
LOCALITY = ("lbs-inter-token", "lbs-prefetch", LBS, OURS)


# --- simulated -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedCase:
    """A search of the paper's evaluation.

    kv_bytes: device memory for KV; None: what weights and activations leave free.
    link: "nominal": the GPU profile's; "instant": transfers take no time; "x8": PCIe 4.0 x8.
    copies_passes: how often attention over per-beam copies reads the KV; None: as in the GPU
        profile.
    """

    model: str = "opt-6.7b"
    gpu: str = "rtx-4090"
    num_beams: int = 64
    step_tokens: int = 32
    kv_bytes: int | None = PAPER_KV_BYTES
    search: SearchName = "beam"
    width: int = 2
    link: Literal["nominal", "instant", "x8"] = "nominal"
    copies_passes: float | None = None


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
    """Return the same search as input of the paper's equations."""
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
def _tree(num_beams: int, width: int, step_tokens: int, search: SearchName) -> RecordedTree:
    return grow(
        SyntheticSearch(
            num_beams, width, PROMPT_TOKENS, GENERATE_TOKENS, step_tokens, search=search
        )
    )


def _hardware(case: SimulatedCase) -> HardwareProfile:
    profile = find_profile(case.gpu)
    if case.copies_passes is not None:
        profile = replace(profile, copies_share=profile.bandwidth_share / case.copies_passes)
    if case.link == "x8":
        return replace(profile, h2d_bandwidth=_PCIE4_X8, d2h_bandwidth=_PCIE4_X8)
    if case.link == "instant":
        return replace(profile, h2d_bandwidth=1e30, d2h_bandwidth=1e30, copy_launch_s=1e-30)
    return profile


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
    """Simulate a search with a variant's schedule; return None if it does not fit."""
    return simulate_if_fits(_simulation(case, variant, layout))


def simulated_steps_s(case: SimulatedCase, variant: str, layout: Layout) -> list[float]:
    """Return the seconds of each round, stalls included."""
    clock = VirtualClock()
    timeline = Timeline(lambda: clock.now_s)
    run_simulation(_simulation(case, variant, layout), clock, timeline)
    ends = [span.end_s for span in timeline.spans if span.name == "verify"]
    starts = [min(span.start_s for span in timeline.spans if span.name == "decode"), *ends]
    return [end - start for start, end in zip(starts, ends, strict=False)]
