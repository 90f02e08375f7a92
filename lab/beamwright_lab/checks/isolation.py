"""Do problems in flight notice the misfortune of others?

Many problems are submitted at a time to a solver whose verifier is a user's own, on a lane: it
raises in the middle of one problem, never comes back from a step of a second, which has a
deadline, and a third is cancelled from outside. These three begin first, so that it happens while
all others are in flight or wait. Required: all others have the trees of their solo runs (plain
executor), what the three had finished is part of their solo trees, nothing stays allocated, and
closing the solver does not wait for the call that hangs.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError
from beamwright.evaluate import Problem, load_problems
from beamwright.protocols import RoundReport
from beamwright.sections import Explore
from beamwright.solver.handle import Handle
from beamwright.tree import Node, NodeState
from beamwright.verify.scorers import LogprobVerifier
from beamwright_lab.common import finish, say, table

COLUMNS = ["problem", "misfortune", "outcome", "rounds", "candidates", "scored", "as_alone"]
KINDS = ("raises", "hangs", "cancelled")
Troubles = Mapping[str, tuple[str, int]]
"""What befalls a problem, and at which of its steps."""


class Troubled(LogprobVerifier):
    """Scores by log-probability, but for the problems that it has trouble with."""

    beside_decoding = True

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self.stuck, self.let_go = threading.Event(), threading.Event()

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        kind, step = self._troubles.get(str(nodes[0].problem_id), ("", 0))
        if kind == "raises" and nodes[0].depth == step:
            raise ValueError("a made-up failure")
        if kind == "hangs" and nodes[0].depth == step:
            self.stuck.set()
            self.let_go.wait()
        return super().score(nodes)


class Cancelling:
    """Cancels a handle from outside once a round of it is decided; the search waits for that."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._reached, self._done = threading.Event(), threading.Event()

    def on_round(self, report: RoundReport) -> None:
        if report.round == self._step:
            self._reached.set()
            self._done.wait()

    def run(self, handle: Handle) -> None:
        self._reached.wait()
        handle.cancel()
        self._done.set()


def finished_after(solution: Solution) -> int | None:
    """The first step behind one with which a path was finished, if the search went on to it."""
    depths = [n.depth for n in solution.tree.nodes() if n.state is NodeState.FINISHED]
    first = min(depths, default=solution.rounds)
    return first + 1 if first < solution.rounds else None


def unlucky(alone: Mapping[str, Solution]) -> Troubles:
    """Three problems that have finished something when it happens, apart from each other."""
    able = {key: step for key, each in alone.items() if (step := finished_after(each)) is not None}
    keys = list(able)
    chosen = [keys[len(keys) * place // 4] for place in (1, 2, 3)]
    return {key: (kind, able[key]) for key, kind in zip(chosen, KINDS, strict=True)}


def in_company(
    options: Mapping[str, Any], problems: Sequence[Problem], troubles: Troubles, deadline: float
) -> dict[str, Any]:
    """Outcomes by problem, and what is left when all is over."""
    verifier, kinds = Troubled(troubles), {kind: key for key, (kind, _) in troubles.items()}
    cancelling = Cancelling(troubles[kinds["cancelled"]][1] - 1)
    start = time.perf_counter()
    with Solver(**{**options, "verifier": verifier, "executor": "overlapped"}) as solver:
        handles = {
            each.unique_id: solver.submit(
                each.problem,
                problem_id=each.unique_id,
                on_round=cancelling.on_round if each.unique_id == kinds["cancelled"] else None,
                deadline=deadline if each.unique_id == kinds["hangs"] else None,
                priority=1 if each.unique_id in troubles else 0,
            )
            for each in problems
        }
        cancelling.run(handles[kinds["cancelled"]])
        found = {key: outcome(handle) for key, handle in handles.items()}
    model, took_s = solver.generator, time.perf_counter() - start
    still = [each for each in threading.enumerate() if each.name == "verifier"]
    verifier.let_go.set()
    for thread in still:
        thread.join()
    return {
        "found": found,
        "seconds": round(took_s, 2),
        "hung": verifier.stuck.is_set(),
        "threads_left": len(still),
        "segments": model.store.num_segments,
        "bytes": model.budget.used_bytes,
    }


def outcome(handle: Handle) -> Solution | BeamwrightError:
    try:
        return handle.result()
    except BeamwrightError as error:
        return error


def described(key: str, kind: str, found: Solution | BeamwrightError, alone: Solution) -> Any:
    """What became of a problem that something happened to."""
    partial = found if isinstance(found, Solution) else found.partial
    row: dict[str, Any] = {"problem": key, "misfortune": kind, "outcome": type(found).__name__}
    if partial is None:
        return row | {"as_alone": False}
    candidates = partial.candidates
    return row | {
        "reason": partial.reason_fewer,
        "rounds": partial.rounds,
        "candidates": len(candidates),
        "scored": sum(None not in each.step_scores for each in candidates),
        "as_alone": all(alone.tree.node(c.lineage).text == c.text for c in candidates),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Do problems notice what happens to others?")
    parser.add_argument("--problems", type=int, default=500, help="of bundled:test")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--max-rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument(
        "--explore", choices=get_args(Explore), default="continuous", help="of those in company"
    )
    parser.add_argument("--deadline", type=float, default=10.0, help="of the one that hangs")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    problems = load_problems("bundled:test", args.problems).problems
    options = {
        "model": "bundled",
        "verifier": "logprob",
        "n": args.n,
        "width": args.width,
        "max_rounds": args.max_rounds,
        "dtype": args.dtype,
    }
    start = time.perf_counter()
    with Solver(**options, executor="plain") as solver:
        alone = {p.unique_id: solver.solve(p.problem, problem_id=p.unique_id) for p in problems}
    say(f"  alone: {time.perf_counter() - start:.1f} s")
    troubles = unlucky(alone)
    company = in_company({**options, "explore": args.explore}, problems, troubles, args.deadline)
    found = company.pop("found")
    rows = [described(k, kind, found[k], alone[k]) for k, (kind, _) in troubles.items()]
    others = [key for key in alone if key not in troubles]
    different = [
        key
        for key in others
        if not isinstance(found[key], Solution) or found[key].tree_hash != alone[key].tree_hash
    ]
    say(table(rows, COLUMNS))
    say(f"  {len(others) - len(different)} of {len(others)} others as alone; {company}")
    result = {
        "n": args.n,
        "width": args.width,
        "dtype": args.dtype,
        "explore": args.explore,
        "others": len(others),
        "equal": len(others) - len(different),
        "different": different,
        "unlucky": rows,
        **company,
    }
    unaffected = not different and company["hung"]
    freed = company["segments"] == company["bytes"] == 0
    ok = unaffected and freed and all(row["as_alone"] for row in rows)
    finish("isolation", {**result, "ok": ok})


if __name__ == "__main__":
    main()
