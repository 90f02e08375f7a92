"""Seconds on this machine over an emulated link: layer-wise, locality part by part, in-gpu.

The link is throttled to the RTX 4090's ratio of device bandwidth to link (see `lbs`). Beam search,
width 2, device KV of 11 % of the sum of 64 copies, as the LBS paper's 7 of 64 GiB; `quarter` is a
wider model with a quarter of what in-gpu uses at its peak. io_overhead: 1 - time of the same search
over a link that is not throttled / its time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from beamwright.plan.costs import Layout
from beamwright_lab.common import finish, say, table
from beamwright_lab.paper.cases import LINK_BANDWIDTH, LOCALITY, OURS, PROMPT_TOKENS
from beamwright_lab.paper.real import RealCase, RealRun, Side, measure, measured_rows, run_real

MODEL = (
    "random:llama,layers=24,hidden=64,heads=4,kv_heads=4,intermediate=128,vocab=512,context=4096"
)
# Wide enough that a group of 64 rows is bound by arithmetic, as batches on a GPU are by weights.
QUARTER_MODEL = (
    "random:llama,layers=8,hidden=256,heads=4,kv_heads=4,intermediate=1024,vocab=512,context=4096"
)
TOKEN_BYTES = 2 * 24 * 64 * 4
PAPER_SHARE = 0.11
UNTHROTTLED = "unthrottled"
COLUMNS = (
    "beams", "layout", "variant", "time_s", "median_s", "io_share", "io_overhead", "h2d_mib",
    "groups", "speedup", "speedup_shared",
)  # fmt: skip
COMPARED = ((Layout.DENSE, "layerwise"), (Layout.DENSE, OURS), (Layout.TREE, OURS))


def case_of(args: argparse.Namespace, num_beams: int) -> RealCase:
    copies = 64 * (PROMPT_TOKENS + args.generate) * TOKEN_BYTES
    return RealCase(
        num_beams=num_beams,
        step_tokens=32,
        generate_tokens=args.generate,
        kv_bytes=int(PAPER_SHARE * copies),
        model=MODEL,
    )


def sides_of(case: RealCase) -> dict[str, Side]:
    """Everything that is run for one number of beams."""
    name = f"{case.num_beams} beams"
    sides = {f"{name}, dense, layerwise": Side(case, "layerwise")}
    for variant in LOCALITY:
        sides[f"{name}, dense, {variant}"] = Side(case, variant)
    for variant in ("layerwise", OURS, "in-gpu"):
        sides[f"{name}, tree, {variant}"] = Side(case, variant, Layout.TREE)
    free = replace(case, link_bandwidth=None)
    for layout, variant in COMPARED:
        sides[f"{name}, {layout}, {variant}, {UNTHROTTLED}"] = Side(free, variant, layout)
    return sides


def rows_of(sides: dict[str, Side], runs: dict[str, RealRun]) -> list[dict[str, Any]]:
    """One row per throttled side, with its overhead where there is an unthrottled run."""
    throttled = {name: side for name, side in sides.items() if not name.endswith(UNTHROTTLED)}
    rows = measured_rows(throttled, runs)
    for name, row in zip(throttled, rows, strict=True):
        other = runs.get(f"{name}, {UNTHROTTLED}")
        row["io_overhead"] = other and round(
            1 - other.solution.time.total_s / runs[name].solution.time.total_s, 4
        )
    return rows


def quarter(args: argparse.Namespace, num_beams: int, width: int) -> dict[str, Any]:
    """Shared KV in a quarter of the peak against everything resident."""
    case = replace(case_of(args, num_beams), width=width, model=QUARTER_MODEL)
    whole = Side(case, "in-gpu", Layout.TREE)
    peak = run_real(whole).solution.kv.device_peak_bytes
    tight = replace(case, kv_bytes=peak // 4)
    runs = measure(
        {
            "in-gpu": whole,
            "quarter": Side(tight, OURS, Layout.TREE),
            UNTHROTTLED: Side(replace(tight, link_bandwidth=None), OURS, Layout.TREE),
        },
        args.rounds,
    )
    row = {"beams": num_beams, "width": width, "peak_mib": round(peak / 2**20, 1)}
    for name, run in runs.items():
        row[f"{name}_s"] = round(run.solution.time.total_s, 3)
    row["groups"] = runs["quarter"].solution.kv.groups
    row["io_share"] = round(runs["quarter"].solution.io_share, 4)
    row["ratio"] = round(row["quarter_s"] / row["in-gpu_s"], 3)
    row["same_tree"] = len({run.solution.tree_hash for run in runs.values()}) == 1
    say(f"  {row}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beams", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--quarter-beams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--generate", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="the copiers have the other cores")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    quarters = [quarter(args, n, width) for n in args.quarter_beams for width in (2, 4)]
    rows = []
    for num_beams in args.beams:
        sides = sides_of(case_of(args, num_beams))
        rows += rows_of(sides, measure(sides, args.rounds))
    say(table(rows, COLUMNS))
    link = {"link_bandwidth_emulated": LINK_BANDWIDTH}
    finish(
        "tiers_time",
        {
            "settings": vars(args),
            "model": MODEL,
            "quarter_model": QUARTER_MODEL,
            **link,
            "rows": rows,
            "quarter": quarters,
        },
    )


if __name__ == "__main__":
    main()
