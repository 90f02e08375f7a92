"""Measure drafts from the tree: passes, acceptance, tokens a second; all trees must be equal.

`searches`: problems of bundled:test on the bundled models. `replay`: random weights of a larger
shape, whose texts repeat nothing; there the text written without drafts is drafted, each token
right with probability --acceptance. So acceptance is an input, seconds are measured. Sides take
turns in every round.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

from beamwright import Solution, Solver
from beamwright.engine.drafts import Drafts
from beamwright.engine.row import Row
from beamwright.evaluate.problems import load_problems
from beamwright.tree import SearchTree
from beamwright_lab.common import finish, interleave, say, table

_COLUMNS = (
    *("model", "n", "drafts", "acceptance", "passes", "fewer", "drafted", "accepted"),
    *("accepted a pass", "tokens/s", "faster", "equal trees"),
)

# A side's solutions of the last round, and decode seconds of each round.
Measured = tuple[list[Solution], list[float]]


class Replayed(Drafts):
    """Draft source that knows each row's text; each token is right with probability `chance`."""

    def __init__(self, tree: SearchTree, most: int, chance: float) -> None:
        super().__init__(most)
        self._known = {node.lineage: node.token_ids for node in tree.nodes()}
        self._chance, self._rng = chance, random.Random(0)

    def learn(self, rows: Sequence[Row]) -> None:
        """Do nothing: all texts are known."""

    def draft(
        self,
        rooms: Mapping[Row, int],
        least_rows: int = 8,
        equal: Sequence[int] | None = None,
    ) -> dict[Row, list[int]]:
        return {row: self._draft_row(row, min(room, self.most)) for row, room in rooms.items()}

    def _draft_row(self, row: Row, room: int) -> list[int]:
        known = self._known.get(row.node.lineage, ())[len(row.tokens) :][:room]
        return [token if self._rng.random() < self._chance else token ^ 1 for token in known]


def searches(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the bundled models; return a row for each n and number of drafts."""
    problems = [p.problem for p in load_problems("bundled:test", args.problems).problems]
    rows = []
    for n in args.n:
        ways = {str(way): way for way in ("off", *args.drafts, "auto")}
        options = {"n": n, "width": min(n, 4), "executor": "plain", "speculation": "off"}
        solvers = {name: Solver(**options, drafts=way) for name, way in ways.items()}
        found = run_sides(
            {name: [(solver, text) for text in problems] for name, solver in solvers.items()},
            args.rounds,
        )
        rows += _rows("bundled", n, None, found)
        for solver in solvers.values():
            solver.close()
    return rows


def replay(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure random weights; return a row for each n, acceptance and number of drafts."""
    rows = []
    options = {"search": "best-of-n", "choose": "majority", "verifier": "none", "width": 1}
    options |= {"step_tokens": args.tokens, "max_tokens": args.tokens, "ignore_eos": True}
    for n in args.replay_n:
        solvers = {
            name: Solver(model=f"random:{args.shape}", dtype=args.dtype, n=n, **options, drafts=way)
            for name, way in {"off": "off", **{str(d): d for d in args.drafts}}.items()
        }
        for chance in args.acceptance:
            seen: list[SearchTree] = []
            solvers["off"].synthetic(
                args.prompt_tokens, on_round=lambda report, seen=seen: seen.append(report.tree)
            )
            for most in args.drafts:
                rows_of = solvers[str(most)]._machinery.batch._rows
                rows_of._drafts = Replayed(seen[-1], most, chance)
            sides = {name: [(solver, args.prompt_tokens)] for name, solver in solvers.items()}
            rows += _rows(args.shape, n, chance, run_sides(sides, args.rounds))
        for solver in solvers.values():
            solver.close()
    return rows


def run_sides(
    sides: Mapping[str, Sequence[tuple[Solver, Any]]], rounds: int
) -> dict[str, Measured]:
    """Run all sides in turns; return their solutions, and decode seconds of each round."""
    last: dict[str, list[Solution]] = {}

    def side(name: str) -> float:
        last[name] = [
            solver.synthetic(asked) if isinstance(asked, int) else solver.solve(asked)
            for solver, asked in sides[name]
        ]
        return sum(solution.time.decode_s for solution in last[name])

    timings = interleave({name: lambda name=name: side(name) for name in sides}, rounds)
    return {name: (last[name], list(timings[name].rounds_s)) for name in sides}


def _rows(
    model: str, n: int, chance: float | None, found: Mapping[str, Measured]
) -> list[dict[str, Any]]:
    plain, plain_s = found["off"]
    rows = []
    for name, (solutions, seconds) in found.items():
        passes, usual = (sum(s.batch.passes for s in each) for each in (solutions, plain))
        drafted = sum(s.tokens.drafted for s in solutions)
        accepted = sum(s.tokens.draft_accepted for s in solutions)
        pairs = list(zip(solutions, plain, strict=True))
        equal = sum(a.tree_hash == b.tree_hash for a, b in pairs)
        rows.append(
            {
                "model": model,
                "n": n,
                "drafts": name,
                "acceptance": chance if name != "off" else None,
                "passes": passes,
                "fewer": round(usual / passes, 2),
                "drafted": drafted,
                "accepted": accepted,
                "accepted a pass": round(accepted / passes, 2),
                "tokens/s": round(sum(s.tokens.generated for s in solutions) / min(seconds)),
                "faster": round(min(plain_s) / min(seconds), 2),
                "equal trees": f"{equal} of {len(pairs)}",
            }
        )
        say(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["searches", "replay"])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--replay-n", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--problems", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    rows = searches(args) if "searches" in args.what else []
    rows += replay(args) if "replay" in args.what else []
    print(table(rows, _COLUMNS))
    finish("drafts", {"rows": rows})


if __name__ == "__main__":
    main()
