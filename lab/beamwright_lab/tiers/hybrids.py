"""Simulate hybrids on one card, recurrent states beside KV: seconds over a card that fits all.

Named sizes with int4 weights; memory is divided as by `plan`; states are float32 (the default) or
bfloat16. The engine's scheduler runs on roofline seconds, without a verifier. Synthetic searches
have steps of one length, or lognormal ones ("about"), where a round waits for its longest step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from beamwright.models.named import NAMED_SHAPES
from beamwright.models.shape import ModelShape
from beamwright.plan.costs import Layout, ModelCosts, Storage
from beamwright.plan.machines import find_profile, with_cuda_graphs
from beamwright.sections import MemorySettings, ScheduleSettings, StepSettings
from beamwright.solver.memory import ModelBytes, plan_memory
from beamwright.units import GIB
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.run import SimulationResult, simulate_if_fits
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow

CASES = (
    ("qwen3.5-27b", "rtx-4090", "24GB"),
    ("qwen3.5-27b", "rtx-3090", "24GB"),
    ("qwen3.5-9b", "rtx-3060", "12GB"),
    ("qwen3.5-9b", "rtx-4090", "24GB"),
)
STATES = ("float32", "bfloat16")
PROMPT_TOKENS = 128
_ELEMENT_BYTES = 2
_AMPLE_BYTES = 2**44


@dataclass(frozen=True)
class Case:
    """A hybrid on a card. states: dtype of recurrent states. memory: value of --memory."""

    model: str
    card: str
    memory: str
    states: str

    @property
    def shape(self) -> ModelShape:
        shape = NAMED_SHAPES[self.model]
        if self.states == "float32":
            return shape
        return replace(shape, states=tuple(replace(part, wide=False) for part in shape.states))

    def budget_bytes(self, n: int) -> int:
        """Bytes that the plan leaves for KV and states."""
        sizes = ModelBytes(self.shape, _ELEMENT_BYTES, Storage.INT4)
        asked = MemorySettings(memory=self.memory)
        return plan_memory(asked, sizes, None, n, in_place=True).kv_bytes

    def simulate(
        self, tree: RecordedTree, step: StepSettings, budget: int, options: Mapping[str, Any]
    ) -> SimulationResult | None:
        """Simulate a search with this budget for KV and states; None if it does not fit."""
        chosen = dict(options)
        model = ModelCosts.of(self.shape, _ELEMENT_BYTES, Storage.INT4)
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
    for (model, card, memory), states in product(CASES, STATES):
        case = Case(model, card, memory, states)
        budget = case.budget_bytes(args.n) + int(args.more * GIB)
        for name, tree, step in found:
            whole = case.simulate(tree, step, _AMPLE_BYTES, options)
            here = case.simulate(tree, step, budget, options)
            assert whole is not None
            row: dict[str, Any] = {"model": model, "card": card, "memory": memory, "states": states}
            row |= {"steps": name, "budget_bytes": budget, "needed_bytes": whole.device_peak_bytes}
            row["all_fits_s"] = whole.time_s
            if here is not None:
                row |= {**_kept(here), "over": here.time_s / whole.time_s}
            yield row
        say(f"  {model} on {card}, states in {states}")


def _kept(found: SimulationResult) -> dict[str, Any]:
    names = "time_s", "stall_s", "groups", "h2d_bytes", "h2d_state_bytes", "d2h_bytes"
    bounds = "d2h_state_bytes", "load_bound_bytes", "blind_store_bound_bytes", "recomputed_tokens"
    return {name: getattr(found, name) for name in (*names, *bounds)}


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Format a row of the table: GiB, seconds."""
    fits = "over" in row

    def gib(name: str) -> str:
        return f"{row[name] / GIB:.1f}"

    def moved(way: str) -> str:
        return f"{gib(f'{way}_bytes')} ({gib(f'{way}_state_bytes')})" if fits else ""

    return {
        "model": row["model"],
        "card": f"{row['card']}, {row['memory']}",
        "states": row["states"],
        "steps": row["steps"],
        "needs": gib("needed_bytes"),
        "has": gib("budget_bytes"),
        "all fits, s": f"{row['all_fits_s']:.1f}",
        "here, s": f"{row['time_s']:.1f}" if fits else "no fit",
        "over": f"{row['over']:.2f}" if fits else "",
        "stall, s": f"{row['stall_s']:.1f}" if fits else "",
        "loaded (states)": moved("h2d"),
        "stored (states)": moved("d2h"),
        "bound": gib("blind_store_bound_bytes") if fits else "",
    }


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
    lines: Sequence[dict[str, str]] = [shown(row) for row in rows]
    print(table(list(lines), list(lines[0])), end="\n\n")
    finish("hybrids", {"settings": vars(args), "rows": rows, "quoted": {"rows": rows}})


if __name__ == "__main__":
    main()
