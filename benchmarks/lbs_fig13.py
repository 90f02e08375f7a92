"""LBS Figure 13: speedup over layer-wise offloading on an RTX 3080 Ti (12 GiB).

KV may take what weights and activations leave. The paper does not say how that card is linked;
the profile has PCIe 4.0 x16. Real runs: small shapes of the same two families, not that card.
"""

from __future__ import annotations

from typing import Any

from beamwright.cost import Layout
from lbs import (
    SMALL_MODEL,
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

_PAPER = {"opt-2.7b": "up to 6.85", "qwen1.5-4b": "up to 3.52"}
_FAMILIES = {"opt-2.7b": "opt", "qwen1.5-4b": "qwen2"}


def measured(num_rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, family in _FAMILIES.items():
        case = RealCase(model=SMALL_MODEL.replace("llama", family))
        sides = {
            f"{family} {layout} {variant}": Side(case, variant, layout)
            for variant, layout in (
                ("layerwise", Layout.DENSE),
                ("inter-beam", Layout.DENSE),
                ("inter-beam", Layout.TREE),
            )
        }
        found = measured_rows(sides, measure(sides, num_rounds))
        rows += [{"model": name, "measured_with": case.model, **row} for row in found]
    return rows


def draw(rows: list[dict[str, Any]]) -> Any:
    figure, plots = axes(len(_PAPER))
    for plot, model in zip(plots, _PAPER, strict=True):
        own = [row for row in rows if row["model"] == model and row["variant"] == "inter-beam"]
        for step in sorted({row["step"] for row in own}):
            line = [r for r in own if r["step"] == step and r["layout"] == "dense" and r["speedup"]]
            x, y = [str(r["beams"]) for r in line], [r["speedup"] for r in line]
            plot.plot(x, y, marker="o", label=f"steps of {step}")
        plot.axhline(1, color="gray", linewidth=1)
        plot.set(xlabel="beams", ylabel="speedup over layer-wise", title=f"{model}, copies")
        plot.legend(fontsize=8)
    return figure


def best(rows: list[dict[str, Any]], model: str, layout: str) -> str | None:
    """Range of speedups with every part switched on."""
    wanted = (model, layout, "inter-beam")
    return span(
        row["speedup"] for row in rows if (row["model"], row["layout"], row["variant"]) == wanted
    )


def main() -> None:
    args = parse(__doc__ or "")
    beams, steps = ((16, 64), (32, 128)) if args.quick else ((4, 8, 16, 32, 64), (32, 64, 128))
    rows = speedup_rows(
        SimulatedCase(
            model=model, gpu="rtx-3080-ti", num_beams=num_beams, step_tokens=step, kv_bytes=None
        )
        for model in _PAPER
        for step in steps
        for num_beams in beams
    )
    real = real_rows("lbs_fig13", args, lambda: measured(args.rounds))
    comparison = []
    for model, paper in _PAPER.items():
        for layout in ("dense", "tree"):
            printed = paper if layout == "dense" else None
            comparison.append(
                compared(
                    f"{model}, {layout}",
                    printed,
                    best(rows, model, layout),
                    best(real or [], model, layout),
                )
            )
    report("lbs_fig13", draw(rows), comparison, {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
