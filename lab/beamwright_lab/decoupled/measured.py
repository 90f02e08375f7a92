"""Many problems on the bundled pair: how they share the device, measured here, interleaved.

`one`: one problem at a time. `lockstep`: 16 at a time that decode, are scored and decide together,
and the next 16 when all have ended (search-and-learn). `continuous`: 16 at a time, each at its own
pace. `decoupled`: as many as keep the generator busy and fit, scored together. `+ overlap`: the
verifier on a lane of its own. At full KV, and at a share of what `continuous` needs at most. The
trees of all runs have to be the same.

The ceiling is what all tokens and steps take in passes so full that what a pass takes whatever is
in it does not count: from least squares through the passes and calls of the runs themselves; in
turns the sum of generator and verifier, side by side the larger.

    python -m beamwright_lab.decoupled.measured --problems 128 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from beamwright import Solution, Solver
from beamwright.engine.scoring import Scoring
from beamwright.engine.speculation import CallCosts
from beamwright.evaluate import load_problems
from beamwright.tree import Node
from beamwright_lab.common import finish, say, table

MODES = MappingProxyType(
    {
        "one": {"in_flight": 1, "explore": "continuous", "executor": "plain"},
        "lockstep": {"in_flight": 16, "explore": "lockstep", "executor": "plain"},
        "continuous": {"in_flight": 16, "explore": "continuous", "executor": "plain"},
        "decoupled": {"in_flight": "auto", "explore": "decoupled", "executor": "plain"},
        "continuous + overlap": {
            "in_flight": 16,
            "explore": "continuous",
            "executor": "overlapped",
        },
        "decoupled + overlap": {
            "in_flight": "auto",
            "explore": "decoupled",
            "executor": "overlapped",
        },
    }
)
COLUMNS = (
    *("KV", "mode", "least s", "median s", "problems/min", "tokens/s", "times one", "of ceiling"),
    *("rows", "occupancy", "steps a call", "decode s", "verify s", "both s", "in / out, MiB"),
)


@dataclass(frozen=True)
class Run:
    """All problems once. seconds: by phase."""

    wall_s: float
    seconds: dict[str, float]
    tokens: int
    rows: float
    occupancy: float
    steps_per_call: float
    moved_bytes: int
    hashes: tuple[str, ...]


class Verifying:
    """Times every call of the verifier."""

    def __init__(self) -> None:
        self.costs, self._score = CallCosts(), Scoring._call

    def __enter__(self) -> Verifying:
        score, costs = self._score, self.costs

        def timed(scoring: Scoring, nodes: Sequence[Node]) -> list[Any]:
            began = time.perf_counter()
            found = score(scoring, nodes)
            if nodes:
                costs.note(1, len(nodes), time.perf_counter() - began)
                costs.several = True
            return found

        Scoring._call = timed  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *error: object) -> None:
        Scoring._call = self._score  # type: ignore[method-assign]


def measure(
    solver: Solver, problems: Sequence[tuple[str, str]], in_flight: int | Literal["auto"]
) -> Run:
    """Solve all problems once."""
    before = solver.usage().engine
    start = time.perf_counter()
    found = dict(solver.solve_many(problems, in_flight=in_flight))
    wall_s = time.perf_counter() - start
    solved = [each for each in found.values() if isinstance(each, Solution)]
    assert len(solved) == len(problems), [each for each in found.values() if each not in solved]
    counts = solver.usage().engine - before
    calls = [(each.batch.verifier_calls, each.batch.verifier_steps_mean or 0) for each in solved]
    return Run(
        wall_s,
        {
            name: sum(getattr(each.time, name) for each in solved)
            for name in ("decode_s", "verify_s", "both_s")
        },
        sum(each.tokens.generated for each in solved),
        counts.row_tokens / counts.steps,
        counts.row_tokens / counts.slot_tokens,
        sum(count * mean for count, mean in calls) / sum(count for count, _ in calls),
        counts.h2d_bytes + counts.d2h_bytes,
        tuple(found[name].tree_hash for name, _ in problems),  # type: ignore[union-attr]
    )


def rows_of(
    kv: str, runs: dict[str, list[Run]], decoding: CallCosts, verifying: CallCosts, steps: int
) -> list[dict[str, Any]]:
    """A row per mode."""
    shown: list[dict[str, Any]] = []
    one_s = min(run.wall_s for run in runs["one"])
    for mode, each in runs.items():
        best, walls = min(each, key=lambda run: run.wall_s), [run.wall_s for run in each]
        parts = best.tokens * decoding.fit()[1], steps * verifying.fit()[1]
        least_s = max(parts) if "overlap" in mode else sum(parts)
        shown.append(
            {
                "KV": kv,
                "mode": mode,
                "least s": round(min(walls), 2),
                "median s": round(statistics.median(walls), 2),
                "problems/min": round(60 * len(best.hashes) / best.wall_s),
                "tokens/s": round(best.tokens / best.wall_s),
                "times one": round(one_s / best.wall_s, 2),
                "of ceiling": f"{least_s / best.wall_s:.2f} of {one_s / least_s:.1f}",
                "rows": round(best.rows, 1),
                "occupancy": round(best.occupancy, 2),
                "steps a call": round(best.steps_per_call, 1),
                **{f"{name[:-2]} s": round(best.seconds[name], 2) for name in best.seconds},
                "in / out, MiB": round(best.moved_bytes / 2**20, 1),
            }
        )
    return shown


def compared(
    kv: str, options: dict[str, Any], problems: Sequence[tuple[str, str]], rounds: int
) -> tuple[list[dict[str, Any]], set[tuple[str, ...]], int]:
    """The table of one KV budget, all trees, and the most KV that `continuous` held."""
    names = ("explore", "executor")
    solvers = {
        mode: Solver(**options, **{name: how[name] for name in names})
        for mode, how in MODES.items()
    }
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    with Verifying() as verifying:
        for turn in range(rounds):
            for mode in list(MODES)[:: -1 if turn % 2 else 1]:
                runs[mode].append(measure(solvers[mode], problems, MODES[mode]["in_flight"]))
                say(kv, mode, f"{runs[mode][-1].wall_s:.2f} s")
    decoding = solvers["continuous"]._machinery.payoff.decoding
    peak = sum(
        model.store.device_peak_bytes for model in solvers["continuous"]._machinery.tree_models
    )
    num_runs = sum(map(len, runs.values()))
    shown = rows_of(kv, runs, decoding, verifying.costs, round(verifying.costs.total[1] / num_runs))
    for costs, call, item in ((decoding, "pass", "row"), (verifying.costs, "call", "step")):
        of_a_call, of_an_item = costs.fit()
        say(f"a {call} {of_a_call * 1e3:.2f} ms + {of_an_item * 1e6:.0f} us a {item}")
    for solver in solvers.values():
        solver.close()
    return shown, {run.hashes for each in runs.values() for run in each}, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-share", type=float, default=0.25)
    args = parser.parse_args()
    found = load_problems("bundled:test", limit=args.problems).problems
    problems = [(each.unique_id, each.problem) for each in found]
    options = {"model": "bundled", "verifier": "bundled", "search": "beam", "n": args.n, "width": 4}
    rows, trees, peak = compared("all", options, problems, args.rounds)
    options |= {"kv_memory": int(args.kv_share * peak), "schedule": "locality"}
    some, others, _ = compared(f"{args.kv_share:.0%}", options, problems, args.rounds)
    rows += some
    print(table(rows, COLUMNS))
    assert len(trees | others) == 1, "the trees differ"
    finish("decoupled_measured", {"rows": rows, "n": args.n, "problems": len(problems)})


if __name__ == "__main__":
    main()
