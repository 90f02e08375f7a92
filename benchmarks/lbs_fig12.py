"""LBS Figure 12: seconds of I/O stall in steps of 32 tokens, part by part, over layer-wise's."""

from __future__ import annotations

from typing import Any

from lbs import (
    LOCALITY,
    VARIANTS,
    SimulatedCase,
    axes,
    compared,
    parse,
    real_rows,
    report,
    simulate,
    span,
)
from lbs_real import RealCase, Side, measure

_PAPER = {"no-reuse": "5-10 %", "inter-beam": "< 2 % in several"}


def simulated(model: str, num_beams: int) -> list[dict[str, Any]]:
    case = SimulatedCase(model=model, num_beams=num_beams)
    stalls = {name: simulate(case, name) for name in ("layerwise", *LOCALITY)}
    baseline = stalls["layerwise"]
    assert baseline is not None
    return [
        {
            "model": model,
            "beams": num_beams,
            "variant": name,
            "stall_s": round(found.stall_s, 2),
            "percent": round(100 * found.stall_s / baseline.stall_s, 2),
        }
        for name, found in stalls.items()
        if found is not None and baseline.stall_s > 0
    ]


def measured(num_rounds: int, num_beams: int) -> list[dict[str, Any]]:
    case = RealCase(num_beams=num_beams)
    sides = {name: Side(case, name) for name in ("layerwise", *LOCALITY)}
    stalls = {name: run.solution.time.stall_s for name, run in measure(sides, num_rounds).items()}
    return [
        {
            "beams": num_beams,
            "variant": name,
            "stall_s": round(stalls[name], 3),
            "percent": round(100 * stalls[name] / stalls["layerwise"], 2),
        }
        for name in sides
    ]


def draw(rows: list[dict[str, Any]], real: list[dict[str, Any]] | None) -> Any:
    figure, plots = axes(2 if real else 1)
    shown = [row for row in rows if row["model"] == rows[0]["model"]]
    titles = (f"{rows[0]['model']}, simulated", "this machine, emulated link")
    for plot, group, title in zip(plots, (shown, real or []), titles, strict=False):
        beams = sorted({row["beams"] for row in group})
        for place, name in enumerate(LOCALITY):
            own = [row for row in group if row["variant"] == name]
            x = [beams.index(row["beams"]) + 0.2 * (place - 1.5) for row in own]
            label = VARIANTS[name].label
            bars = plot.bar(x, [row["percent"] for row in own], width=0.18, label=label)
            plot.bar_label(bars, [f"{row['stall_s']:.3g} s" for row in own], fontsize=7)
        plot.set_xticks(range(len(beams)), [str(n) for n in beams])
        plot.set(xlabel="beams", ylabel="I/O time, % of layer-wise", title=title)
    plots[0].legend(fontsize=7)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    models = ("opt-6.7b",) if args.quick else ("opt-6.7b", "llama-2-7b", "qwen1.5-7b")
    beams = (16, 64) if args.quick else (16, 32, 64)
    rows = [row for model in models for n in beams for row in simulated(model, n)]
    real = real_rows("lbs_fig12", args, lambda: measured(args.rounds, 8 if args.quick else 16))
    comparison = [
        compared(
            f"{VARIANTS[name].label}: % of layer-wise's I/O time",
            _PAPER.get(name),
            span(row["percent"] for row in rows if row["variant"] == name),
            span(row["percent"] for row in real or [] if row["variant"] == name),
        )
        for name in LOCALITY
    ]
    report("lbs_fig12", draw(rows, real), comparison, {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
