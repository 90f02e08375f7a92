"""What decoding ahead of selection gives: which children are kept, and what a search gains.

Simulated (`--what simulated`): Qwen2.5-Math-1.5B with a 1.5B PRM on an RTX 4090, all KV on it, beam
search of width 4, 128 + 1,600 tokens, lognormal steps of 80 tokens with the spread of `--sigma`
(the standard deviation of a length's logarithm), scores that children inherit. What says which
children are decoded: `scores`, steps scored as they end (ours, and `auto`); `bins`, FlashTTS's
SelectSPEC by the step before; `random`; `oracle`, who knows the tree.

Verified ahead (`--what verify-ahead`): FlashTTS's three pairs as `flashtts.figures` has them, with
LookAhead Verification (4.1.3, `--verify-ahead slack`) and without it, which is the default.

Measured (`--what measured`): the bundled pair here, `off`, `exact` and `auto` in turns; every tree
has to be the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

from beamwright import Solution, Solver
from beamwright.evaluate import load_problems
from beamwright.models.shape import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.protocols import Prospect
from beamwright.search.prospects import by_bins, can_go_on
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import Node, RecordedTree
from beamwright_lab.common import finish, interleave, say, table
from beamwright_lab.flashtts.baseline import Workload, baseline_of
from beamwright_lab.flashtts.figures import compare, seeds_of, tree_of
from beamwright_lab.flashtts.split import PAIRS
from beamwright_lab.simulator import (
    Foresight,
    RooflineCosts,
    Script,
    Simulation,
    SyntheticSearch,
    grow,
    simulate,
)
from beamwright_lab.simulator.replay import Foresee
from beamwright_lab.simulator.verifier import VerifierCase

WIDTH, PROMPT_TOKENS, GENERATE_TOKENS, STEP_TOKENS = 4, 128, 1600, 80
MODEL, HARDWARE = "qwen2.5-math-1.5b", "rtx-4090"
EVERYTHING = 2**40
SIMULATED = ("search", "sigma", "n", "foresight", "seconds", "speed-up", "speculated", "kept")
MEASURED = ("search", "n", "speculation", "least s", "median s", "speculated", "kept", "equal")
MODES = ("off", "exact", "auto")


# --- simulated -------------------------------------------------------------------------------


def bins(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """SelectSPEC."""
    del ahead
    return by_bins(beams, width)


def by_chance(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """All children of a step drawn at random, and of the next."""
    del ahead
    drawn = [(Random(repr(beam.lineage)).random(), beam) for beam in beams if can_go_on(beam)]
    found = [Prospect(beam, width, potential=each) for each, beam in drawn]
    return sorted(found, key=lambda prospect: -prospect.potential)


def oracle(script: Script) -> Foresee:
    """What is opened, and nothing else."""

    def foresee(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
        del ahead, width
        counts = [(beam, script.num_children(beam)) for beam in beams if can_go_on(beam)]
        return [Prospect(beam, count) for beam, count in counts if count]

    return foresee


def case(tree: RecordedTree) -> Simulation:
    """A search with nothing decoded ahead."""
    model = ModelCosts.of(shape_from_text(MODEL), 2)
    costs = RooflineCosts.of(model, find_profile(HARDWARE), Layout.TREE)
    return Simulation(
        tree,
        model,
        costs,
        EVERYTHING,
        ScheduleSettings(schedule="in-gpu"),
        StepSettings(max_step_tokens=GENERATE_TOKENS, max_tokens=GENERATE_TOKENS),
        verifier=VerifierCase(model, costs, EVERYTHING),
    )


def simulated(sigmas: Sequence[float], beams: Sequence[int]) -> list[dict[str, Any]]:
    """A row per search and foresight."""
    rows: list[dict[str, Any]] = []
    for search in ("beam", "best-of-n"):
        for sigma in sigmas:
            for n in beams:
                rows += one_search(search, sigma, n)
    return rows


def one_search(search: str, sigma: float, n: int) -> list[dict[str, Any]]:
    """A search under every foresight."""
    made = SyntheticSearch(
        n, WIDTH, PROMPT_TOKENS, GENERATE_TOKENS, STEP_TOKENS, sigma, search=search,
        survival="score",
    )  # fmt: skip
    off = case(grow(made))
    ahead, auto = replace(off, speculation="exact"), replace(off, speculation="auto")
    runs = {"off": off}
    if search == "beam":
        known = oracle(Script(off.tree))
        foresights = {"bins": bins, "random": by_chance, "oracle": known}
        runs |= {
            name: replace(ahead, foresees=Foresight(each, WIDTH))
            for name, each in foresights.items()
        }
    runs |= {"scores" if search == "beam" else "certain": ahead, "auto": auto}
    rows: list[dict[str, Any]] = []
    for name, each in runs.items():
        found = simulate(each)
        plain_s = rows[0]["seconds"] if rows else found.time_s
        spent = found.speculated_tokens
        rows.append(
            {
                "search": search,
                "sigma": sigma,
                "n": n,
                "foresight": name,
                "seconds": round(found.time_s, 2),
                "speed-up": round(plain_s / found.time_s, 3),
                "speculated": spent,
                "kept": round(found.kept_tokens / spent, 2) if spent else None,
            }
        )
        say("  ", *rows[-1].values())
    return rows


# --- scored ahead ----------------------------------------------------------------------------

BASELINE, WITHOUT = "baseline", "P+M"
AHEAD = ("P+M+S", "P+M+S+L", "auto", "auto+L")


def verified_ahead(beams: Sequence[int]) -> list[dict[str, Any]]:
    """Goodput over the baseline's, means over seeds."""
    work, rows = Workload(), []
    for n in beams:
        for pair in PAIRS:
            found = [
                compare(baseline_of(pair, tree_of(work, n, seed), n), work, (WITHOUT, *AHEAD))
                for seed in seeds_of(n)
            ]
            row: dict[str, Any] = {"pair": pair, "n": n}
            for name in (WITHOUT, *AHEAD):
                ratios = [each[name].goodput / each[BASELINE].goodput for each in found]
                row[name] = round(fmean(ratios), 3)
            rows.append(row)
            say("  ", *row.values())
    return rows


def quoted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Least and most that decoding ahead gains, by setting."""
    gains = {name: [row[name] / row[WITHOUT] for row in rows] for name in AHEAD}
    return {
        "n": [min(row["n"] for row in rows), max(row["n"] for row in rows)],
        "gains": {name: [round(min(g), 3), round(max(g), 3)] for name, g in gains.items()},
    }


# --- measured --------------------------------------------------------------------------------


def measured(
    searches: Sequence[str], beams: Sequence[int], num_problems: int, rounds: int
) -> list[dict[str, Any]]:
    """A row per search and setting: seconds of all problems, one after the other."""
    problems = load_problems("bundled:test", num_problems).problems
    rows: list[dict[str, Any]] = []
    for search in searches:
        for n in beams:
            solvers = {mode: Solver(search=search, n=n, speculation=mode) for mode in MODES}
            found: dict[str, list[Solution]] = {}

            def run(mode: str, solvers: Any = solvers, found: Any = found) -> None:
                found[mode] = [solvers[mode].solve(each.problem) for each in problems]

            timings = interleave({mode: partial(run, mode) for mode in MODES}, rounds)
            for mode in MODES:
                tokens = [solution.tokens for solution in found[mode]]
                spent = sum(each.speculated for each in tokens)
                kept = sum(each.speculated_kept for each in tokens)
                same = [
                    one.tree_hash == other.tree_hash
                    for one, other in zip(found[mode], found["off"], strict=True)
                ]
                rows.append(
                    {
                        "search": search,
                        "n": n,
                        "speculation": mode,
                        "least s": round(timings[mode].min_s, 3),
                        "median s": round(timings[mode].median_s, 3),
                        "speculated": spent,
                        "kept": round(kept / spent, 2) if spent else None,
                        "equal": f"{sum(same)} of {len(same)}",
                    }
                )
                say("  ", *rows[-1].values())
            for solver in solvers.values():
                solver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    what = ["simulated", "verify-ahead", "measured"]
    parser.add_argument("--what", nargs="+", default=what, choices=what)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.2, 0.5, 0.9])
    parser.add_argument("--n", type=int, nargs="+", default=[8, 16, 64, 256])
    parser.add_argument("--searches", nargs="+", default=["beam", "best-of-n"])
    parser.add_argument("--here", type=int, nargs="+", default=[16, 64], help="measured n")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "speculation"}
    if "simulated" in args.what:
        found["simulated"] = simulated(args.sigma, args.n)
        say(table(found["simulated"], SIMULATED))
    if "verify-ahead" in args.what:
        found["verified_ahead"] = verified_ahead(args.n)
        found["quoted"] = quoted(found["verified_ahead"])
        say(table(found["verified_ahead"], ("pair", "n", WITHOUT, *AHEAD)))
    if "measured" in args.what:
        found["measured"] = measured(args.searches, args.here, args.problems, args.rounds)
        say(table(found["measured"], MEASURED))
    finish("flashtts_speculation", found)


if __name__ == "__main__":
    main()
