"""What the host does between two steps of a captured batch, in milliseconds of its thread.

Models compute nothing: steps write tokens that were drawn before, as a card would, in work lists,
blocks and tails as they are on one. A card waits for what lies between the last step of an
iteration and the first of the next (`between`), most of all where a round lies between (`round`);
what lies between two steps of an iteration (`token`) it hides. `idle` is `between` less a step of
1.5B on an H100, by its costs, where one was begun ahead. Of eager operations only their
launches are like a card's. Needs Triton, whose interpreter runs prompts.

    python -m beamwright_lab.engine.host_time --n 16 64 256
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported

import torch

from beamwright import Solver
from beamwright.engine.tensor_rows import TensorRows, make_running_batch
from beamwright.models.packed import Replay
from beamwright.plan.machines import PassCosts
from beamwright.tree import Node
from beamwright_lab.common import finish, say, table

_SHAPE = "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=32,vocab=512,context=2048"
_STEP = 64
_COSTS = PassCosts(weights_s=1.1e-3, row_s=6e-6, launch_s=1e-3)  # of 1.5B on an H100, about
_KINDS = "token", "between", "round", "idle"


class Scripted(Replay):
    """Steps whose tokens were drawn before; notes the thread's time between any two.

    pool: tokens that may be drawn.
    """

    is_plain = False

    def __init__(self, pool: Sequence[int]) -> None:
        number = torch.Generator().manual_seed(0)
        self._pool = torch.tensor(pool)
        self._drawn = torch.randint(len(pool), (64, 4096), generator=number)
        self.gaps: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        self.kind, self._round, self._step, self._since = "round", -1, 0, 0.0
        self._queued_ms = 0.0
        self.profiled, self._profile = False, cProfile.Profile()
        self.profiles: dict[str, pstats.Stats] = {}

    def begin(self, number: int, queued_s: float) -> None:
        """An iteration of a round begins; a card is busy with its first step for so long."""
        self._queued_ms = 1e3 * queued_s
        self.kind = "between" if number == self._round else "round"
        self._round = number

    def run(self, key: object, version: int, step: Any) -> None:
        (buffers,) = step.args
        spent_ms = 1e3 * (time.thread_time() - self._since)
        self.gaps[self.kind].append(spent_ms)
        if self.kind == "between":
            self.gaps["idle"].append(max(0.0, spent_ms - self._queued_ms))
        if self.profiled:
            self._profile.disable()
            if self.kind in self.profiles:
                self.profiles[self.kind].add(self._profile)
            elif self._profile.getstats():
                self.profiles[self.kind] = pstats.Stats(self._profile, stream=sys.stderr)
            self._profile = cProfile.Profile()
        self.draw(buffers)
        self.kind = "token"
        if self.profiled:
            self._profile.enable()
        self._since = time.thread_time()

    def draw(self, buffers: Any) -> None:
        """What a step leaves in its buffers."""
        self._step += 1
        tokens = self._pool[self._drawn[self._step % 64, : len(buffers.tokens)]]
        buffers.keep(tokens=tokens, logprobs=torch.full(tokens.shape, -1.0))
        buffers.tokens.copy_(tokens)
        buffers.positions.add_(1)
        buffers.index.add_(1)


class Instant:
    """A verifier that knows scores at once."""

    default_aggregate, probabilities, name = "last", True, "instant"

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [(hash(node.lineage) % 1000) / 1000 for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """It keeps nothing."""


@contextmanager
def _scripted(replay: Scripted) -> Iterator[None]:
    run, module = TensorRows.run, "beamwright.engine.tensor_rows"

    def marked(rows: TensorRows, running: Any, *others: Any, **named: Any) -> Any:
        begun = getattr(rows, "_begun", False)
        replay.begin(running[0].node.round, _COSTS.seconds(len(running)) if begun else 0.0)
        return run(rows, running, *others, **named)

    def draw(rows: TensorRows, buffers: Any, logits: Any) -> None:
        replay.draw(buffers)

    def made(*parts: Any, **others: Any) -> Any:
        return make_running_batch(*parts, **{**others, "costs": _COSTS})

    with (
        patch("beamwright.solver.machinery.make_running_batch", made),
        patch(f"{module}.make_replay", lambda *_: replay),
        patch.object(TensorRows, "run", marked),
        patch.object(TensorRows, "_draw", draw),
    ):
        yield


def gaps(n: int, *, fixed: bool, judged: bool, rounds: int, profile: str | None) -> dict[str, Any]:
    """The least of some searches of the median, by kind of gap.

    fixed: steps of a fixed length, else delimiters. judged: by a verifier, beam search of width 4;
    else plain paths. profile: of the calls of one kind of gap, by this order.
    """
    options: dict[str, Any] = {"model": f"random:{_SHAPE}"} if fixed else {"model": "bundled"}
    options |= (
        {"step_tokens": _STEP}
        if fixed
        else {"delimiter": "\n", "max_step_tokens": _STEP, "choose": "majority"}
    )
    options |= {"search": "beam", "width": 4, "verifier": Instant()} if judged else {}
    options = {"search": "best-of-n", "width": 1, "verifier": "none"} | options
    replay = Scripted(range(3, 512))
    with _scripted(replay), Solver(
        **options, n=n, max_rounds=rounds, max_tokens=rounds * _STEP, ignore_eos=True,
        schedule="in-gpu", attention="triton-tree", device="cpu", dtype="float32",
        kv_memory="1GiB", speculation="off",
    ) as solver:  # fmt: skip
        if not fixed:  # one token in 32 ends a step
            pieces = solver.codec.token_bytes
            some = [i for i, piece in enumerate(pieces) if piece.strip()][:255]
            ends = [i for i, piece in enumerate(pieces) if piece == b"\n"] * 8
            replay._pool = torch.tensor(some[:248] + ends)
            replay._drawn %= len(replay._pool)
        found = []
        for _ in range(4):
            replay.gaps = {kind: [] for kind in _KINDS}
            solver.synthetic(128)
            found.append({k: each[1:] or each for k, each in replay.gaps.items() if each})
        if profile:
            replay.profiled = True
            solver.synthetic(128)
            replay._profile.disable()
            for kind in _KINDS[1:3]:
                say(kind)
                replay.profiles[kind].sort_stats(profile).print_stats(60)
    kinds = [kind for kind in _KINDS if all(kind in each for each in found)]
    return {"n": n, "steps": "fixed" if fixed else "delimited",
            "verifier": "instant" if judged else "none",
            **{kind: round(min(median(each[kind]) for each in found[1:]), 3) for kind in kinds},
            "gaps": len(found[-1].get("between", ()))}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["fixed", "delimited"])
    parser.add_argument("--profile", metavar="ORDER", help="print what was called, by this order")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for fixed in (True, False):
        if args.only not in (None, "fixed" if fixed else "delimited"):
            continue
        for judged in (False, True):
            for n in args.n:
                rows.append(gaps(n, fixed=fixed, judged=judged, rounds=args.rounds,
                                 profile=args.profile))  # fmt: skip
                say(str(rows[-1]))
    say(table(rows, ("n", "steps", "verifier", *_KINDS, "gaps")))
    finish("host_time", {"rows": rows})


if __name__ == "__main__":
    main()
