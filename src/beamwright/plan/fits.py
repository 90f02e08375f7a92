"""How much KV a search needs so that nothing leaves the device, and how many paths fit.

Needs are judged over searches that are sampled (`workload`): nearly every one fits, or some do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from beamwright.plan.costs import ModelCosts
from beamwright.plan.workload import (
    Spread,
    Workload,
    expected_nodes,
    held_tokens,
    sampled_nodes,
)

if TYPE_CHECKING:
    from beamwright.plan.workload import Counts

MARK_TOKENS = 1
"""Of every step: what marks its end, or the token before it that a head looks back at."""

Fit = Literal["no", "borderline", "fits"]
_ORDER = get_args(Fit)
_SAMPLED_BEAMS = 256


@dataclass(frozen=True)
class Scorer:
    """A verifier: its costs, and what it may hold on the device."""

    model: ModelCosts
    kv_budget_bytes: int


def in_verifier_tokens(workload: Workload) -> Workload:
    """The same search as a verifier reads it: every step has a mark more."""
    return replace(
        workload,
        step_tokens=workload.step_tokens + MARK_TOKENS,
        generate_tokens=workload.generate_tokens + MARK_TOKENS * workload.num_steps,
    )


@dataclass(frozen=True)
class ResidentNeed:
    """Bytes of KV and states with everything on the device, shared; of no verifier none."""

    generator: Spread
    verifier: Spread

    def fit(self, kv_budget_bytes: int, scorer: Scorer | None = None) -> Fit:
        """The worse of both; borderline: some searches fit and some do not."""
        budgets = (kv_budget_bytes, 0 if scorer is None else scorer.kv_budget_bytes)
        verdicts: list[Fit] = [
            "fits" if need.worst <= budget else "borderline" if need.least <= budget else "no"
            for need, budget in zip((self.generator, self.verifier), budgets, strict=True)
        ]
        return min(verdicts, key=_ORDER.index)


def resident_need(
    workload: Workload,
    model: ModelCosts,
    scorer: Scorer | None = None,
    nodes_of: Callable[[Workload], Counts] = sampled_nodes,
) -> ResidentNeed:
    """What single searches need so that nothing has to leave the device."""
    num_nodes = nodes_of(workload)
    states = workload.num_states(workload.num_beams) * model.state_bytes
    generator = held_tokens(workload, num_nodes).scaled(model.kv_bytes_per_token, states)
    scored = held_tokens(in_verifier_tokens(workload), num_nodes)
    return ResidentNeed(generator, scored.scaled(scorer.model.kv_bytes_per_token if scorer else 0))


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
        need = resident_need(wide, model, scorer, expected_nodes)
        states = wide.num_states(wide.num_beams) * model.state_bytes
        full = (states + spread * (need.generator.mean - states)) / kv_budget_bytes
        scored = spread * need.verifier.mean
        return max(full, scored / scorer.kv_budget_bytes) if scorer else full

    # Searches with more beams differ less from each other: one of moderate size stands for them.
    families = _largest(lambda number: load(number) <= 1)
    typical = wider(max(1, min(families, _SAMPLED_BEAMS // workload.width)))
    held = held_tokens(typical, sampled_nodes(typical))
    return workload.width * _largest(lambda number: load(number, held.worst / held.mean) <= 1)


def _largest(holds: Callable[[int], bool]) -> int:
    """The last number from 1 on of which something holds that stops to hold; 0 if of none."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
