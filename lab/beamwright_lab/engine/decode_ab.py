"""CPU seconds of decoding from several checkouts, in turns: what a change of the hot path costs.

One process per checkout stays and searches when it is told to, so imports and models are not in it.
Seconds are one thread's CPU time. Of every forward pass and what follows it the least of all rounds
counts, and the table has their sum: other processes slow some step of every search, but hardly the
same one in every round. Whole searches, least and median, stand beside it.

    fixed    best-of-n, steps of 16 tokens, no end of sequence: rows of equal length
    ragged   best-of-n, steps that end as the text says: rows join and leave at any token

    python -m beamwright_lab.engine.decode_ab CHECKOUT CHECKOUT --n 8 64 --rounds 9
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from beamwright_lab.common import Timing, finish, interleave, say, table
from beamwright_lab.engine.worker import Worker

_ROOT = Path(__file__).resolve().parents[3]
_COLUMNS = ("case", "n", "checkout", "passes", "least steps s", "ratio", "least s", "median s")
_TREES: dict[str, dict[str, Any]] = {
    "fixed": {"step_tokens": 16, "max_tokens": 96, "ignore_eos": True},
    "ragged": {"max_tokens": 160},
}
_PROBLEM = "Ann has 12 apples and buys 7 more. She gives 5 to Ben. How many apples does Ann have?"
_WORKER = """
import json, sys, time
from beamwright import Solver
from beamwright.models.decoder import Decoder
passes, hidden = [], Decoder.hidden
def timed(self, *args):
    passes.append(time.thread_time())
    return hidden(self, *args)
Decoder.hidden = timed
options = json.loads(sys.argv[1])
solver = Solver(model="bundled", verifier="logprob", search="best-of-n", **options)
for line in sys.stdin:
    passes[:] = [time.thread_time()]
    found = solver.solve(sys.argv[2])
    passes.append(time.thread_time())
    steps = [after - before for before, after in zip(passes, passes[1:])]
    print(json.dumps([steps, found.tokens.generated, found.tree_hash]), flush=True)
"""


class Searches(Worker):
    """A checkout's solver in a process of its own."""

    def __init__(self, checkout: Path, options: dict[str, Any]) -> None:
        words = ["-c", _WORKER, json.dumps(options), _PROBLEM]
        super().__init__(words, checkout, [checkout / "src"], {"OMP_NUM_THREADS": "1"})
        self.steps: list[list[float]] = []
        self.found: set[tuple[int, str]] = set()
        self._search()

    def search(self) -> float:
        """Search once; CPU seconds."""
        self.steps.append(self._search())
        return sum(self.steps[-1])

    def _search(self) -> list[float]:
        steps, num_tokens, tree_hash = self.ask("go")
        self.found.add((num_tokens, tree_hash))
        return list(steps)

    @property
    def least_steps_s(self) -> float:
        """See the module."""
        return sum(map(min, zip(*self.steps, strict=True)))


def measure(
    checkouts: list[Path], options: dict[str, Any], rounds: int
) -> dict[str, tuple[Timing, Searches]]:
    """CPU seconds of every checkout's searches."""
    workers: dict[str, Searches] = {}
    try:
        for each in checkouts:
            workers[str(each)] = Searches(each, options)
        timings = interleave({name: worker.search for name, worker in workers.items()}, rounds)
    finally:
        for worker in workers.values():
            worker.close()
    found = [worker.found for worker in workers.values()]
    if any(each != found[0] for each in found):
        say("the checkouts' trees differ")
    return {name: (timings[name], worker) for name, worker in workers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_ROOT], help="default: this")
    parser.add_argument("--n", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trees", nargs="+", choices=list(_TREES), default=list(_TREES))
    args = parser.parse_args()
    checkouts = [each.resolve() for each in args.checkouts]
    rows = []
    for case in args.trees:
        for n in args.n:
            found = measure(checkouts, {"n": n, **_TREES[case]}, args.rounds)
            first = found[str(checkouts[0])][1].least_steps_s
            for name, (timing, worker) in found.items():
                least_s = worker.least_steps_s
                rows.append(
                    {
                        "case": case,
                        "n": n,
                        "checkout": name,
                        "tokens": next(iter(worker.found))[0],
                        "passes": len(worker.steps[0]) - 1,
                        "least steps s": f"{least_s:.4f}",
                        "ratio": f"{least_s / first:.3f}",
                        "least s": f"{timing.min_s:.3f}",
                        "median s": f"{timing.median_s:.3f}",
                    }
                )
    print(table(rows, _COLUMNS))
    finish("decode_ab", {"rows": rows})


if __name__ == "__main__":
    main()
