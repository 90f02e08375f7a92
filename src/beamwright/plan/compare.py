"""Every schedule beside the others, before anything is loaded: which fit, and which is fastest.

And the same search decoded sparsely, with KV on the host: the device holds what rows select, and as
many rows run at a time as have room for it, nothing shared, since what rows of one path agree on is
not known beforehand. Top-k and gathers take no time here (`LEAST_GAIN` stands for them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from beamwright.plan.costs import Layout, ModelCosts, Roofline, Shape
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.schedules import (
    NO_FIT,
    Estimate,
    Fit,
    ScheduleName,
    ScheduleRun,
    Totals,
    fit_of,
)
from beamwright.plan.scoring import Scorer, in_verifier_tokens
from beamwright.plan.sparse import Host, RankSeconds, Scored, SparseLoad, host_ranks
from beamwright.plan.workload import (
    SampledSearches,
    Spread,
    TreeStep,
    Workload,
    expected_search,
    sampled_searches,
    tree_steps,
)
from beamwright.protocols import Direction


def estimate(
    workload: Workload,
    model: ModelCosts,
    hardware: HardwareProfile,
    kv_budget_bytes: int,
    scorer: Scorer | None = None,
) -> Mapping[str, Estimate]:
    """Every schedule with every layout, as "SCHEDULE/LAYOUT"."""
    roofline, searches = Roofline(model, hardware), sampled_searches(workload)
    runs = [
        ScheduleRun(workload, roofline, kv_budget_bytes, layout, searches, scorer)
        for layout in (Layout.DENSE, Layout.TREE)
    ]
    return {
        f"{name}/{run.layout}": method(run)
        for name, method in (
            ("in-gpu", ScheduleRun.in_gpu),
            ("layerwise", ScheduleRun.layerwise),
            ("locality", ScheduleRun.locality),
        )
        for run in runs
    }


def choose_schedule(
    workload: Workload,
    model: ModelCosts,
    hardware: HardwareProfile,
    kv_budget_bytes: int,
    layout: Layout = Layout.TREE,
) -> ScheduleName:
    """In-GPU if the expected tree fits, else the faster of the other two.

    If neither can run, "locality": it needs the least, and reports what is missing when it runs.
    """
    roofline, expected = Roofline(model, hardware), expected_search(workload)
    run = ScheduleRun(workload, roofline, kv_budget_bytes, layout, expected)
    if run.in_gpu().fits:
        return "in-gpu"
    layerwise_s, locality_s = run.layerwise().time_s, run.locality().time_s
    if layerwise_s is None or (locality_s is not None and locality_s <= layerwise_s):
        return "locality"
    return "layerwise"


@dataclass(frozen=True)
class ResidentNeed:
    """KV bytes where everything is on the device and shared. verifier: None without one."""

    generator: Spread
    verifier: Spread | None = None

    @classmethod
    def of(
        cls,
        searches: SampledSearches,
        workload: Workload,
        model: ModelCosts,
        verifier: ModelCosts | None,
    ) -> ResidentNeed:
        """The need of these searches."""

        def need(costs: ModelCosts, seen: Workload) -> Spread:
            return searches.held_tokens(seen, copies=False).scaled(costs.kv_bytes_per_token)

        generator = need(model, workload)
        if verifier is None:
            return cls(generator)
        return cls(generator, need(verifier, in_verifier_tokens(workload)))


def resident_need(
    workload: Workload, model: ModelCosts, verifier: ModelCosts | None = None
) -> ResidentNeed:
    """What single searches need so that nothing has to leave the device."""
    return ResidentNeed.of(sampled_searches(workload), workload, model, verifier)


def max_beams_in_gpu(
    workload: Workload, model: ModelCosts, kv_budget_bytes: int, scorer: Scorer | None = None
) -> int:
    """Most beams, a multiple of width, of which nearly every search fits to the end, KV shared.

    0 if not even one family does. The workload's own number of beams is ignored.
    """
    verifier = None if scorer is None else scorer.model

    def wider(num_families: int) -> Workload:
        return replace(workload, num_beams=num_families * workload.width)

    def load(num_families: int) -> float:
        """The expected need over the budgets, the fuller of the two."""
        wide = wider(num_families)
        need = ResidentNeed.of(expected_search(wide), wide, model, verifier)
        found = need.generator.mean / kv_budget_bytes
        if scorer is not None and need.verifier is not None:
            found = max(found, need.verifier.mean / scorer.kv_budget_bytes)
        return found

    # Searches with more beams differ less from each other: one of moderate size stands for them.
    families = _largest(lambda number: load(number) <= 1)
    typical = wider(max(1, min(families, _SAMPLED_BEAMS // workload.width)))
    held = sampled_searches(typical).held_tokens(typical, copies=False)
    families = _largest(lambda number: load(number) * held.worst / held.mean <= 1)
    return families * workload.width


_SAMPLED_BEAMS = 256


def _largest(holds: Callable[[int], bool]) -> int:
    """The last number from 1 on of which something holds that stops to hold; 0 if of none."""
    if not holds(1):
        return 0
    low, high = 1, 2
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


LEAST_GAIN = 1.25
"""How many times as fast sparse decoding has to be before it is worth its error."""


class Rule(Protocol):
    """How many tokens rows select, and from when on: `sparse.SparseRule` is one."""

    def budget(self, visible: int, /) -> int: ...
    def is_sparse(self, visible: int, /) -> bool: ...


@dataclass(frozen=True)
class SparseCase:
    """A rule, and what it costs to follow.

    scored: what the tokens are chosen by; None where nothing is scored that is not attended to.
    foreseen: queries are known before the layer needs what they select; by_layers: from the layer
    before, not from the token before.
    """

    rule: Rule
    shape: Shape
    scored: Scored | None
    foreseen: bool
    by_layers: bool = False
    host: Host = field(default_factory=Host)

    def load(self, rows: int, visible: int, shared: float) -> SparseLoad:
        """Rows that select. visible: tokens of a path; shared: distinct ones over their sum."""
        return SparseLoad(rows, visible, self.rule.budget(visible), shared=shared)

    def most_rows(self, longest: int, kv_bytes_per_token: int, budget_bytes: float) -> int:
        """Rows that may be decoded at a time, on paths up to so many tokens."""
        return int(budget_bytes // (self.rule.budget(longest) * kv_bytes_per_token))

    def token_s(self, ranks: RankSeconds) -> float:
        """Seconds of a token of all rows: one after the other, or beside each other at best."""
        if self.foreseen:
            return ranks.ideal_s
        return ranks.inference_s + ranks.cache_s + ranks.up_s + ranks.down_s


def sparse_host(run: ScheduleRun, case: SparseCase) -> Estimate:
    """The search with KV at home on the host.

    Rows that still read all have their paths cross the link once a step.
    """
    work = run.workload
    longest = work.prompt_tokens + work.generate_tokens
    rows = min(work.num_beams, case.most_rows(longest, run.kv_bytes, run.budget_bytes))
    verdict: Fit = "fits"
    if run.scoring is not None:
        verdict = fit_of(run.scoring.peak, run.scoring.scorer.kv_budget_bytes)
    if rows < 1 or verdict == "no":
        return NO_FIT
    totals, host_s = Totals(), 0.0
    batches = -(-work.num_beams // rows)
    for step in tree_steps(work):
        visible = step.path_tokens + (step.num_tokens + 1) // 2
        totals.d2h_bytes += work.num_beams * step.num_tokens * run.kv_bytes
        if case.rule.is_sparse(visible):
            host_s += _select(totals, run, case, step, batches)
        elif not _read_all(totals, run, step, batches):
            return NO_FIT
    link_s = run.roofline.transfer(totals.h2d_bytes, 0, Direction.H2D)
    waits = totals.stall_s > max(totals.decode_s, totals.verify_s)
    return run.finished(totals, verdict, ("host" if host_s > link_s else "link") if waits else None)


def _select(
    totals: Totals, run: ScheduleRun, case: SparseCase, step: TreeStep, batches: int
) -> float:
    """Count one step of rows that select; returns the seconds that the host scores."""
    rows = -(-run.workload.num_beams // batches)
    middle = (step.num_tokens + 1) // 2
    visible = step.path_tokens + middle
    distinct = step.grouped_union_tokens(batches) / batches + rows * middle
    load = case.load(rows, visible, min(1.0, distinct / (rows * visible)))
    ranks = host_ranks(run.roofline, case.shape, load, case.scored, case.host)
    count = batches * step.num_tokens
    totals.decode_s += count * ranks.inference_s
    totals.stall_s += count * (case.token_s(ranks) - ranks.inference_s)
    totals.h2d_bytes += count * run.kv_bytes * load.chosen * case.host.missed
    totals.groups += batches
    totals.peak_bytes = max(totals.peak_bytes, load.chosen * run.kv_bytes)
    return count * ranks.cache_s


def _read_all(totals: Totals, run: ScheduleRun, step: TreeStep, batches: int) -> bool:
    """Count one step of rows that read all of their paths; False where the device has no room."""
    totals.peak_bytes = max(totals.peak_bytes, step.group_held_tokens(batches) * run.kv_bytes)
    if totals.peak_bytes > run.budget_bytes:
        return False
    run.decode(totals, step, batches)
    loaded_bytes = step.grouped_union_tokens(batches) * run.kv_bytes
    totals.h2d_bytes += loaded_bytes
    totals.stall_s += run.roofline.transfer(loaded_bytes, 0, Direction.H2D)
    return True


@dataclass(frozen=True)
class SparseVerdict:
    """The search decoded sparsely, and `full_s`, of the fastest schedule of full attention."""

    sparse: Estimate
    full_s: float

    @property
    def gain(self) -> float:
        """How many times as fast: 0 where it cannot run, infinite where nothing else can."""
        return 0.0 if self.sparse.time_s is None else self.full_s / self.sparse.time_s


def beside_full_attention(
    workload: Workload,
    model: ModelCosts,
    hardware: HardwareProfile,
    kv_budget_bytes: int,
    case: SparseCase,
    scorer: Scorer | None = None,
) -> SparseVerdict:
    """Whether sparse decoding would pay, whatever the selection costs in answers."""
    full = estimate(workload, model, hardware, kv_budget_bytes, scorer).values()
    seconds = [each.time_s for each in full if each.time_s is not None]
    roofline, searches = Roofline(model, hardware), sampled_searches(workload)
    run = ScheduleRun(workload, roofline, kv_budget_bytes, Layout.TREE, searches, scorer)
    return SparseVerdict(sparse_host(run, case), min(seconds, default=math.inf))
