"""Predict whether all KV of a search fits the device, and how many paths would fit.

Searches with equal settings need different amounts of KV. The verdict is therefore about sampled
searches (`workload`): nearly all fit, only some fit, or none fits.
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
    peak_tokens,
    sampled_nodes,
)

if TYPE_CHECKING:
    from beamwright.plan.workload import Counts

# Tokens that a verifier prefills in addition to each step: the mark at the step's end, or the token
# before the step, which some score heads read.
MARK_TOKENS = 1

Fit = Literal["no", "borderline", "fits"]
_ORDER = get_args(Fit)
_SAMPLED_BEAMS = 256


@dataclass(frozen=True)
class VerifierCosts:
    """The verifier of an estimate: its model costs and its KV budget on the device."""

    model: ModelCosts
    kv_budget_bytes: int


def with_mark_tokens(workload: Workload) -> Workload:
    """Return `workload` as the verifier sees it: every step has MARK_TOKENS more tokens."""
    return replace(
        workload,
        step_tokens=workload.step_tokens + MARK_TOKENS,
        generate_tokens=workload.generate_tokens + MARK_TOKENS * workload.num_steps,
    )


@dataclass(frozen=True)
class ResidentKVNeed:
    """Device bytes of one search if all KV and recurrent states stay on the device.

    Paths share the KV of their prefixes. verifier: 0 if there is no verifier.
    """

    generator: Spread
    verifier: Spread

    def fit(self, kv_budget_bytes: int, scorer: VerifierCosts | None = None) -> Fit:
        """Return whether the search fits the KV budgets: the worse verdict of both models.

        "borderline" means that only some sampled searches fit.
        """
        budgets = (kv_budget_bytes, 0 if scorer is None else scorer.kv_budget_bytes)
        verdicts: list[Fit] = [
            "fits" if need.worst <= budget else "borderline" if need.least <= budget else "no"
            for need, budget in zip((self.generator, self.verifier), budgets, strict=True)
        ]
        return min(verdicts, key=_ORDER.index)


def resident_kv_need(
    workload: Workload,
    model: ModelCosts,
    scorer: VerifierCosts | None = None,
    nodes_of: Callable[[Workload], Counts] = sampled_nodes,
) -> ResidentKVNeed:
    """Return the device bytes that one search needs if no KV is offloaded.

    nodes_of: the source of node counts: sampled searches, or the expected tree (`expected_nodes`).
    """
    num_nodes = nodes_of(workload)
    states = workload.num_states(workload.num_beams) * model.state_bytes
    generator = peak_tokens(workload, num_nodes).scaled(model.kv_bytes_per_token, states)
    scored = peak_tokens(with_mark_tokens(workload), num_nodes)
    return ResidentKVNeed(
        generator, scored.scaled(scorer.model.kv_bytes_per_token if scorer else 0)
    )


def max_beams_in_gpu(
    workload: Workload, model: ModelCosts, kv_budget_bytes: int, scorer: VerifierCosts | None = None
) -> int:
    """Return the largest number of beams for which nearly every search fits without offloading.

    The number is a multiple of the width; 0 means that not even the children of one survivor fit.
    The number of beams in `workload` is ignored.
    """

    def wider(num_families: int) -> Workload:
        return replace(workload, num_beams=num_families * workload.width)

    def load(num_families: int, spread: float = 1.0) -> float:
        """Return the expected need divided by its budget, for the fuller of the two budgets.

        spread: factor on the expected KV, not on recurrent states, whose number is certain.
        """
        wide = wider(num_families)
        need = resident_kv_need(wide, model, scorer, expected_nodes)
        states = wide.num_states(wide.num_beams) * model.state_bytes
        full = (states + spread * (need.generator.mean - states)) / kv_budget_bytes
        scored = spread * need.verifier.mean
        return max(full, scored / scorer.kv_budget_bytes) if scorer else full

    # The ratio of worst to mean need is sampled at a moderate number of beams. Searches with more
    # beams differ less from each other, so that ratio is safe for them.
    families = _largest(lambda number: load(number) <= 1)
    typical = wider(max(1, min(families, _SAMPLED_BEAMS // workload.width)))
    held = peak_tokens(typical, sampled_nodes(typical))
    return workload.width * _largest(lambda number: load(number, held.worst / held.mean) <= 1)


def _largest(holds: Callable[[int], bool]) -> int:
    """Return the largest number for which `holds` is true, or 0 if it is false for 1.

    `holds` must be true up to some number and false from there on.
    """
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
