"""LBS Figure 10: bytes to the device as a share of layer-wise offloading.

(a) by step length, every step loading its paths anew (inter-token locality alone); (b) with and
without prefix reuse between the beams. Real best-of-n runs are held against what the equations
say: N * KV at the start of each step that does not fit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beamwright.cost import locality_start_bytes
from lbs import (
    GIB,
    MIB,
    VARIANTS,
    SimulatedCase,
    analytic_case,
    axes,
    compared,
    parse,
    real_rows,
    report,
)
from lbs import simulate as simulated_run
from lbs_real import RealCase, Side, measure

_PAPER = {32: 3.7, 64: 1.8, 128: 0.9}
_PARTS = ("no-reuse", "inter-token", "prefetch", "inter-beam")


def simulated(step: int, search: Any) -> dict[str, Any]:
    """Per cent of what layer-wise loads, for each part."""
    case = SimulatedCase(step_tokens=step, search=search)
    baseline = simulated_run(case, "layerwise")
    assert baseline is not None
    row: dict[str, Any] = {
        "search": search,
        "step": step,
        "layerwise_gib": round(baseline.h2d_bytes / GIB),
        "start_of_steps_gib": round(locality_start_bytes(analytic_case(case)) / GIB),
    }
    for name in _PARTS:
        found = simulated_run(case, name)
        assert found is not None
        row[f"{name}_gib"] = round(found.h2d_bytes / GIB, 1)
        row[f"{name}_percent"] = round(100 * found.h2d_bytes / baseline.h2d_bytes, 2)
    return row


def measured(num_rounds: int) -> list[dict[str, Any]]:
    """The same on this machine: best-of-n (nothing shared but the prompt) and beam search."""
    sides = {}
    for search in ("best-of-n", "beam"):
        case = RealCase(search=search, link_bandwidth=400_000_000)  # type: ignore[arg-type]
        sides[f"{search}, layerwise"] = Side(case, "layerwise")
        for step in (16, 32, 64):
            for name in ("no-reuse", "inter-beam"):
                sides[f"{search}, {step}, {name}"] = Side(replace(case, step_tokens=step), name)
    runs = measure(sides, num_rounds)
    rows = []
    for name, side in sides.items():
        loaded = runs[name].solution.kv.h2d_bytes
        baseline = runs[f"{side.case.search}, layerwise"].solution.kv.h2d_bytes
        expected = locality_start_bytes(side.case.analytic)
        plain = side.variant == "no-reuse" and side.case.search == "best-of-n"
        rows.append(
            {
                "search": side.case.search,
                "step": side.case.step_tokens,
                "variant": side.variant,
                "link_bandwidth_emulated": side.case.link_bandwidth,
                "h2d_mib": round(loaded / MIB, 1),
                "percent": round(100 * loaded / baseline, 2),
                "start_of_steps_mib": round(expected / MIB, 1) if plain else None,
                "of_start_of_steps": round(loaded / expected, 3) if plain else None,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> Any:
    figure, (left, right) = axes(2)
    beam = [row for row in rows if row["search"] == "beam"]
    names = [str(row["step"]) for row in beam]
    numbers = range(len(names))
    percents = [row["no-reuse_percent"] for row in beam]
    bars = left.bar([x - 0.2 for x in numbers], percents, width=0.36, label="simulated")
    left.bar_label(bars, [f"{row['no-reuse_gib']:,.0f} GiB" for row in beam], fontsize=8)
    paper = [_PAPER[row["step"]] for row in beam]
    left.bar([x + 0.2 for x in numbers], paper, width=0.36, label="the paper")
    left.set_xticks(numbers, names)
    left.set(xlabel="tokens of a step", ylabel="% of layer-wise", title="(a) inter-token alone")
    for place, name in enumerate(_PARTS):
        x = [number + 0.2 * (place - 1.5) for number in numbers]
        height = [row[f"{name}_percent"] for row in beam]
        right.bar(x, height, width=0.18, label=VARIANTS[name].label)
    right.set_xticks(numbers, names)
    right.set(xlabel="tokens of a step", ylabel="% of layer-wise", title="(b) part by part")
    for each in (left, right):
        each.legend(fontsize=8)
    return figure


def compare(rows: list[dict[str, Any]], real: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    comparison = []
    for row in rows:
        if row["search"] == "beam":
            what = f"64 beams, steps of {row['step']}: % of layer-wise"
            comparison.append(compared(what, _PAPER[row["step"]], row["no-reuse_percent"]))
            factor = round(row["no-reuse_gib"] / max(row["inter-beam_gib"], 0.1), 1)
            comparison.append(compared("  without / with prefix reuse", "> 2", factor))
        else:
            ratio = round(row["no-reuse_gib"] / row["start_of_steps_gib"], 3)
            what = f"best-of-n, steps of {row['step']}: loaded / KV at the starts"
            comparison.append(compared(what, None, ratio))
    for each in real or []:
        if each["of_start_of_steps"] is not None:
            what = f"here, best-of-n, steps of {each['step']}: loaded / KV at the starts"
            comparison.append(compared(what, None, None, each["of_start_of_steps"]))
        elif each["variant"] != "layerwise":
            what = f"here, {each['search']}, steps of {each['step']}, {each['variant']}: %"
            comparison.append(compared(what, None, None, each["percent"]))
    return comparison


def main() -> None:
    args = parse(__doc__ or "")
    rows = [simulated(step, "beam") for step in _PAPER]
    rows += [simulated(step, "best-of-n") for step in ((128,) if args.quick else _PAPER)]
    real = real_rows("lbs_fig10", args, lambda: measured(args.rounds))
    report("lbs_fig10", draw(rows), compare(rows, real), {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
