"""Real runs like those of the LBS paper: a small random model on this machine.

The link between device and host memory is throttled to an emulated bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from beamwright.models.shape import shape_from_text
from beamwright.plan.costs import Layout
from beamwright.protocols import RoundReport
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver
from beamwright_lab.common import interleave
from beamwright_lab.paper.cases import (
    BASELINE,
    LINK_BANDWIDTH,
    MIB,
    PROMPT_TOKENS,
    SMALL_MODEL,
    VARIANTS,
    SearchName,
)
from beamwright_lab.studies.lbs import LbsCase

_SINGLE = 4  # bytes per element of float32


@dataclass(frozen=True)
class RealCase:
    """A search on this machine. kv_bytes: of the device; in-gpu gets what it needs instead."""

    num_beams: int = 8
    step_tokens: int = 16
    generate_tokens: int = 128
    kv_bytes: int = 8 * MIB
    search: SearchName = "beam"
    width: int = 2
    model: str = SMALL_MODEL
    link_bandwidth: int | None = LINK_BANDWIDTH

    @property
    def analytic(self) -> LbsCase:
        shape = shape_from_text(self.model.removeprefix("random:"))
        return LbsCase(
            num_layers=shape.layers,
            kv_bytes_per_token=shape.kv_bytes_per_token(_SINGLE),
            num_beams=self.num_beams,
            prompt_tokens=PROMPT_TOKENS,
            generate_tokens=self.generate_tokens,
            step_tokens=self.step_tokens,
            kv_budget_bytes=self.kv_bytes,
        )


@dataclass(frozen=True)
class RealRun:
    """What one run on this machine took.

    steps_s: seconds of each step. totals_s: seconds of this run and of the others like it.
    """

    solution: Solution
    steps_s: tuple[float, ...]
    totals_s: tuple[float, ...] = ()

    def row(self) -> dict[str, Any]:
        time, kv = self.solution.time, self.solution.kv
        return {
            "time_s": round(time.total_s, 3),
            "median_s": round(median(self.totals_s or (time.total_s,)), 3),
            "decode_s": round(time.decode_s, 3),
            "stall_s": round(time.stall_s, 3),
            "other_s": round(time.total_s - time.decode_s - time.stall_s, 3),
            "io_share": round(self.solution.io_share, 4),
            "h2d_mib": round(kv.h2d_bytes / MIB, 1),
            "d2h_mib": round(kv.d2h_bytes / MIB, 1),
            "groups": kv.groups,
            "tree_hash": self.solution.tree_hash,
            "exact": self.solution.exact,
        }


@dataclass(frozen=True)
class Side:
    """One row of a measurement."""

    case: RealCase
    variant: str
    layout: Layout = Layout.DENSE


def run_real(side: Side) -> RealRun:
    """One real search from a synthetic prompt."""
    case, kv_bytes = side.case, side.case.kv_bytes
    if side.variant == "in-gpu":
        path_tokens = PROMPT_TOKENS + case.generate_tokens
        kv_bytes = 2 * case.analytic.kv_bytes(path_tokens)
    ends_s: list[float] = [0.0]

    def on_round(report: RoundReport) -> None:
        ends_s.append(report.elapsed_s)

    with Solver(
        model=case.model,
        verifier="logprob",
        ignore_eos=True,
        search=case.search,
        n=case.num_beams,
        width=case.width,
        max_rounds=-(-case.generate_tokens // case.step_tokens),
        step_tokens=case.step_tokens,
        max_tokens=case.generate_tokens,
        kv_memory=kv_bytes,
        link_bandwidth=None if side.variant == "in-gpu" else case.link_bandwidth,
        attention=str(side.layout),
        **VARIANTS[side.variant].options,
    ) as solver:
        solution = solver.synthetic(PROMPT_TOKENS, on_round=on_round)
    steps_s = tuple(end - start for start, end in pairwise(ends_s))
    return RealRun(solution, steps_s)


def measure(sides: Mapping[str, Side], num_rounds: int) -> dict[str, RealRun]:
    """Interleaved rounds of all sides; the fastest run of each, with the seconds of all."""
    run_real(Side(RealCase(num_beams=4, generate_tokens=16), "in-gpu"))  # warms torch up
    best: dict[str, RealRun] = {}
    totals_s: dict[str, list[float]] = {name: [] for name in sides}

    def once(name: str, side: Side) -> float:
        run = run_real(side)
        took_s = run.solution.time.total_s
        totals_s[name].append(took_s)
        if name not in best or took_s < best[name].solution.time.total_s:
            best[name] = run
        return took_s

    interleave(
        {name: lambda n=name, s=side: once(n, s) for name, side in sides.items()},  # type: ignore[misc]
        num_rounds,
    )
    return {name: replace(run, totals_s=tuple(totals_s[name])) for name, run in best.items()}


def measured_rows(sides: Mapping[str, Side], runs: Mapping[str, RealRun]) -> list[dict[str, Any]]:
    """One row per side, with its speedups over the layer-wise sides of the same search, if any.

    speedup: over a copy per beam, the paper's baseline; speedup_shared: over shared KV.
    """
    baselines = {
        (replace(side.case, kv_bytes=0), side.layout): runs[name].solution.time.total_s
        for name, side in sides.items()
        if side.variant == BASELINE
    }
    rows = []
    for name, side in sides.items():
        case, time_s = replace(side.case, kv_bytes=0), runs[name].solution.time.total_s
        copies_s, shared_s = (baselines.get((case, layout)) for layout in Layout)
        rows.append(
            {
                "beams": side.case.num_beams,
                "step": side.case.step_tokens,
                "layout": str(side.layout),
                "variant": side.variant,
                **runs[name].row(),
                "speedup": copies_s and round(copies_s / time_s, 2),
                "speedup_shared": shared_s and round(shared_s / time_s, 2),
            }
        )
    return rows
