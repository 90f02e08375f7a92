"""LBS Figure 11: where the time goes, in steps of 32 tokens, normalised to layer-wise.

io_overhead: 1 - time of the same search over an instantaneous link / its time; unlike the stall
it does not depend on where a wait is booked. Here, an unthrottled copy stands for that link.
The simulator's cost of reading copies is fitted to this figure's layer-wise share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from beamwright.cost import Layout
from lbs import SimulatedCase, axes, compared, parse, real_rows, report, simulate, span
from lbs_real import RealCase, Side, measure

_VARIANTS = ("layerwise", "inter-beam")
_MODELS = ("opt-6.7b", "llama-2-7b", "qwen1.5-7b")


def simulated(case: SimulatedCase, variant: str, layout: Layout) -> dict[str, Any]:
    found = simulate(case, variant, layout)
    instant = simulate(replace(case, link="instant"), variant, layout)
    baseline = simulate(case, "layerwise")
    assert found is not None
    assert instant is not None
    assert baseline is not None
    return {
        "model": case.model,
        "beams": case.num_beams,
        "layout": str(layout),
        "variant": variant,
        "compute": round(found.decode_s / baseline.time_s, 4),
        "stall": round(found.stall_s / baseline.time_s, 4),
        "other": 0.0,  # pruning and expansion take no simulated time
        "io_share": round(found.io_share, 4),
        "io_overhead": round(1 - instant.time_s / found.time_s, 4),
        "offloads": baseline.h2d_bytes > 0,
    }


def measured(num_rounds: int, beams: Sequence[int]) -> list[dict[str, Any]]:
    sides = {}
    for num_beams in beams:
        for variant in _VARIANTS:
            for name, bandwidth in (("throttled", RealCase.link_bandwidth), ("instant", None)):
                case = RealCase(num_beams=num_beams, link_bandwidth=bandwidth)
                sides[f"{num_beams} beams, {variant}, {name}"] = Side(case, variant)
    runs = measure(sides, num_rounds)
    rows = []
    for num_beams in beams:
        layerwise = runs[f"{num_beams} beams, layerwise, throttled"].solution.time.total_s
        for variant in _VARIANTS:
            found = runs[f"{num_beams} beams, {variant}, throttled"].solution
            instant = runs[f"{num_beams} beams, {variant}, instant"].solution
            time = found.time
            other_s = time.total_s - time.decode_s - time.stall_s
            rows.append(
                {
                    "beams": num_beams,
                    "layout": "dense",
                    "variant": variant,
                    "compute": round(time.decode_s / layerwise, 4),
                    "stall": round(time.stall_s / layerwise, 4),
                    "other": round(other_s / layerwise, 4),
                    "io_share": round(found.io_share, 4),
                    "io_overhead": round(1 - instant.time.total_s / time.total_s, 4),
                }
            )
    return rows


def draw(rows: list[dict[str, Any]], real: list[dict[str, Any]] | None) -> Any:
    figure, plots = axes(2 if real else 1)
    shown = [r for r in rows if r["model"] == rows[0]["model"] and r["layout"] == "dense"]
    titles = (f"{rows[0]['model']}, simulated", "this machine, emulated link")
    for plot, group, title in zip(plots, (shown, real or []), titles, strict=False):
        names = [f"{row['beams']}\n{row['variant']}" for row in group]
        below = [0.0] * len(group)
        for key in ("compute", "stall", "other"):
            plot.bar(names, [row[key] for row in group], bottom=below, label=key, width=0.6)
            below = [b + row[key] for b, row in zip(below, group, strict=True)]
        plot.set(ylabel="time / layer-wise", title=title)
        plot.tick_params(axis="x", labelsize=7)
        plot.legend(fontsize=8)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    beams = (16, 64) if args.quick else (16, 32, 64)
    rows = [
        simulated(SimulatedCase(model=model, num_beams=num_beams), variant, layout)
        for model in (_MODELS[:1] if args.quick else _MODELS)
        for num_beams in beams
        for layout in (Layout.DENSE, Layout.TREE)
        for variant in _VARIANTS
    ]
    real = real_rows(
        "lbs_fig11", args, lambda: measured(args.rounds, (8,) if args.quick else (8, 16))
    )
    comparison = []
    for variant, paper in (("layerwise", "0.70-0.90"), ("inter-beam", "< 0.15")):
        dense = [
            r for r in rows if r["variant"] == variant and r["layout"] == "dense" and r["offloads"]
        ]
        here = [r for r in real or [] if r["variant"] == variant]
        for key in ("io_share", "io_overhead"):
            printed = paper if key == "io_share" else None
            found, own = span(r[key] for r in dense), span(r[key] for r in here)
            comparison.append(compared(f"{variant}, {key}", printed, found, own))
    for variant, share in (("layerwise", 0.86), ("inter-beam", 0.10)):
        each = next(
            r for r in rows if (r["beams"], r["variant"], r["layout"]) == (64, variant, "dense")
        )
        comparison.append(
            compared(f"OPT-6.7B, 64 beams, {variant}, io_share", share, each["io_share"])
        )
    report("lbs_fig11", draw(rows, real), comparison, {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
