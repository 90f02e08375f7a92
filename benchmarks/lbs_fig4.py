"""LBS Figure 4: device memory and time of layer-wise offloading against the number of beams.

OPT-6.7B on an RTX 4090; KV may take what weights and activations leave of 24 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamwright.cost import Layout, ModelCosts
from lbs import (
    GENERATE_TOKENS,
    GIB,
    PROMPT_TOKENS,
    SimulatedCase,
    activation_bytes,
    axes,
    compared,
    parse,
    real_rows,
    report,
    shape_of,
    simulate,
)
from lbs_real import RealCase, Side, measure, measured_rows

_KV_SHARES = {16: "> 0.55", 32: "> 0.70", 64: "> 0.80"}


def simulated(num_beams: int) -> dict[str, Any]:
    case = SimulatedCase(num_beams=num_beams, kv_bytes=None)
    model = ModelCosts.of(shape_of(case), 2)
    kv_bytes = num_beams * (PROMPT_TOKENS + GENERATE_TOKENS) * model.kv_bytes_per_token
    activations = activation_bytes(case)
    found = simulate(case, "layerwise")
    shared = simulate(case, "in-gpu", Layout.TREE)
    assert found is not None
    return {
        "beams": num_beams,
        "weights_gib": round(model.weight_bytes / GIB, 2),
        "activations_gib": round(activations / GIB, 2),
        "kv_gib": round(kv_bytes / GIB, 2),
        "kv_shared_gib": shared and round(shared.device_peak_bytes / GIB, 2),
        "kv_share": round(kv_bytes / (kv_bytes + model.weight_bytes + activations), 3),
        "compute_s": round(found.decode_s, 1),
        "stall_s": round(found.stall_s, 1),
        "io_share": round(found.io_share, 3),
    }


def measured(num_rounds: int, beams: Sequence[int]) -> list[dict[str, Any]]:
    sides = {f"{n} beams": Side(RealCase(num_beams=n), "layerwise") for n in beams}
    return measured_rows(sides, measure(sides, num_rounds))


def draw(rows: list[dict[str, Any]]) -> Any:
    figure, (memory, time) = axes(2)
    names = [str(row["beams"]) for row in rows]
    below = [0.0] * len(rows)
    parts = (("weights_gib", "weights"), ("activations_gib", "activations"), ("kv_gib", "KV"))
    for key, label in parts:
        memory.bar(names, [row[key] for row in rows], bottom=below, label=label, width=0.6)
        below = [b + row[key] for b, row in zip(below, rows, strict=True)]
    memory.axhline(24, color="gray", linestyle="--", linewidth=1, label="RTX 4090")
    shared = [row["kv_shared_gib"] for row in rows]
    memory.plot(names, shared, "k.", label="KV, shared on the device")
    memory.set(xlabel="beams", ylabel="GiB", title="(a) memory at 2,048 tokens")
    share = [row["io_share"] for row in rows]
    time.bar(names, [1 - each for each in share], label="compute", width=0.6)
    time.bar(names, share, bottom=[1 - each for each in share], label="I/O stall", width=0.6)
    time.set(xlabel="beams", ylabel="share of the time", title="(b) layer-wise, simulated")
    for each in (memory, time):
        each.legend(fontsize=8)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    rows = [simulated(num_beams) for num_beams in (4, 8, 16, 32, 64)]
    beams = (4, 8, 16)  # of 32, two stream buffers do not fit
    real = real_rows("lbs_fig4", args, lambda: measured(args.rounds, beams))
    comparison = [
        compared(f"KV share of memory, {row['beams']} beams", paper, row["kv_share"])
        for row in rows
        if (paper := _KV_SHARES.get(row["beams"]))
    ]
    most = real and f"{max(row['io_share'] for row in real):.2f} ({real[-1]['beams']} beams)"
    comparison.append(
        compared("I/O share of time, 64 beams", "up to 0.85", rows[-1]["io_share"], most)
    )
    report("lbs_fig4", draw(rows), comparison, {"simulated": rows, "measured": real})


if __name__ == "__main__":
    main()
