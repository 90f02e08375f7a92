"""The choice by comparison beside votes: accuracy over the same candidates, and tokens for it.

All choose among the same paths, which are drawn once; the prompt's KV is not shared here, so tokens
compared are all that a question has. `found`: of problems where right and wrong
answers were compared, how often a right one won; `by chance`: what drawing one of them gives.
Prints the table of docs/log/2026-11-26-choice-by-comparison.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import wilson_interval
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.search.choose import CONTESTS, Choice, choose, seeded
from beamwright.solver.comparison import Comparison, comparer_of
from beamwright.solver.describe import ballots
from beamwright_lab.common import finish, say, table

_COLUMNS = (
    *("choice", "right", "accuracy", "95 % interval", "gained on majority", "lost"),
    *("tokens compared", "found", "by chance", "compared problems"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    problems = load_problems(args.dataset, args.problems).problems
    options = {"search": "best-of-n", "n": args.n, "width": 1, "temperature": args.temperature}
    checker, found = (
        AnswerChecker(),
        {how: dict[int, Solution]() for how in ("majority", *CONTESTS)},
    )
    with Solver(model=args.model, verifier=args.verifier, choose="majority", **options) as solver:
        asked = [(i, problem.problem) for i, problem in enumerate(problems)]
        for i, outcome in solver.solve_many(asked, in_flight=args.in_flight):
            assert isinstance(i, int)
            found["majority"][i] = _whole(outcome)
        for i, solution in found["majority"].items():
            for how in CONTESTS:
                found[how][i] = _compared(solver, solution, how)
            say(i)
    solved = {how: [each[i] for i in range(len(problems))] for how, each in found.items()}
    rows = []
    right = {}
    for how in ("majority", "weighted", "best"):
        places = [choose(*ballots(each.candidates), how) for each in solved["majority"]]
        pairs = zip(solved["majority"], places, strict=True)
        right[how] = _right(problems, [each.candidates[i].answer for each, i in pairs], checker)
        rows.append(_row(how, right[how], right["majority"]))
    for how in CONTESTS:
        right[how] = _right(problems, [each.answer for each in solved[how]], checker)
        spent = round(mean(each.tokens.compared for each in solved[how]))
        row = _row(how, right[how], right["majority"]) | {"tokens compared": spent}
        rows.append(row | _found(problems, solved[how], checker))
    print(table(rows, _COLUMNS))
    generated = round(mean(each.tokens.generated for each in solved["majority"]))
    finish("comparing", {"rows": rows, "tokens generated": generated, "options": vars(args)})


def _compared(solver: Solver, solution: Solution, how: Choice) -> Solution:
    """The same search with another choice: its tree is there, but for the prompt's KV."""
    tree, machinery = solution.tree, solver._machinery
    nodes = [tree.node(each.lineage) for each in solution.candidates]
    seeds = seeded(*ballots(solution.candidates))
    if len(seeds) < 2:
        return solution
    texts = {place: nodes[place].said.strip() for place in seeds}
    problem = solution.problem
    comparison = Comparison(comparer_of(machinery), how, None, tree.root, problem, seeds, texts)
    before = tree.root.usage["compared"]
    with machinery.threads.in_use():
        while comparison.chosen is None:
            comparison.work(lambda num_tokens: None, alone=True)
    spent = replace(solution.tokens, compared=tree.root.usage["compared"] - before)
    shares = comparison.preferred
    candidates = tuple(
        replace(each, preferred=shares.get(i)) for i, each in enumerate(solution.candidates)
    )
    answer = candidates[comparison.chosen].answer
    return replace(solution, answer=answer, candidates=candidates, tokens=spent)


def _whole(outcome: Solution | BeamwrightError) -> Solution:
    if isinstance(outcome, BeamwrightError):
        raise outcome
    return outcome


def _right(
    problems: Sequence[Problem], answers: Sequence[str | None], checker: AnswerChecker
) -> list[bool]:
    pairs = zip(problems, answers, strict=True)
    return [bool(checker.judge(each.answer, [answer])[answer]) for each, answer in pairs]


def _row(how: str, right: Sequence[bool], majority: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson_interval(mean(right), len(right)) or (0.0, 0.0)
    pairs = [*zip(right, majority, strict=True)]
    return {
        "choice": how,
        "right": sum(right),
        "accuracy": round(mean(right), 3),
        "95 % interval": f"{low:.3f}-{high:.3f}",
        "gained on majority": sum(ours and not theirs for ours, theirs in pairs),
        "lost": sum(theirs and not ours for ours, theirs in pairs),
    }


def _found(
    problems: Sequence[Problem], found: Sequence[Solution], checker: AnswerChecker
) -> dict[str, Any]:
    """Where right and wrong answers were compared, how often a right one won."""
    hits, chances = [], []
    for problem, solution in zip(problems, found, strict=True):
        shown = [each for each in solution.candidates if each.preferred is not None]
        verdicts = checker.judge(problem.answer, [each.answer for each in shown])
        if len({bool(verdicts[each.answer]) for each in shown}) == 2:
            hits.append(bool(verdicts[solution.answer]))
            chances.append(mean(bool(verdicts[each.answer]) for each in shown))
    if not hits:
        return {"compared problems": 0}
    return {
        "found": round(mean(hits), 3),
        "by chance": round(mean(chances), 3),
        "compared problems": len(hits),
    }


if __name__ == "__main__":
    main()
