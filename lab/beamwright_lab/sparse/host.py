"""KV at home on the host against swapping groups: seconds and bytes of a token, over a slow link.

Random weights, and random KV in the place of long first steps': this measures time and bytes, no
answers, and selections have less in common from token to token than a trained model's. Beam search:
`unshared`, 8 paths of their own all the way (width 1); `tree`, 16 beams of which 4 go on below one
path (width 4). The device has room for a quarter of all KV. locality, the rival, brings groups of
paths in turn, once for every step of 32 tokens; the others read `--select` tokens of each path and
KV head. Times are of two rounds behind the long one.

    python -m beamwright_lab.sparse.host --tokens 4096 16384 --rounds 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from beamwright import Solver
from beamwright.engine.row import Row
from beamwright.models.tree_model import PrefillRequest, remember
from beamwright.protocols import Direction, RoundReport
from beamwright.tree import Node
from beamwright_lab.common import finish, say, table
from beamwright_lab.paper.cases import LINK_BANDWIDTH

SHAPES = {
    "MHA": "layers=8,hidden=256,heads=4,kv_heads=4,intermediate=512,vocab=512",
    "GQA": "layers=8,hidden=256,heads=4,kv_heads=1,intermediate=512,vocab=512",
}
PROMPT, STEP, ROUNDS, MIB, NEVER = 64, 32, 2, 2**20, "\x00"
KINDS = {"unshared": (8, 1), "tree": (16, 4)}
"""Beams, and children of each survivor."""
SIDES: dict[str, dict[str, Any]] = {
    "locality": {"schedule": "locality"},
    "quest": {"sparse": "quest", "sparse_home": "host"},
    "ahead, inline": {"sparse": "ahead", "sparse_home": "host", "sparse_rank": "inline"},
    "ahead, thread": {"sparse": "ahead", "sparse_home": "host"},
    "ahead-pages, thread": {"sparse": "ahead-pages", "sparse_home": "host"},
    "exact": {"sparse": "exact", "sparse_home": "host"},
}
"""Options of a Solver."""
COLUMNS = (
    *("shape", "tokens", "paths", "side", "ms a token", "times", "in, MiB a token"),
    *("link, ms a token", "groups", "device peak, MiB"),
)


class Given:
    """Long first steps, which nobody decodes, and their KV, which nobody computes."""

    def __init__(self, solver: Solver, tokens: int) -> None:
        self._tokens, model = tokens, solver.generator
        self._store, self._prefill = model.store, model.prefill
        self._width = model.decoder.weights.embedding.shape[1]
        capacity = solver._machinery.batch._capacity
        self._row = capacity.row
        capacity.row = self.row  # type: ignore[method-assign]
        model.prefill = self.prefill  # type: ignore[method-assign]

    def row(self, node: Node, group: int = 0) -> Row:
        """A first step has all tokens but one."""
        row = self._row(node, group)
        if row.limit.tokens == self._tokens and not row.tokens:
            row.tokens = torch.randint(0, 256, (self._tokens - 1,)).tolist()
            row.logprobs = [-1.0] * len(row.tokens)
        return row

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[torch.Tensor]:
        """Random KV for what is long."""
        layout = self._store.pool.layout
        size = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
        if all(len(request.token_ids) < self._tokens // 2 for request in requests):
            return self._prefill(requests)
        for request in requests:
            for first in range(0, len(request.token_ids), 2048):
                part = request.token_ids[first : first + 2048]
                self._store.append([request.segment], [torch.randn(len(part), *size)])
                remember(request, part)
        return [torch.randn(1, self._width) for _ in requests]


def run(shape: str, tokens: int, kind: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """One search."""
    sizes = dict(part.split("=") for part in SHAPES[shape].split(","))
    head_dim = int(sizes["hidden"]) // int(sizes["heads"])
    token_bytes = 2 * int(sizes["layers"]) * int(sizes["kv_heads"]) * head_dim * 4
    beams, width = KINDS[kind]
    total = beams // width * tokens * token_bytes
    options = dict(SIDES[side])
    if "sparse" in options:
        options |= {"select": args.select, "sparse_from": 0}
    solver = Solver(
        model=f"random:llama,{SHAPES[shape]},context={PROMPT + tokens + ROUNDS * STEP}",
        verifier="logprob",
        search="beam",
        n=beams,
        width=width,
        step_limits=(tokens, STEP),
        max_step_tokens=tokens,
        max_rounds=1 + ROUNDS,
        delimiter=NEVER,
        ignore_eos=True,
        kv_memory=total // 4 + (PROMPT + 4 * STEP) * token_bytes,
        host_memory=2 * beams * tokens * token_bytes + 2**28,
        link_bandwidth=args.link,
        speculation="off",
        **options,
    )
    marks: list[tuple[float, int]] = []
    with solver:
        Given(solver, tokens)
        link = solver._machinery.tier.generator.link
        moved = link.bytes_moved

        def note(report: RoundReport) -> None:
            del report
            marks.append((time.perf_counter(), moved[Direction.H2D]))

        solver.synthetic(PROMPT, on_round=note)
        (start_s, before), (end_s, after) = marks[0], marks[-1]
        count = (len(marks) - 1) * STEP
        return {
            "shape": shape,
            "tokens": tokens,
            "paths": kind,
            "side": side,
            "ms a token": 1e3 * (end_s - start_s) / count,
            "in, MiB a token": round((after - before) / count / MIB, 2),
            "link, ms a token": round(1e3 * (after - before) / count / args.link, 1),
            "groups": solver._machinery.batch.num_groups,
            "device peak, MiB": round(solver.generator.store.device_peak_bytes / MIB, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--paths", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--select", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--link", type=int, default=LINK_BANDWIDTH)
    args = parser.parse_args()
    rows = []
    for shape, tokens, kind in product(args.shapes, args.tokens, args.paths):
        best: dict[str, dict[str, Any]] = {}
        for _, side in product(range(args.rounds), args.sides):
            found = run(shape, tokens, kind, side, args)
            known = best.setdefault(side, found)
            best[side] = min(known, found, key=lambda each: each["ms a token"])
        for found in best.values():
            found["times"] = round(best["locality"]["ms a token"] / found["ms a token"], 2)
            found["ms a token"] = round(found["ms a token"], 1)
            say(*(found[column] for column in COLUMNS))
            rows.append(found)
    say(table(rows, COLUMNS))
    finish("sparse_host", {"rows": rows, "settings": vars(args)})


if __name__ == "__main__":
    main()
