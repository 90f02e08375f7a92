"""Checks that trees do not depend on order, batches or attention backend; counts token flips.

1. float32, one backend: order, batch size, problems in flight and repetition must not change trees.
2. float64: the backends reference, dense and tree must give equal trees.
3. float32, different backends: how many tokens per million differ?
4. Different seeds must give different trees.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.protocols import Plan, RoundReport, ScheduleView
from beamwright.tree import SearchTree
from beamwright_lab.common import finish, say

_SCORE_TOLERANCE = 1e-4


class ArrangedSchedule:
    """A schedule of beams in depth-first order, or reversed, in groups of at most `max_batch`."""

    name = "arranged"

    def __init__(self, backwards: bool = False, max_batch: int | None = None) -> None:
        self.backwards, self.max_batch = backwards, max_batch

    def plan(self, view: ScheduleView) -> Plan:
        """Return the groups; see `protocols.SchedulePolicy`."""
        beams = view.beams[::-1] if self.backwards else view.beams
        size = self.max_batch or max(1, len(beams))
        return Plan(tuple(beams[i : i + size] for i in range(0, len(beams), size)))


@dataclass(frozen=True)
class Arrangement:
    """One way to run the same searches. in_flight: problems solved at the same time."""

    name: str
    schedule: ArrangedSchedule = field(default_factory=ArrangedSchedule)
    in_flight: int = 1


VARIANTS = (
    Arrangement("one batch"),
    Arrangement("second run"),
    Arrangement("reversed order", ArrangedSchedule(backwards=True)),
    Arrangement("batches of 3", ArrangedSchedule(max_batch=3)),
    Arrangement("batches of 16", ArrangedSchedule(max_batch=16)),
    Arrangement("reversed, batches of 5", ArrangedSchedule(backwards=True, max_batch=5)),
    Arrangement("4 problems in flight", in_flight=4),
)


@dataclass
class Grown:
    """One problem's tree.

    scores: of the final candidates. nodes: (tokens, stop reason, state) by lineage.
    """

    tree_hash: str
    scores: list[float | None]
    nodes: dict[tuple[Any, ...], tuple[tuple[int, ...], str, str]]
    num_tokens: int


def grow(solver: Solver, problems: Sequence[Problem], variant: Arrangement) -> list[Grown]:
    """Solve all problems in this arrangement, and return their trees."""
    solver.schedule = variant.schedule
    found: list[Grown] = []
    for start in range(0, len(problems), variant.in_flight):
        batch = problems[start : start + variant.in_flight]
        trees: dict[str | int, SearchTree] = {}

        def look(report: RoundReport, trees: dict[str | int, SearchTree] = trees) -> None:
            trees[report.tree.root.problem_id] = report.tree

        pairs = [(problem.unique_id, problem.problem) for problem in batch]
        for problem, solution in zip(batch, solver.solve_many(pairs, on_round=look), strict=True):
            if isinstance(solution, BeamwrightError):
                raise solution
            found.append(_grown(solution, trees[problem.unique_id]))
    return found


def _grown(solution: Solution, tree: SearchTree) -> Grown:
    nodes = {
        node.lineage[1:]: (node.token_ids, str(node.stop), str(node.state))
        for node in tree.nodes()
        if node.parent is not None and node.token_ids
    }
    scores = [candidate.score for candidate in solution.candidates]
    return Grown(solution.tree_hash, scores, nodes, sum(len(t) for t, _, _ in nodes.values()))


# --- comparing -------------------------------------------------------------------------------


def same_trees(left: Sequence[Grown], right: Sequence[Grown]) -> dict[str, Any]:
    """Count equal trees, and find the largest score difference among them."""
    equal = [a.tree_hash == b.tree_hash for a, b in zip(left, right, strict=True)]
    differences = [
        abs((x or 0.0) - (y or 0.0))
        for a, b, same in zip(left, right, equal, strict=True)
        if same
        for x, y in zip(a.scores, b.scores, strict=True)
    ]
    largest = max(differences, default=0.0)
    return {
        "equal": sum(equal),
        "trees": len(equal),
        "max_score_difference": largest,
        "scores_within_1e-4": largest <= _SCORE_TOLERANCE,
    }


def flips(left: Sequence[Grown], right: Sequence[Grown]) -> dict[str, Any]:
    """Count the tokens in which two backends' trees differ.

    A step is compared if all its ancestors agree. Its first different token counts as one flip, and
    its descendants are not compared. `tokens` counts compared tokens. A step that only one tree
    has, or that only one tree prunes, is a selection difference.
    """
    num_flips = num_selections = tokens = 0
    for a, b in zip(left, right, strict=True):
        apart: set[tuple[Any, ...]] = set()
        for lineage in sorted(set(a.nodes) | set(b.nodes), key=len):
            if any(lineage[:depth] in apart for depth in range(1, len(lineage))):
                continue
            if lineage not in a.nodes or lineage not in b.nodes:
                num_selections += 1
                apart.add(lineage)
                continue
            (ours, _, state), (theirs, _, other_state) = a.nodes[lineage], b.nodes[lineage]
            agreed = next(
                (i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y),
                min(len(ours), len(theirs)),
            )
            if ours != theirs:
                num_flips += 1
                tokens += agreed + 1
                apart.add(lineage)
            else:
                tokens += len(ours)
                if state != other_state:
                    num_selections += 1
                    apart.add(lineage)
    different = sum(a.tree_hash != b.tree_hash for a, b in zip(left, right, strict=True))
    return {
        "trees": len(left),
        "different_trees": different,
        "flips": num_flips,
        "selection_differences": num_selections,
        "tokens": tokens,
        "flips_per_million_tokens": round(1e6 * num_flips / tokens, 2) if tokens else None,
    }


# --- the four parts --------------------------------------------------------------------------


def within_backends(
    args: argparse.Namespace, problems: Sequence[Problem], build: Callable[..., Solver]
) -> tuple[dict[str, Any], dict[str, list[Grown]]]:
    found: dict[str, Any] = {}
    first: dict[str, list[Grown]] = {}
    for backend in args.backends:
        mine = problems[: args.reference_limit] if backend == "reference" else problems
        solver = build(attention=backend, dtype="float32")
        first[backend] = base = grow(solver, mine, VARIANTS[0])
        found[backend] = {"exact": solver.exact, "tokens": sum(g.num_tokens for g in base)}
        for variant in VARIANTS[1:]:
            if variant.name == "second run":
                solver = build(attention=backend, dtype="float32")
            found[backend][variant.name] = same_trees(base, grow(solver, mine, variant))
            say(f"float32 {backend}, {variant.name}: {found[backend][variant.name]}")
    return found, first


def across_backends_float64(
    args: argparse.Namespace, problems: Sequence[Problem], build: Callable[..., Solver]
) -> dict[str, Any]:
    base = grow(build(attention="tree", dtype="float64"), problems, VARIANTS[0])
    found: dict[str, Any] = {}
    for backend in ("dense", "reference"):
        mine = problems[: args.reference_limit] if backend == "reference" else problems
        other = grow(build(attention=backend, dtype="float64"), mine, VARIANTS[0])
        found[f"tree = {backend}"] = same_trees(base[: len(mine)], other)
        say(f"float64 tree = {backend}: {found[f'tree = {backend}']}")
    split = grow(build(attention="tree", dtype="float64"), problems, VARIANTS[3])
    found["tree = tree, batches of 3"] = same_trees(base, split)
    return found


def across_seeds(
    args: argparse.Namespace,
    problems: Sequence[Problem],
    build: Callable[..., Solver],
    base: list[Grown],
) -> dict[str, Any]:
    other = grow(build(attention=args.backends[0], seed=args.seed + 1), problems, VARIANTS[0])
    same = sum(a.tree_hash == b.tree_hash for a, b in zip(base, other, strict=True))
    return {"trees": len(other), "equal": same}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument(
        "--reference-limit", type=int, help="problems for the slow reference backend"
    )
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--search", default="beam", choices=["beam", "best-of-n"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--backends", nargs="+", default=["tree", "dense"])
    parser.add_argument(
        "--flip-limit", type=int, help="problems for the flip rate, default --limit"
    )
    parser.add_argument("--skip-float64", action="store_true")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.flip_limit = args.flip_limit or args.limit
    problems = load_problems("bundled:test", max(args.limit, args.flip_limit)).problems

    def build(**options: Any) -> Solver:
        base = {"n": args.n, "search": args.search, "seed": args.seed, "width": args.width}
        return Solver(model=args.model, verifier=args.verifier, **{**base, **options})

    first = problems[: args.limit]
    within, grown = within_backends(args, first, build)
    result: dict[str, Any] = {
        "problems": args.limit,
        "n": args.n,
        "search": args.search,
        "float32_one_backend": within,
        "float64_across_backends": (
            None if args.skip_float64 else across_backends_float64(args, first, build)
        ),
        "other_seed": across_seeds(args, first, build, grown[args.backends[0]]),
    }
    if len(args.backends) > 1:
        result["float32_across_backends"] = _flip_rates(args, problems, grown, build)
    result["ok"] = _ok(result)
    finish("sameness", result)


def _flip_rates(
    args: argparse.Namespace,
    problems: Sequence[Problem],
    grown: dict[str, list[Grown]],
    build: Callable[..., Solver],
) -> dict[str, Any]:
    more = problems[args.limit : args.flip_limit]
    sets = dict(grown)
    if more:
        for backend in args.backends:
            if backend != "reference":
                solver = build(attention=backend, dtype="float32")
                sets[backend] = grown[backend] + grow(solver, more, VARIANTS[0])
    base = args.backends[0]
    return {
        f"{base} against {other}": flips(sets[base][: len(sets[other])], sets[other])
        for other in args.backends[1:]
    }


def _ok(result: dict[str, Any]) -> bool:
    """Return whether the promises of docs/concepts/sameness.md hold."""
    required = [
        check
        for backend in result["float32_one_backend"].values()
        if backend["exact"]
        for check in backend.values()
        if isinstance(check, dict)
    ]
    required += list((result["float64_across_backends"] or {}).values())
    equal = all(c["equal"] == c["trees"] and c["scores_within_1e-4"] for c in required)
    return equal and result["other_seed"]["equal"] == 0


if __name__ == "__main__":
    main()
