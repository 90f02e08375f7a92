"""Every schedule beside the others, before anything is loaded: which fit, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.schedules import (
    Estimate,
    ScheduleRun,
    Scorer,
    in_verifier_tokens,
)
from beamwright.plan.workload import (
    SampledSearches,
    Spread,
    Workload,
    expected_search,
    sampled_searches,
)


def estimate(
    workload: Workload,
    model: ModelCosts,
    hardware: HardwareProfile,
    kv_budget_bytes: int,
    scorer: Scorer | None = None,
) -> Mapping[str, Estimate]:
    """Every schedule with every layout, as "SCHEDULE/LAYOUT"; of a model with recurrent layers
    those that know states."""
    roofline, searches = Roofline(model, hardware), sampled_searches(workload)
    runs = [
        ScheduleRun(workload, roofline, kv_budget_bytes, layout, searches, scorer)
        for layout in (Layout.DENSE, Layout.TREE)
        if layout is Layout.TREE or not model.state_bytes
    ]
    streamed = [] if model.state_bytes else runs
    return {
        **{f"in-gpu/{run.layout}": run.in_gpu() for run in runs},
        **{f"layerwise/{run.layout}": run.layerwise() for run in streamed},
        **{f"locality/{run.layout}": run.locality() for run in runs},
    }


@dataclass(frozen=True)
class ResidentNeed:
    """Bytes of KV and states where everything is on the device and shared; of no verifier none."""

    generator: Spread
    verifier: Spread


def resident_need(
    workload: Workload,
    model: ModelCosts,
    scorer: Scorer | None = None,
    searches: SampledSearches | None = None,
) -> ResidentNeed:
    """What single searches need so that nothing has to leave the device."""
    searches = searches or sampled_searches(workload)
    states = workload.num_states(workload.num_beams) * model.state_bytes
    generator = searches.held_tokens(workload).scaled(model.kv_bytes_per_token, states)
    scored = searches.held_tokens(in_verifier_tokens(workload))
    size = 0 if scorer is None else scorer.model.kv_bytes_per_token
    return ResidentNeed(generator, scored.scaled(size))


def max_beams_in_gpu(
    workload: Workload, model: ModelCosts, kv_budget_bytes: int, scorer: Scorer | None = None
) -> int:
    """Most beams, a multiple of width, of which nearly every search fits to the end, KV shared.

    0 if not even one family does. The workload's own number of beams is ignored.
    """

    def wider(num_families: int) -> Workload:
        return replace(workload, num_beams=num_families * workload.width)

    def load(num_families: int, spread: float = 1.0) -> float:
        """The expected need over the budgets, the fuller of the two; KV times a spread."""
        wide = wider(num_families)
        need = resident_need(wide, model, scorer, expected_search(wide))
        states = wide.num_states(wide.num_beams) * model.state_bytes
        full = (states + spread * (need.generator.mean - states)) / kv_budget_bytes
        scored = spread * need.verifier.mean
        return max(full, scored / scorer.kv_budget_bytes) if scorer else full

    # Searches with more beams differ less from each other: one of moderate size stands for them.
    families = _largest(lambda number: load(number) <= 1)
    typical = wider(max(1, min(families, _SAMPLED_BEAMS // workload.width)))
    held = sampled_searches(typical).held_tokens(typical)
    families = _largest(lambda number: load(number, held.worst / held.mean) <= 1)
    return families * workload.width


_SAMPLED_BEAMS = 256


def _largest(holds: Callable[[int], bool]) -> int:
    """The last number from 1 on of which something holds that stops to hold; 0 if of none."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
