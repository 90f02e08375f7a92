"""Predict the time of a search: all KV on the device, or group by group with KV offloading.

The prediction is for the expected tree (`workload`) under the roofline (`costs`), with shared
prefixes. The lab's simulator predicts other schedules, and a KV copy per beam.

After each step, a verifier prefills the new tokens in batches (`verify.prm`). Its tokenizer is
assumed to make as many tokens of a step as the generator's, plus a mark. Selection and pruning take
no time. Every token of a step costs as much as the token in the middle of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beamwright.plan.costs import CHUNK_TOKENS, ModelCosts, Roofline
from beamwright.plan.fits import Fit, VerifierCosts, resident_kv_need, with_mark_tokens
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.workload import TreeStep, Workload, tree_steps
from beamwright.protocols import Direction

BATCH_TOKENS = 4096  # maximum tokens of one prefill batch, as in `models.prefill`
_PADDING = 8  # a prefill pads the length of its rows to a multiple of this number


@dataclass(frozen=True)
class Estimate:
    """Predicted times and bytes of a search under one schedule; None if it does not fit.

    fits: True if nearly every search fits.
    borderline: True if only some searches fit. The numbers are for the searches that fit.
    time_s: the sum of prefill_s, decode_s, verify_s and stall_s.
    io_share: stall_s as a fraction of time_s.
    groups: number of groups of beams decoded, summed over all steps.
    peak_kv_bytes: maximum bytes of the generator's KV on the device.
    limited_by: the activity that takes most of the time, and what limits it.
    """

    fits: bool
    borderline: bool = False
    time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    verify_s: float | None = None
    stall_s: float | None = None
    io_share: float | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    groups: int | None = None
    peak_kv_bytes: int | None = None
    limited_by: str | None = None


@dataclass
class Totals:
    """Sums over the steps of one search; the fields mean the same as in `Estimate`."""

    decode_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    peak_kv_bytes: float = 0.0
    groups: int = 0


def estimate(
    workload: Workload,
    model: ModelCosts,
    hardware: HardwareProfile,
    kv_budget_bytes: int,
    scorer: VerifierCosts | None = None,
) -> Mapping[str, Estimate]:
    """Return the estimates that `beamwright plan` prints, by "SCHEDULE/LAYOUT".

    The schedules are in-gpu (all KV on the device) and locality (offloading).
    """
    roofline = Roofline(model, hardware)

    def figures(fit: Fit, budget_bytes: float) -> Estimate:
        totals = None if fit == "no" else decode_costs(workload, roofline, budget_bytes)
        if totals is None:
            return Estimate(fits=False)
        if scorer is not None:
            add_verifier_costs(totals, workload, scorer, hardware)
        prefill_s = roofline.prefill_s(workload.prompt_tokens)
        time_s = prefill_s + totals.decode_s + totals.verify_s + totals.stall_s
        sums: dict[str, Any] = {
            name: round(x) if name.endswith("_bytes") else x for name, x in vars(totals).items()
        }
        by = _limiting_activity(workload, roofline, totals, scorer)
        each = Estimate(fit == "fits", fit == "borderline", time_s, prefill_s, limited_by=by)
        return replace(each, io_share=totals.stall_s / time_s, **sums)

    resident = resident_kv_need(workload, model, scorer).fit(kv_budget_bytes, scorer)
    grouped: Fit = "fits" if _holds_a_path(workload, scorer) else "no"
    return {
        "in-gpu/tree": figures(resident, math.inf),
        "locality/tree": figures(grouped, kv_budget_bytes),
    }


def _holds_a_path(workload: Workload, scorer: VerifierCosts | None) -> bool:
    """Return True if one path fits the verifier's KV budget, so that locality can run at all."""
    if scorer is None:
        return True
    *_, last = tree_steps(with_mark_tokens(workload))
    path_tokens = round(last.group_held_tokens(workload.num_beams))  # one beam in each group
    return path_tokens * scorer.model.kv_bytes_per_token <= scorer.kv_budget_bytes


# --- the generator -------------------------------------------------------------------------------


def decode_costs(workload: Workload, roofline: Roofline, budget_bytes: float) -> Totals | None:
    """Return the decode costs of the locality schedule (LBS section 4).

    All beams form one group if they fit the budget. Otherwise each group is prefetched into the
    free memory while the previous one runs. From the first step that does not fit, all KV is also
    written to the host. The last group of a step is the first one of the next step, so one group
    per step is not loaded.

    Returns None if not even one beam fits.
    """
    totals, model, beams, spilled = Totals(), roofline.model, workload.num_beams, False
    for step in tree_steps(workload):
        sizes = ((n, _group_bytes(step, model, n)) for n in range(1, beams + 1))
        num_groups, held_bytes = next((g for g in sizes if g[1] <= budget_bytes), (0, 0.0))
        if not num_groups:
            return None
        group_s = step.num_tokens * roofline.decode_step_s(*_middle_pass(step, num_groups))
        totals.decode_s += num_groups * group_s
        totals.groups += num_groups
        totals.peak_kv_bytes = max(totals.peak_kv_bytes, held_bytes)
        if num_groups == 1:
            continue
        # KV of all paths when the step starts, and the recurrent states that rows begin from. KV
        # that consecutive groups share stays on the device.
        before_bytes = step.union_tokens * model.kv_bytes_per_token
        before_bytes += beams // workload.width * model.state_bytes
        load_bytes = before_bytes / num_groups
        free_bytes = budget_bytes - held_bytes
        ahead_s = roofline.move_kv_s(min(load_bytes, free_bytes), Direction.H2D)
        late_s = roofline.move_kv_s(max(0.0, load_bytes - free_bytes), Direction.H2D)
        stall_s = (num_groups - 1) * (late_s + max(0.0, ahead_s - group_s))
        store_bytes: float = beams * (
            step.num_tokens * model.kv_bytes_per_token + model.state_bytes
        )
        if not spilled:  # until now, nothing has been written back
            store_bytes += before_bytes
            spilled = True
        store_s = roofline.move_kv_s(store_bytes, Direction.D2H)
        totals.stall_s += max(stall_s, store_s - num_groups * group_s)
        totals.h2d_bytes += (num_groups - 1) * load_bytes
        totals.d2h_bytes += store_bytes
    return totals


def _middle_pass(step: TreeStep, num_groups: int) -> tuple[int, float, float]:
    """Return the `Roofline.decode_step_s` arguments for a mean group in the middle of the step."""
    beams, middle = step.workload.num_beams, (step.num_tokens + 1) / 2
    read = step.grouped_union_tokens(num_groups) + beams * middle
    seen = beams * (step.path_tokens + middle)
    return -(-beams // num_groups), read / num_groups, seen / num_groups


def _group_bytes(step: TreeStep, model: ModelCosts, num_groups: int) -> float:
    """Return the device bytes of the largest of `num_groups` even groups when the step ends.

    The bytes are those of KV in whole blocks and of recurrent states.
    """
    num_states = step.workload.num_states(-(-step.workload.num_beams // num_groups))
    kv_bytes = step.group_held_tokens(num_groups) * model.kv_bytes_per_token
    return kv_bytes + num_states * model.state_bytes


# --- the verifier --------------------------------------------------------------------------------


def add_verifier_costs(
    totals: Totals, workload: Workload, scorer: VerifierCosts, hardware: HardwareProfile
) -> None:
    """Add the verifier's costs to `totals`: prefill of the problem and of each step, and transfers.

    Missing KV is loaded before it is read, and compute waits for it. Once the tree does not fit the
    budget, every step is also written to the host. These writes cost no time, since they overlap
    with the decoding of the next step.
    """
    work, kv_bytes, spilled = with_mark_tokens(workload), scorer.model.kv_bytes_per_token, False
    roofline = Roofline(scorer.model, hardware)
    totals.verify_s += roofline.prefill_s(work.prompt_tokens)
    for step in tree_steps(work):
        for count, forward in _prefill_passes(step):
            totals.verify_s += count * roofline.decode_step_s(*forward)
        load_bytes = max(0.0, step.group_held_tokens(1) * kv_bytes - scorer.kv_budget_bytes)
        if load_bytes or spilled:
            totals.stall_s += roofline.move_kv_s(load_bytes, Direction.H2D)
            totals.h2d_bytes += load_bytes
            backlog = 0.0 if spilled else step.union_tokens
            totals.d2h_bytes += (work.num_beams * step.num_tokens + backlog) * kv_bytes
            spilled = True


def _prefill_passes(step: TreeStep) -> Iterator[tuple[int, tuple[int, float, float]]]:
    """Yield the verifier's passes over one step as (number of equal passes, arguments of a pass).

    The arguments are those of `Roofline.decode_step_s`: new tokens, tokens read, tokens seen. Each
    row's step is cut into chunks, and the rows of a chunk are divided into batches.
    """
    beams = step.workload.num_beams
    for offset in range(0, step.num_tokens, CHUNK_TOKENS):
        chunk = min(CHUNK_TOKENS, step.num_tokens - offset)
        rows_of_a_batch = max(1, BATCH_TOKENS // (-(-chunk // _PADDING) * _PADDING))
        count = math.ceil(beams / rows_of_a_batch)
        rows = beams / count
        union = step.grouped_union_tokens(count) / count
        seen = rows * chunk * (step.path_tokens + offset + (chunk + 1) / 2)
        yield count, (round(rows * chunk), union + rows * (offset + chunk), seen)


# --- what takes most of the time -----------------------------------------------------------------


def _limiting_activity(
    workload: Workload, roofline: Roofline, totals: Totals, scorer: VerifierCosts | None
) -> str:
    most = max(totals.decode_s, totals.verify_s, totals.stall_s)
    if most == totals.stall_s:
        return "link"
    if scorer is not None and most == totals.verify_s:
        steps = [*tree_steps(with_mark_tokens(workload))]
        _, forward = next(_prefill_passes(steps[len(steps) // 2]))
        return f"verifier: {Roofline(scorer.model, roofline.hardware).bottleneck(*forward)}"
    steps = [*tree_steps(workload)]
    num_groups = max(1, round(totals.groups / len(steps)))
    return f"decoding: {roofline.bottleneck(*_middle_pass(steps[len(steps) // 2], num_groups))}"
