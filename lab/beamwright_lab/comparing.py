"""The choice by comparison beside votes: accuracy over the same candidates, and tokens for it.

Trees are equal, so all choose among the same paths. `found`: of problems where right and wrong
answers were compared, how often a right one won; `by chance`: what drawing one of them gives.
Prints the table of docs/log/2026-11-26-choice-by-comparison.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import wilson_interval
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.search.choose import choose
from beamwright.search.contest import CONTESTS
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
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    problems = load_problems(args.dataset, args.problems).problems
    options = {"search": "best-of-n", "n": args.n, "width": 1, "temperature": args.temperature}
    checker, right, rows = AnswerChecker(), {}, []
    solver = Solver(model=args.model, verifier=args.verifier, **options)
    with solver:
        for how in ("majority", *CONTESTS):
            say(how)
            asked = [(i, problem.problem) for i, problem in enumerate(problems)]
            solved = dict(solver.solve_many(asked, in_flight=args.in_flight, choose=how))
            found = [_whole(solved[i]) for i in range(len(problems))]
            if how == "majority":
                generated = mean(each.tokens.generated for each in found)
                for vote in ("majority", "weighted", "best"):
                    places = [choose(*ballots(each.candidates), vote) for each in found]
                    pairs = zip(found, places, strict=True)
                    picked = [each.candidates[place].answer for each, place in pairs]
                    right[vote] = _right(problems, picked, checker)
                    rows.append(_row(vote, right[vote], right["majority"]))
                continue
            right[how] = _right(problems, [each.answer for each in found], checker)
            spent = mean(each.tokens.compared for each in found)
            row = _row(how, right[how], right["majority"])
            rows.append(row | {"tokens compared": round(spent)} | _found(problems, found, checker))
    print(table(rows, _COLUMNS))
    result = {"rows": rows, "tokens generated": round(generated), "options": vars(args)}
    finish("comparing", result)


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
