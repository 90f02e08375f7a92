"""LBS Figure 5: time of a decoding step against the length, under layer-wise offloading.

The paper prints no numbers: a step costs about the same until the KV of all beams outgrows the
device, and rises sharply from there. The length of that knee is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from beamwright.cost import Layout, LbsCase
from lbs import (
    SimulatedCase,
    analytic_case,
    axes,
    compared,
    parse,
    real_rows,
    report,
    simulated_steps_s,
)
from lbs_real import RealCase, Side, measure

_STEP_TOKENS = 32
_SHARP = 1.25


def lengths(case: LbsCase) -> list[int]:
    """Tokens of a path at the end of each step."""
    ends = range(case.step_tokens, case.generate_tokens + 1, case.step_tokens)
    return [case.prompt_tokens + end for end in ends]


def knee(case: LbsCase, steps_s: Sequence[float]) -> int | None:
    """Length at the end of the step that is slower than the one before it by the most.

    The first step is left out: it warms up. None if no step is slower by `_SHARP`.
    """
    rises = [later / earlier for earlier, later in pairwise(steps_s[1:])]
    most = max(rises)
    return lengths(case)[rises.index(most) + 2] if most > _SHARP else None


def outgrown(case: LbsCase) -> int | None:
    """Length at the end of the first step whose KV outgrows the budget."""
    return next((n for n in lengths(case) if case.kv_bytes(n) > case.kv_budget_bytes), None)


def described(case: LbsCase, steps_s: Sequence[float]) -> dict[str, Any]:
    return {
        "beams": case.num_beams,
        "lengths": lengths(case),
        "steps_s": [round(each, 4) for each in steps_s],
        "outgrown_at": outgrown(case),
        "knee_at": knee(case, steps_s),
    }


def simulated(num_beams: int) -> dict[str, Any]:
    case = SimulatedCase(num_beams=num_beams, step_tokens=_STEP_TOKENS, kv_bytes=None)
    steps_s = simulated_steps_s(case, "layerwise", Layout.DENSE)
    return described(analytic_case(case), steps_s)


def measured(num_rounds: int) -> list[dict[str, Any]]:
    """Two searches that outgrow the device on the way."""
    cases = {f"{n} beams": RealCase(n, 8, kv_bytes=n * 192 * 8192) for n in (4, 8)}
    runs = measure({name: Side(case, "layerwise") for name, case in cases.items()}, num_rounds)
    return [described(case.analytic, runs[name].steps_s) for name, case in cases.items()]


def draw(rows: list[dict[str, Any]], real: list[dict[str, Any]] | None) -> Any:
    figure, plots = axes(2 if real else 1)
    titles = ("OPT-6.7B, RTX 4090, simulated", "this machine, emulated link")
    for plot, group, title in zip(plots, (rows, real or []), titles, strict=False):
        for row in group:
            plot.plot(row["lengths"], row["steps_s"], label=f"{row['beams']} beams")
        plot.set(xlabel="tokens of a path", ylabel="seconds per step", title=title)
        plot.set_yscale("log")
        plot.legend(fontsize=8)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    beams = (16, 32, 64) if args.quick else (4, 8, 16, 32, 64)
    rows = [simulated(num_beams) for num_beams in beams]
    real = real_rows("lbs_fig5", args, lambda: measured(args.rounds))
    comparison = [
        compared(
            f"knee, {row['beams']} beams (KV outgrows the device at {row['outgrown_at']} tokens)",
            "sharp rise" if row["outgrown_at"] else "none",
            row["knee_at"],
        )
        for row in rows
    ]
    comparison += [
        compared(
            f"knee here, {row['beams']} beams (KV outgrows at {row['outgrown_at']} tokens)",
            None,
            None,
            row["knee_at"],
        )
        for row in real or []
    ]
    report("lbs_fig5", draw(rows, real), comparison, {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
