"""LBS Figure 7: host-to-device KV bytes from the equations, against the simulator and real runs.

OPT-6.7B, 64 beams, 128 + 1,920 tokens, 7 GiB of KV on the device; GiB are 2^30 bytes, which the
paper prints as GB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beamwright.cost import (
    LbsCase,
    layerwise_bytes,
    locality_bytes,
    locality_printed_bytes,
    locality_start_bytes,
)
from lbs import (
    GIB,
    MIB,
    SimulatedCase,
    analytic_case,
    axes,
    compared,
    parse,
    real_rows,
    report,
    simulate,
)
from lbs_real import RealCase, Side, measure

_PAPER = {None: 53_012, 32: 2_052, 64: 1_044, 128: 540}
_NUM_BUFFERS = 2  # one layer computes while the next one arrives
_STEPS = (32, 64, 128)
_PLAIN = SimulatedCase(search="best-of-n")  # nothing is shared but the prompt, as in the equations


def buffered_bytes(case: LbsCase) -> int:
    """Eq. 1-3 with room for two stream buffers taken from the layers that stay."""
    total = 0
    for path_tokens in range(case.prompt_tokens, case.prompt_tokens + case.generate_tokens):
        all_bytes = case.kv_bytes(path_tokens)
        if all_bytes > case.kv_budget_bytes:
            resident = case.kv_budget_bytes * case.num_layers // all_bytes - _NUM_BUFFERS
            total += (case.num_layers - max(0, resident)) * all_bytes // case.num_layers
    return total


def analytic(num_beams: int) -> dict[str, Any]:
    case = analytic_case(replace(_PLAIN, num_beams=num_beams))
    row: dict[str, Any] = {"beams": num_beams, "layerwise": layerwise_bytes(case) / GIB}
    for step in _STEPS:
        each = replace(case, step_tokens=step)
        row[f"step {step}"] = locality_bytes(each) / GIB
        row[f"step {step}, as printed"] = locality_printed_bytes(each) / GIB
        row[f"step {step}, start of step"] = locality_start_bytes(each) / GIB
    return {name: round(value, 1) for name, value in row.items()}


def simulated(steps: tuple[int, ...]) -> dict[str, float]:
    """GiB that the simulator loads when each step loads its paths anew."""
    found = {"layerwise": simulate(_PLAIN, "layerwise")}
    for step in steps:
        found[f"step {step}"] = simulate(replace(_PLAIN, step_tokens=step), "no-reuse")
    return {name: round(each.h2d_bytes / GIB, 1) for name, each in found.items() if each}


def measured(num_rounds: int) -> list[dict[str, Any]]:
    """MiB loaded on this machine against the equations for the same small search.

    Layer-wise: with its two stream buffers, a quarter of so small a model. Group by group: the KV
    at the start of each step; the first group of all finds the prompt where it was prefilled.
    """
    case = RealCase(search="best-of-n")
    sides = {"layerwise": Side(case, "layerwise")}
    for step in (16, 32, 64):  # whole blocks, since whole blocks cross the link
        plain = replace(case, step_tokens=step, generate_tokens=256)
        sides[f"step {step}"] = Side(plain, "no-reuse")
    runs = measure(sides, num_rounds)
    rows = []
    for name, side in sides.items():
        equations = side.case.analytic
        formula = buffered_bytes if name == "layerwise" else locality_start_bytes
        expected, loaded = formula(equations), runs[name].solution.kv.h2d_bytes
        rows.append(
            {
                "schedule": name,
                "layerwise_printed_mib": round(layerwise_bytes(equations) / MIB, 1),
                "equations_mib": round(expected / MIB, 1),
                "loaded_mib": round(loaded / MIB, 1),
                "ratio": round(loaded / expected, 3),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> Any:
    figure, (plot,) = axes(1, width=7)
    names = ["layerwise", *(f"step {step}" for step in _STEPS)]
    for place, name in enumerate(names):
        x = [number + 0.2 * (place - 1.5) for number in range(len(rows))]
        plot.bar(x, [row[name] for row in rows], width=0.18, label=name)
    paper = [_PAPER[None], *(_PAPER[step] for step in _STEPS)]
    x = [len(rows) - 1 + 0.2 * (place - 1.5) for place in range(4)]
    plot.plot(x, paper, "k_", markersize=14, label="the paper's figure")
    plot.set_xticks(range(len(rows)), [str(row["beams"]) for row in rows])
    plot.set_yscale("log")
    plot.set(xlabel="beams", ylabel="GiB to the device", title="Equations 1-5, OPT-6.7B, 7 GiB")
    plot.legend(fontsize=8)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    rows = [analytic(num_beams) for num_beams in (4, 8, 16, 32, 64)]
    found = simulated((32,) if args.quick else _STEPS)
    real = real_rows("lbs_fig7", args, lambda: measured(args.rounds))
    comparison = []
    for step, paper in _PAPER.items():
        name = f"step {step}" if step else "layerwise"
        row = compared(f"{name}, GiB", paper, found.get(name))
        comparison.append({**row, "equations": round(rows[-1][name])})
    comparison += [
        compared(f"{row['schedule']} here, MiB", None, None, row["loaded_mib"])
        | {"equations": row["equations_mib"]}
        for row in real or []
    ]
    details = {"analytic": rows, "simulated": found, "measured": real}
    report("lbs_fig7", draw(rows), comparison, details)


if __name__ == "__main__":
    main()
