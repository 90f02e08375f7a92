"""The simulator against the machine at hand: equal bytes, and how far its seconds are off.

Real searches of a random model under an emulated link, and the simulation of the very trees that
they grew, with costs fitted to other, shorter searches that never touch the link. Regime: a model
so small that operator dispatch rules; bytes must be equal, seconds are a model's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright.engine.timeline import Timeline
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.tree.recorded import write_recorded
from beamwright.units import parse_size
from beamwright_lab.checks.calibration import (
    FittedCosts,
    LinkCosts,
    Measured,
    fit_costs,
    iteration_seconds,
)
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.recorded import read_recorded
from beamwright_lab.simulator.run import simulate

LAYOUTS = {"dense": Layout.DENSE, "tree": Layout.TREE}
WITHIN = 0.25  # of the measured seconds
_WAKE_S = 2e-4  # a throttled copier sleeps, and wakes up late


@dataclass(frozen=True)
class Checked:
    """A search. budget_share: of the KV that its widest round needs with the layout."""

    attention: str
    n: int
    schedule: str
    budget_share: float
    prefetch: bool = True

    @property
    def name(self) -> str:
        ahead = "" if self.prefetch else ", no prefetch"
        return f"{self.schedule} {self.attention} n={self.n} {self.budget_share:.0%}{ahead}"


CHECKED = (
    Checked("tree", 8, "locality", 2.0),
    Checked("tree", 16, "locality", 0.6),
    Checked("tree", 16, "locality", 0.3),
    Checked("tree", 16, "locality", 0.3, prefetch=False),
    Checked("tree", 32, "locality", 0.4),
    Checked("dense", 8, "locality", 2.0),
    Checked("dense", 16, "locality", 0.5),
    Checked("dense", 16, "locality", 0.25),
    Checked("dense", 16, "locality", 0.25, prefetch=False),
    Checked("dense", 32, "locality", 0.3),
    Checked("tree", 8, "layerwise", 0.6),
    Checked("dense", 8, "layerwise", 0.6),
)
# n, prompt tokens, step tokens: not those of the checked searches.
CALIBRATION = ((4, 60, 20), (12, 200, 30), (24, 120, 20), (40, 30, 16), (12, 20, 70))


class RealSearches:
    """Runs real searches and their simulations."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.bandwidth = parse_size(arguments.link_bandwidth.removesuffix("/s"))
        self.folder = Path(tempfile.mkdtemp())
        with Solver(model=arguments.model, verifier="logprob", kv_memory="1MiB") as solver:
            self.shape = solver.generator.decoder.shape
        self.model = ModelCosts.of(self.shape, 4)

    def budget(self, config: Checked) -> int:
        """Device KV bytes: a share of what the last round would need at most."""
        arguments = self.arguments
        path = arguments.prompt + arguments.rounds * arguments.step_tokens
        tokens = config.n * path
        if config.attention == "tree":
            tokens = arguments.prompt + config.n * arguments.rounds * arguments.step_tokens // 2
        return int(config.budget_share * tokens * self.model.kv_bytes_per_token)

    def search(self, prompt: int, **options: Any) -> tuple[Simulation, Any, tuple[float, ...]]:
        """One real search: the case to simulate, the solution and the seconds of its iterations."""
        trees: dict[str, Any] = {}
        timeline = Timeline()
        settings = {
            "model": self.arguments.model,
            "verifier": "logprob",
            "ignore_eos": True,
            "width": 2,
            "seed": 1,
            **options,
        }
        with Solver(timeline=timeline, speculation="off", **settings) as solver:
            solution = solver.synthetic(prompt, on_round=lambda r: trees.update(last=r.tree))
        file = self.folder / "tree.json"
        write_recorded(trees["last"], file)
        layout = LAYOUTS[settings["attention"]]
        case = Simulation(
            tree=read_recorded(file),
            model=self.model,
            costs=RooflineCosts.of(self.model, find_profile("epyc-2core"), layout),
            kv_budget_bytes=solution.kv.device_budget_bytes,
            schedule=solver.settings.schedule,
            step=solver.settings.step,
            context=self.shape.context,
        )
        return case, solution, iteration_seconds(timeline)

    def calibrate(self, attention: str) -> FittedCosts:
        """Costs from short searches whose KV all fits."""
        runs = []
        for number in range(self.arguments.calibrations):
            for n, prompt, step_tokens in CALIBRATION:
                case, _, iteration_s = self.search(
                    prompt,
                    n=n,
                    attention=attention,
                    schedule="in-gpu",
                    max_batch=8 if number % 2 else None,
                    step_tokens=step_tokens,
                    max_tokens=3 * step_tokens,
                    max_rounds=3,
                    kv_memory="4GiB",
                )
                runs.append(Measured(case, iteration_s))
        return fit_costs(runs, LinkCosts(self.bandwidth, _WAKE_S))

    def check(self, config: Checked) -> tuple[Simulation, Any]:
        """One real run of a checked configuration."""
        arguments = self.arguments
        case, solution, _ = self.search(
            arguments.prompt,
            n=config.n,
            attention=config.attention,
            schedule=config.schedule,
            prefetch=config.prefetch,
            kv_memory=str(self.budget(config)),
            step_tokens=arguments.step_tokens,
            max_tokens=arguments.rounds * arguments.step_tokens,
            max_rounds=arguments.rounds,
            link_bandwidth=self.bandwidth,
        )
        return case, solution


def compare(config: Checked, case: Simulation, solutions: list[Any], costs: FittedCosts) -> Any:
    """Bytes and seconds of both sides. Cancelled stores are a matter of timing."""
    simulated = simulate(
        Simulation(
            case.tree,
            case.model,
            costs,
            case.kv_budget_bytes,
            case.schedule,
            case.step,
            case.context,
        )
    )
    seconds = [s.time.decode_s + s.time.stall_s for s in solutions]
    real_s, kv = statistics.median(seconds), solutions[0].kv
    ratio = simulated.time_s / real_s
    return {
        "name": config.name,
        "real_s": round(real_s, 3),
        "real_min_s": round(min(seconds), 3),
        "simulated_s": round(simulated.time_s, 3),
        "ratio": round(ratio, 3),
        "within": abs(ratio - 1) <= WITHIN,
        "real_stall_s": round(statistics.median(s.time.stall_s for s in solutions), 3),
        "simulated_stall_s": round(simulated.stall_s, 3),
        "h2d_bytes": kv.h2d_bytes,
        "h2d_equal": kv.h2d_bytes == simulated.h2d_bytes,
        "d2h_bytes": kv.d2h_bytes,
        "simulated_d2h_bytes": simulated.d2h_bytes,
        "groups": kv.groups,
        "groups_equal": kv.groups == simulated.groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="random:llama,layers=32,hidden=128,heads=4,kv_heads=4,intermediate=256,"
        "vocab=512,context=2048",
    )
    parser.add_argument("--link-bandwidth", default="64MiB/s")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4, help="steps of a search")
    parser.add_argument("--step-tokens", type=int, default=24)
    parser.add_argument("--calibrations", type=int, default=2, help="passes over its searches")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved runs of each side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = RealSearches(arguments)
    costs = {name: bench.calibrate(name) for name in LAYOUTS}
    say("calibrated")
    cases: dict[Checked, Simulation] = {}
    solutions: dict[Checked, list[Any]] = {config: [] for config in CHECKED}
    for number in range(arguments.repeats):
        for config in CHECKED[number:] + CHECKED[:number]:
            cases[config], solution = bench.check(config)
            solutions[config].append(solution)
            say(f"  {number + 1}/{arguments.repeats} {config.name}")
    rows = [compare(c, cases[c], solutions[c], costs[c.attention]) for c in CHECKED]
    columns = ("name", "real_s", "simulated_s", "ratio", "h2d_bytes", "h2d_equal", "groups")
    say(table(rows, columns))
    finish(
        "simulator_check",
        {
            "model": arguments.model,
            "emulated_link_bytes_per_s": bench.bandwidth,
            "bytes_equal": all(row["h2d_equal"] and row["groups_equal"] for row in rows),
            "within_25_percent": sum(row["within"] for row in rows),
            "configurations": rows,
            "fitted_s": {name: dict(_named(each)) for name, each in costs.items()},
        },
    )


def _named(costs: FittedCosts) -> Any:
    from beamwright_lab.checks.calibration import KINDS

    return zip(KINDS, costs.seconds, strict=True)


if __name__ == "__main__":
    main()
