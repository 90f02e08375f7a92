"""LBS Figure 9: end-to-end speedup over layer-wise offloading, part by part.

Baseline: layer-wise with a copy per beam, as in the paper. `dense` is the paper's layout;
`tree` shares KV on the device. RTX 4090, PCIe 4.0 x8, 7 GiB of KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamwright.cost import Layout
from lbs import (
    LOCALITY,
    VARIANTS,
    SimulatedCase,
    axes,
    compared,
    parse,
    real_rows,
    report,
    span,
    speedup_rows,
)
from lbs_real import RealCase, Side, measure, measured_rows

_PAPER = {"opt-6.7b": "3.39-9.72", "llama-2-7b": "3.60-8.74", "qwen1.5-7b": "4.17-7.99"}
_ALL = "inter-beam"  # with everything switched on


def cases(models: Sequence[str], beams: Sequence[int], steps: Sequence[int]) -> list[SimulatedCase]:
    return [
        SimulatedCase(model=model, num_beams=num_beams, step_tokens=step)
        for model in models
        for step in steps
        for num_beams in beams
    ]


def measured(num_rounds: int, beams: Sequence[int]) -> list[dict[str, Any]]:
    sides = {}
    for num_beams in beams:
        case = RealCase(num_beams=num_beams)
        sides[f"{num_beams} beams, layerwise"] = Side(case, "layerwise")
        for layout in (Layout.DENSE, Layout.TREE):
            for name in (*LOCALITY, "in-gpu"):
                sides[f"{num_beams} beams, {layout}, {name}"] = Side(case, name, layout)
    return measured_rows(sides, measure(sides, num_rounds))


def draw(rows: list[dict[str, Any]], real: list[dict[str, Any]] | None) -> Any:
    """The first model, by layout, at the shortest step; and this machine."""
    figure, plots = axes(3 if real else 2)
    model, step = rows[0]["model"], rows[0]["step"]
    shown = [row for row in rows if (row["model"], row["step"]) == (model, step)]
    panels = [(shown, "dense", f"{model}, steps of {step}, copies"), (shown, "tree", "shared KV")]
    if real:
        panels.append((real, "dense", "this machine, copies, emulated link"))
    for plot, (group, layout, title) in zip(plots, panels, strict=True):
        beams = sorted({row["beams"] for row in group})
        names = (*LOCALITY, "in-gpu")
        for place, name in enumerate(names):
            found = {
                row["beams"]: row["speedup"] or 0
                for row in group
                if row["layout"] == layout and row["variant"] == name
            }
            x = [number + 0.16 * (place - 2) for number in range(len(beams))]
            plot.bar(x, [found[n] for n in beams], width=0.14, label=VARIANTS[name].label)
        plot.axhline(1, color="gray", linewidth=1)
        plot.set_xticks(range(len(beams)), [str(n) for n in beams])
        plot.set(xlabel="beams", ylabel="speedup over layer-wise", title=title)
    plots[0].legend(fontsize=7)
    return figure


def best(rows: Sequence[dict[str, Any]], layout: str, variant: str = _ALL) -> str | None:
    """Range of speedups where layer-wise has something to load."""
    return span(
        row["speedup"]
        for row in rows
        if row["variant"] == variant and row["layout"] == layout and row.get("offloads", True)
    )


def main() -> None:
    args = parse(__doc__ or "")
    models = ["opt-6.7b"] if args.quick else list(_PAPER)
    beams, steps = ((16, 64), (32, 128)) if args.quick else ((4, 8, 16, 32, 64), (32, 64, 128))
    rows = speedup_rows(cases(models, beams, steps))
    real = real_rows(
        "lbs_fig9", args, lambda: measured(args.rounds, (8,) if args.quick else (8, 16))
    )
    comparison = []
    for model in models:
        own = [row for row in rows if row["model"] == model]
        here = real and best(real, "dense")
        comparison.append(compared(f"{model}, copies", _PAPER[model], best(own, "dense"), here))
        here = real and best(real, "tree")
        comparison.append(compared(f"{model}, shared KV", None, best(own, "tree"), here))
    first = [row for row in rows if row["model"] == models[0]]
    comparison += [
        compared(
            f"{models[0]}, copies: {VARIANTS[name].label}",
            None,
            best(first, "dense", name),
            real and best(real, "dense", name),
        )
        for name in LOCALITY
    ]
    report("lbs_fig9", draw(rows, real), comparison, {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
