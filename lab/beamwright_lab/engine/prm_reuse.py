"""PRM tokens prefilled per problem: KV on the tree against encoding every path in every round.

Re-encoding is counted on the same trees: for every scored step, the length of its whole path in
the verifier's own tokens. The count is checked against a second tokenisation of the paths' text.
"""

from __future__ import annotations

import argparse
from typing import Any

from beamwright import Solver
from beamwright.errors import BeamwrightError
from beamwright.evaluate import load_problems
from beamwright.models.find import resolve_folder
from beamwright.protocols import RoundReport
from beamwright.verify import load_spec
from beamwright_lab.common import finish, say, table

_COLUMNS = ("search", "n", "KV on the tree", "re-encoding", "ratio", "rounds", "steps scored")


class Reencoding:
    """Counts what a PRM without KV would encode, by tokenising every scored path's text."""

    def __init__(self, verifier: str) -> None:
        from transformers import AutoTokenizer

        folder = resolve_folder(verifier, "verifier")
        self._template = load_spec(folder).template
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.num_tokens = 0
        self.num_steps = 0

    def look(self, report: RoundReport) -> None:
        suffix = self._template.step_suffix
        if self._template.prefix is None:
            return
        prefix = self._template.prefix.replace("{problem}", report.tree.root.problem_text)
        for node in report.candidates:
            text = prefix + "".join(step.step_text + suffix for step in node.path()[1:])
            self.num_tokens += len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            self.num_steps += 1


def measure(args: argparse.Namespace, search: str, n: int) -> dict[str, Any]:
    solver = Solver(
        model=args.model,
        verifier=args.verifier,
        search=search,
        n=n,
        width=args.width,
        seed=args.seed,
    )
    problems = load_problems(args.dataset, args.limit).problems
    counter = Reencoding(args.verifier)
    prefilled = reused = roots = rounds = 0
    by_rounds: dict[int, list[int]] = {}
    for problem in problems:
        root_tokens = 0

        def look(report: RoundReport) -> None:
            nonlocal root_tokens
            counter.look(report)
            root_tokens = report.tree.root.usage["verifier_prefilled"]

        found = solver.solve_many([(problem.unique_id, problem.problem)], on_round=look)[0]
        if isinstance(found, BeamwrightError):
            raise found
        prefilled += found.tokens.verifier_prefilled
        reused += found.tokens.verifier_reused
        roots += root_tokens
        rounds += found.rounds
        pair = by_rounds.setdefault(found.rounds, [0, 0])
        pair[0] += found.tokens.verifier_prefilled
        pair[1] += found.tokens.verifier_prefilled + found.tokens.verifier_reused - root_tokens
    # A step's prefilled and reused tokens are its whole path; the prefix alone is never re-encoded.
    reencoded = prefilled + reused - roots
    num = len(problems)
    say(f"{search}, n={n}: {reencoded / prefilled:.2f} times fewer")
    return {
        "search": search,
        "n": n,
        "problems": num,
        "KV on the tree": round(prefilled / num, 1),
        "re-encoding": round(reencoded / num, 1),
        "ratio": round(reencoded / prefilled, 3),
        "counted_by_tokenising": round(counter.num_tokens / num, 1),
        "rounds": round(rounds / num, 2),
        "steps scored": round(counter.num_steps / num, 1),
        "ratio_by_rounds": {
            str(key): round(all_tokens / own, 2)
            for key, (own, all_tokens) in sorted(by_rounds.items())
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--n", type=int, nargs="+", default=[16])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rows = [measure(args, search, n) for n in args.n for search in ("beam", "best-of-n")]
    print(table(rows, _COLUMNS))
    finish("prm_reuse", {"dataset": args.dataset, "width": args.width, "rows": rows})


if __name__ == "__main__":
    main()
