"""Bytes loaded against the lower bound: beam and DVTS trees, shared KV, budgets below the peak.

Simulated, as bytes do not depend on the hardware: the simulator runs the real planner and the real
residency, and tests hold its bytes equal to those of real runs. Trees are made up by the real
strategies from random scores (`random`) or from scores that children inherit (`score`: few
families survive). A budget below the least that works is raised to it, and says so.
`bytes.py --search beam` measures some of these searches with a real model.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from beamwright.errors import CapacityError
from beamwright.models.named_shapes import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import RecordedTree
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator import (
    RooflineCosts,
    Simulation,
    SyntheticSearch,
    simulate,
)
from beamwright_lab.simulator import grow as grow_tree

SHAPE = "llama,layers=32,hidden=128,heads=4,kv_heads=4,intermediate=256,vocab=512,context=4096"
PROMPT_TOKENS = 128
SHARES = (0.5, 0.25, 0.15)
AMPLE_BYTES = 8 * 2**30
COLUMNS = ("search", "survival", "n", "width", "share", "raised", "groups", "ratio")


class Bench:
    """Simulations of one tree."""

    def __init__(self, tree: RecordedTree, args: argparse.Namespace) -> None:
        self.tree, self.args = tree, args
        self.model = ModelCosts.of(shape_from_text(SHAPE), 4)
        self.costs = RooflineCosts.of(self.model, find_profile("rtx-4090"), Layout.TREE)

    def run(self, schedule: str, kv_bytes: int) -> Any:
        step = self.args.step
        return simulate(
            Simulation(
                self.tree,
                self.model,
                self.costs,
                kv_bytes,
                ScheduleSettings.model_validate(
                    {"schedule": schedule, "max_batch": self.args.max_batch}
                ),
                StepSettings(step_tokens=step, max_step_tokens=step, max_tokens=self.args.generate),
            )
        )

    def least_bytes(self) -> int:
        """The longest path with its step, and a block."""
        per_step = -(-self.args.step // BLOCK_TOKENS)
        blocks = PROMPT_TOKENS // BLOCK_TOKENS + self.args.generate // self.args.step * per_step + 1
        return blocks * BLOCK_TOKENS * self.model.kv_bytes_per_token


def rows_of(bench: Bench, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per share of the peak; a search that does not fit the ample budget has none."""
    try:
        peak = bench.run("in-gpu", AMPLE_BYTES).device_peak_bytes
    except CapacityError as error:
        say(f"  left out: {facts}: {error}")
        return []
    rows = []
    for share in SHARES:
        budget = max(int(share * peak), bench.least_bytes())
        found = bench.run("locality", budget)
        bound = found.dm_lower_bound_bytes
        rows.append(
            {
                **facts,
                "share": share,
                "raised": budget > int(share * peak),
                "budget_share": round(budget / peak, 3),
                "groups": found.groups,
                "h2d_bytes": found.h2d_bytes,
                "dm_lower_bound_bytes": bound,
                "ratio": round(found.h2d_bytes / bound, 3) if bound else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--width", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--generate", type=int, default=1920)
    parser.add_argument("--step", type=int, default=32)
    parser.add_argument("--max-batch", type=int, help="most beams of a group (default: no limit)")
    args = parser.parse_args()
    rows = []
    for search, survival, n, width in product(
        ("beam", "dvts"), ("random", "score"), args.n, args.width
    ):
        tree = grow_tree(
            SyntheticSearch(
                n,
                width,
                PROMPT_TOKENS,
                args.generate,
                args.step,
                search=search,
                survival=survival,
            )
        )
        facts = {"search": search, "survival": survival, "n": n, "width": width}
        rows += rows_of(Bench(tree, args), facts)
        say(f"  {facts}")
    say(table(rows, COLUMNS))
    finish("tier_ratio", {"settings": vars(args), "model": SHAPE, "rows": rows})


if __name__ == "__main__":
    main()
