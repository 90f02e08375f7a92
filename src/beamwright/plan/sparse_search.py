"""One search decoded sparsely, with KV at home on the host: beside the schedules of `schedules`.

The device holds what rows select, and as many rows run at a time as have room for it, nothing
shared: what rows of one path agree on is not known beforehand. Within a step a token costs what it
costs in the middle of it. Top-k and gathers take no time here (`LEAST_GAIN` stands for them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from beamwright.plan.compare import estimate
from beamwright.plan.estimate import NO_FIT, Estimate, Fit, Totals, fit_of
from beamwright.plan.growth import TreeStep, Workload, tree_steps
from beamwright.plan.model import Hardware, ModelCosts
from beamwright.plan.roofline import Layout, Roofline
from beamwright.plan.sampling import sampled_searches
from beamwright.plan.schedules import ScheduleRun
from beamwright.plan.scoring import Scorer
from beamwright.plan.sparse import AttentionShape, RankSeconds, SparseLoad
from beamwright.plan.sparse_host import Host, Scored, host_ranks
from beamwright.protocols import Direction

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
    shape: AttentionShape
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
    hardware: Hardware,
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
