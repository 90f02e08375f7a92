"""Measure several verifiers beside one generator on this machine (decoupled thesis, 9.1.2).

Bundled problems are solved together, with the bundled verifier and with larger random ones that are
the bottleneck (a step's score is its likelihood). Runs with one and with several verifiers
alternate, and their trees must be equal. Each verifier has as many torch threads as the engine's
loop: one for models up to 20 million parameters and in the case "one thread", else all.

    python -m beamwright_lab.decoupled.verifiers [--problems 16] [--rounds 3] [--verifiers 1 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from beamwright import Solution, Solver
from beamwright.engine.threads import Threads
from beamwright.evaluate.problems import load_problems
from beamwright_lab.common import RESULTS, finish, interleave, say, table
from beamwright_lab.models.checkpoints import copy_tokenizer

COLUMNS = (
    "verifier", "parameters, M", "verifiers", "threads", "seconds, least", "seconds, median",
    "times", "same",
)  # fmt: skip


# Hidden size and layers of a random verifier, and whether OMP_NUM_THREADS is 1.
CASES: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "bundled": (None, False),
    "19M": ((512, 6), False),
    "57M": ((768, 8), False),
    "57M, one thread": ((768, 8), True),
}


def random_verifier(hidden: int, layers: int) -> Path:
    """Return the folder of a random model with the bundled tokenizer, written once."""
    folder = RESULTS / "models" / f"verifier-{hidden}-{layers}"
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, vocab_size=562,
            max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=True,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        copy_tokenizer(folder)
    return folder


@dataclass
class Side:
    """A solver with some number of verifiers; calling it solves all problems once.

    hashes: tree hash per problem, equal in every call.
    """

    solver: Solver
    problems: Sequence[tuple[str, str]]
    in_flight: int
    hashes: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> None:
        found = dict(self.solver.solve_many(list(self.problems), in_flight=self.in_flight))
        solved = {str(k): each.tree_hash for k, each in found.items() if isinstance(each, Solution)}
        if len(solved) < len(self.problems) or self.hashes not in ({}, solved):
            raise AssertionError("a problem failed, or its tree differs from the first run's")
        self.hashes = solved


def measure(name: str, make: Callable[[int], Solver], args: argparse.Namespace) -> list[Any]:
    """Measure one verifier model: a row per number of verifiers, compared with the first."""
    problems = [
        (each.unique_id, each.problem)
        for each in load_problems("bundled:test", args.problems).problems
    ]
    sides = {str(n): Side(make(n), problems, args.in_flight) for n in args.verifiers}
    for side in sides.values():
        side()  # warm up
    times = interleave(dict(sides), args.rounds)
    first, rows = next(iter(sides.values())), []
    base_s = times[str(args.verifiers[0])].min_s
    for number, side in sides.items():
        timing = times[number]
        scorer = side.solver._machinery.scorers[0].decoder.shape
        rows.append(
            {
                "verifier": name,
                "parameters, M": round(scorer.num_parameters / 1e6, 1),
                "verifiers": int(number),
                "threads": side.solver.threads.count,
                "seconds, least": round(timing.min_s, 2),
                "seconds, median": round(timing.median_s, 2),
                "times": round(base_s / timing.min_s, 2),
                "same": side.hashes == first.hashes,
            }
        )
        side.solver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=8, help="problems at a time")
    parser.add_argument("--n", type=int, default=16, help="paths per problem")
    parser.add_argument("--verifiers", type=int, nargs="+", default=[1, 2], help="numbers of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", choices=[*CASES], nargs="+", default=[*CASES])
    args = parser.parse_args()

    rows: list[Any] = []
    for name in args.cases:
        say(name)

        def make(verifiers: int, case: str = name) -> Solver:
            size, alone = CASES[case]
            solver = Solver(
                verifier="bundled" if size is None else f"likelihood:{random_verifier(*size)}",
                n=args.n, executor="overlapped", explore="decoupled", verifiers=verifiers,
                speculation="off",
            )  # fmt: skip
            if alone:
                solver._machinery.threads = solver.threads = Threads(1, "asked for")
            return solver

        rows += measure(name, make, args)
    say(table(rows, COLUMNS))
    finish("decoupled_verifiers", {"rows": rows})


if __name__ == "__main__":
    main()
