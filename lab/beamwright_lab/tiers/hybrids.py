"""Simulate hybrids on one card, recurrent states beside KV: seconds over a card that fits all.

Named sizes with int4 weights and float32 states; memory is divided as by `plan`. The engine's
scheduler runs on roofline seconds, without a verifier. Synthetic searches have steps of one length,
or lognormal ones ("about"), where a round waits for its longest step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts, Storage
from beamwright.plan.machines import find_profile, with_cuda_graphs
from beamwright.sections import MemorySettings, ScheduleSettings, StepSettings
from beamwright.solver.memory import plan_memory
from beamwright.solver.model_bytes import ModelBytes
from beamwright.units import GIB
from beamwright_lab.common import finish, say
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.run import SimulationResult, simulate_if_fits
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.tables import hybrids

CASES = (
    ("qwen3.5-27b", "rtx-4090", "24GB"),
    ("qwen3.5-27b", "rtx-3090", "24GB"),
    ("qwen3.5-9b", "rtx-3060", "12GB"),
    ("qwen3.5-9b", "rtx-4090", "24GB"),
)
PROMPT_TOKENS = 128
_ELEMENT_BYTES = 2
_AMPLE_BYTES = 2**44


@dataclass(frozen=True)
class Case:
    """A hybrid on a card. memory: value of --memory."""

    model: str
    card: str
    memory: str

    def budget_bytes(self, n: int) -> int:
        """Bytes that the plan leaves for KV and states."""
        sizes = ModelBytes(NAMED_SHAPES[self.model], _ELEMENT_BYTES, Storage.INT4)
        asked = MemorySettings(memory=self.memory)
        return plan_memory(asked, sizes, None, n, in_place=True).kv_bytes

    def simulate(
        self, tree: RecordedTree, step: StepSettings, budget: int, options: Mapping[str, Any]
    ) -> SimulationResult | None:
        """Simulate a search with this budget for KV and states; None if it does not fit."""
        chosen = dict(options)
        model = ModelCosts.of(NAMED_SHAPES[self.model], _ELEMENT_BYTES, Storage.INT4)
        card = find_profile(self.card)
        if not chosen.pop("eager"):
            card = with_cuda_graphs(card)
        costs = RooflineCosts.of(model, card, Layout.TREE)
        schedule = ScheduleSettings.model_validate({"schedule": "locality", **chosen})
        return simulate_if_fits(Simulation(tree, model, costs, budget, schedule, step))


def searches(args: argparse.Namespace) -> Iterator[tuple[str, RecordedTree, StepSettings]]:
    """Yield the searches: name of the steps, tree, and step limits that a schedule knows."""
    kinds = [(f"{step}", step, 0.0) for step in args.steps]
    kinds += [(f"about {step}", step, args.spread) for step in args.about]
    for name, step, sigma in kinds:
        tokens = max(320, 4 * step)
        tree = grow(SyntheticSearch(args.n, args.width, PROMPT_TOKENS, tokens, step, sigma))
        most = max(node.tokens for node in tree.nodes)
        exactly = None if sigma else step
        yield name, tree, StepSettings(step_tokens=exactly, max_step_tokens=most, max_tokens=tokens)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Simulate each case and search with its budget, and on a card that fits all of it."""
    options = {**dict(each.split("=", 1) for each in args.set), "eager": args.eager}
    found = list(searches(args))
    for case in starmap(Case, CASES):
        budget = case.budget_bytes(args.n) + int(args.more * GIB)
        for name, tree, step in found:
            whole = case.simulate(tree, step, _AMPLE_BYTES, options)
            here = case.simulate(tree, step, budget, options)
            assert whole is not None
            yield {
                **vars(case),
                "steps": name,
                "budget_bytes": budget,
                "needed_bytes": whole.device_peak_bytes,
                "over": None if here is None else here.time_s / whole.time_s,
            }
        say(f"  {case.model} on {case.card}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="*", default=[32, 64], help="step lengths")
    parser.add_argument("--about", type=int, nargs="*", default=[64], help="lognormal means")
    parser.add_argument("--spread", type=float, default=0.7, help="sigma of lognormal steps")
    parser.add_argument("--more", type=float, default=0.0, help="extra GiB for KV and states")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="schedule")
    args = parser.parse_args()
    rows = list(rows_of(args))
    print(hybrids({"rows": rows}), end="\n\n")
    finish("hybrids", {"settings": vars(args), "rows": rows, "quoted": {"rows": rows}})


if __name__ == "__main__":
    main()
