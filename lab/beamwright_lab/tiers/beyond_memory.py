"""Simulated: a search far larger than the card, against an imaginary card on which all of it fits.

512 beams x 2,048 tokens of LLaMA-2-7B on an RTX 4090 (24 GB, PCIe 4.0 x8). The imaginary card is
the same one with more memory: what is left between the two is weights read once per group, and
the link.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from beamwright.models.named_shapes import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.solver.memory import ModelBytes
from beamwright.tree import RecordedTree
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator import (
    RooflineCosts,
    Simulation,
    SyntheticSearch,
    simulate,
)
from beamwright_lab.simulator import grow as grow_tree

PROMPT_TOKENS, GENERATE_TOKENS = 128, 1920
GIB = 2**30
IMAGINARY_BYTES = 400 * GIB
COLUMNS = ("width", "step", "kv_gib", "peak_gib", "time_s", "stall_s", "groups", "ideal_s", "ratio")


def run(
    args: argparse.Namespace,
    tree: RecordedTree,
    schedule: ScheduleSettings,
    step: int,
    kv_bytes: int,
) -> Any:
    shape = shape_from_text(args.model)
    model = ModelCosts.of(shape, 2)
    return simulate(
        Simulation(
            tree,
            model,
            RooflineCosts.of(model, find_profile(args.gpu), Layout.TREE),
            kv_bytes,
            schedule,
            StepSettings(step_tokens=step, max_step_tokens=step, max_tokens=GENERATE_TOKENS),
        )
    )


def compare(args: argparse.Namespace, width: int, step: int) -> dict[str, Any]:
    """The card, and the one on which everything fits."""
    shape, gpu = shape_from_text(args.model), find_profile(args.gpu)
    weights = ModelCosts.of(shape, 2).weight_bytes
    kv_bytes = gpu.device_memory_bytes - weights - ModelBytes(shape, 2).activations(args.n)
    search = SyntheticSearch(args.n, width, PROMPT_TOKENS, GENERATE_TOKENS, step)
    tree = grow_tree(search)
    ideal = run(args, tree, ScheduleSettings(schedule="in-gpu"), step, IMAGINARY_BYTES)
    schedule = ScheduleSettings(schedule="locality", max_batch=args.max_batch)
    real = run(args, tree, schedule, step, kv_bytes)
    return {
        "width": width,
        "step": step,
        "kv_gib": round(kv_bytes / GIB, 2),
        "peak_gib": round(ideal.device_peak_bytes / GIB, 2),
        "time_s": round(real.time_s, 1),
        "stall_s": round(real.stall_s, 1),
        "groups": real.groups,
        "h2d_gib": round(real.h2d_bytes / GIB, 1),
        "dm_lower_bound_gib": round(real.dm_lower_bound_bytes / GIB, 1),
        "ideal_s": round(ideal.time_s, 1),
        "ratio": round(real.time_s / ideal.time_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--width", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--step", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--max-batch", type=int, help="most beams of a group (default: no limit)")
    args = parser.parse_args()
    rows = []
    for width, step in product(args.width, args.step):
        rows.append(compare(args, width, step))
        say(f"  {rows[-1]}")
    say(table(rows, COLUMNS))
    finish("beyond_memory", {"settings": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
