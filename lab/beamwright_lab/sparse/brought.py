"""What crosses the link for selected tokens: as the cost model has it, and as it is counted.

Searches of real and random models with all KV at home on the host. Counted: bytes that `HostStore`
fetches, once for all rows, and only what the token before has not left on the device. Predicted:
`plan.sparse.brought` on the very tree, every row choosing by itself; per row: as many bytes as rows
select, of which two fifths are new, which is what was reckoned with before (ShadowKV).

`--what sides`: paths of their own behind random prompts of so many tokens, whose KV the device has
only a share of. What is off is streamed or swapped, as `--schedule` says; the others select. Time
and bytes of a token of all rows, least of the rounds in which the sides take turns.

    python -m beamwright_lab.sparse.brought
    python -m beamwright_lab.sparse.brought --what sides --tokens 4096 --share 0.5 0.25 0.1
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from beamwright import Solver
from beamwright.errors import BeamwrightError
from beamwright.plan.sparse import ANEW, brought, selected_share
from beamwright.protocols import Direction
from beamwright.solver.scheduler import Request
from beamwright.tree import Node, SearchTree
from beamwright_lab.common import finish, say, table
from beamwright_lab.sparse.ledger import MODEL, load_maker

RANDOM = "random:llama,layers=4,hidden=128,heads=4,kv_heads=2,intermediate=256,vocab=512"
DEEP = "random:llama,layers=24,hidden=256,heads=4,kv_heads=2,intermediate=512,vocab=512"
PROBLEM = (
    "Ann has 12 apples. In May Ann sells 3 apples. In June Ann buys as many again, and Tom gives "
    "her 7 more. How many apples does Ann have now?"
)
HOME: Mapping[str, Any] = {
    "sparse": "exact", "sparse_home": "host", "sparse_from": 0, "host_memory": "2GiB",
    "kv_memory": "256MiB",
}  # fmt: skip
WIDTHS = ((1, 1), (8, 1), (8, 4), (16, 4))
STEP, MIB = 32, 2**20
Row = dict[str, Any]


def predicted(tree: SearchTree, select: int, anew: float) -> tuple[float, float]:
    """Tokens of each head that a search brings: by the model, and by rows; level after level."""
    levels: dict[int, list[Node]] = {}
    for node in tree.nodes():
        if node.parent is not None:
            levels.setdefault(node.level, []).append(node)
    new = per_row = 0.0
    for nodes in levels.values():
        for at in range(max(len(node.token_ids) for node in nodes)):
            rows = [node for node in nodes if len(node.token_ids) > at]
            seen: Counter[Node] = Counter()
            for row in rows:
                above = row.parent
                while above is not None:
                    seen[above] += 1
                    above = above.parent
            parts = [(len(part.token_ids), count) for part, count in seen.items()]
            path = sum(tokens * count for tokens, count in parts) / len(rows) + at + 1
            if path > select:
                new += brought(parts, selected_share(select, path), anew)
                per_row += 0.4 * len(rows) * select
    return new, per_row


def counted(name: str, solver: Solver, problem: str | int, select: int, **options: Any) -> Row:
    """One search. problem: a text, or so many random tokens."""
    store, tier = solver.generator.store, solver._machinery.tier  # type: ignore[union-attr]
    moved, found, fetch = tier.generator.link.bytes_moved, [0], store.fetch  # type: ignore[union-attr]

    def spy(wanted: Any) -> Any:
        before = moved.get(Direction.H2D, 0)
        result = fetch(wanted)
        found[0] += moved.get(Direction.H2D, 0) - before
        return result

    store.fetch = spy  # type: ignore[method-assign]
    solution = (
        solver.synthetic(problem) if isinstance(problem, int) else solver.solve(problem, **options)
    )
    assert solution.sparse is not None
    anew = 1.0 if name == "random" else ANEW
    new, per_row = (
        tokens * store.pool.bytes_per_token / MIB
        for tokens in predicted(solution.tree, select, anew)
    )
    search = solver.settings.search
    width = search.width if search.search == "beam" else 1
    return {
        "model": name, "n": search.n, "width": width, "selected": select,
        "visible": round(solution.sparse.visible_mean or 0), "counted, MiB": found[0] / MIB,
        "predicted": new, "times": new * MIB / found[0], "per row": per_row,
        "left out": solution.sparse.left_out_mean,
    }  # fmt: skip


def searches() -> Iterator[Row]:
    """Of each model at several widths."""
    for n, width in WIDTHS:
        shape: dict[str, Any] = (
            {"n": n, "search": "best-of-n"} if width == 1 else {"n": n, "width": width}
        )
        random: dict[str, Any] = {
            "verifier": "logprob",
            "step_tokens": STEP,
            "max_rounds": 4,
            "ignore_eos": True,
        }
        model = f"{RANDOM},context=4096"
        with Solver(model=model, **HOME, **shape, **random, select=64) as solver:
            yield counted("random", solver, 512, 64)
        with Solver(model="bundled", verifier="bundled", **HOME, **shape, select=32) as solver:
            yield counted("bundled", solver, PROBLEM, 32)
    maker = load_maker()
    ledger = maker.ledgers(1024, 1, False, 0)[0]
    for n in (1, 4):
        options: dict[str, Any] = {
            "verifier": "logprob",
            "search": "best-of-n",
            "n": n,
            "temperature": 0.3,
        }
        with Solver(model=MODEL, **HOME, **options, select=128, step_tokens=STEP) as solver:
            yield counted("ledger", solver, maker.question_text(ledger), 128, max_tokens=256)


# --- against what is streamed or swapped -------------------------------------------------------


def side(how: str, rows: int, share: float, args: argparse.Namespace) -> Row | None:
    """Of one way: "pages", "exact" or "auto" with KV at home on the host, else a schedule."""
    parts = dict(part.split("=") for part in DEEP.partition(",")[2].split(","))
    head_dim = int(parts["hidden"]) // int(parts["heads"])
    total = rows * args.tokens * 2 * int(parts["layers"]) * int(parts["kv_heads"]) * head_dim * 4
    home = {"sparse": how, "sparse_home": "host", "select": args.select, "sparse_from": 0}
    options: dict[str, Any] = home if how in ("exact", "pages") else {"schedule": how}
    marks: list[tuple[float, float, int, int]] = []
    seen: set[int] = set()
    with Solver(
        model=f"{DEEP},context={args.tokens + 512}", verifier="logprob", search="best-of-n", n=1,
        step_tokens=STEP, max_rounds=args.rounds, ignore_eos=True, speculation="off",
        host_memory=2 * total + 2**28, link_bandwidth=args.link or None,
        kv_memory=int(share * total) + 2**21, **options,
    ) as solver:  # fmt: skip
        tier = solver._machinery.tier
        assert tier is not None

        def note(who: int) -> None:
            seen.add(who)
            engine = solver._machinery.counted()["engine"]
            if len(seen) == rows:
                now = time.perf_counter(), time.process_time()
                marks.append((*now, engine.h2d_bytes, engine.row_tokens))

        solver.most_submitted = rows
        draw = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, 500, (rows, args.tokens), generator=draw).tolist()
        requests = [
            Request(
                lambda i=i, ids=ids: SearchTree(i, tuple(ids), ""),  # type: ignore[misc]
                solver._default, args.tokens, lambda _, i=i: note(i),  # type: ignore[misc]
            )
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        handles = [solver._queue.submit(i, each) for i, each in enumerate(requests)]
        for handle in handles:
            handle.result()
        peak = solver.generator.store.device_peak_bytes  # type: ignore[union-attr]
    (began, *first), (ended, *last) = marks[0], marks[-1]
    tokens = (last[2] - first[2]) / rows
    return {
        "tokens": args.tokens, "rows": rows, "share": share, "side": how,
        "ms": 1e3 * (ended - began) / tokens, "CPU ms": 1e3 * (last[0] - first[0]) / tokens,
        "in, MiB": (last[1] - first[1]) / tokens / MIB, "device peak, MiB": peak / MIB,
    }  # fmt: skip


def sides(args: argparse.Namespace) -> Iterator[Row]:
    """Ways take turns; of those that have no room, why."""
    for rows in args.rows:
        for share in args.share:
            best: dict[str, Row] = {}
            for _ in range(args.turns):
                for how in args.sides:
                    try:
                        row = side(how, rows, share, args)
                    except BeamwrightError as error:
                        row = {"side": how, "rows": rows, "share": share, "ms": f"{error:.60}"}
                        best[how] = row
                        continue
                    assert row is not None
                    old = best.setdefault(how, row)
                    for name in ("ms", "CPU ms"):
                        old[name] = min(old[name], row[name])
            yield from best.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--what", choices=["bytes", "sides"], default="bytes")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    parser.add_argument("--sides", nargs="+", default=["layerwise", "locality", "exact", "pages"])
    parser.add_argument("--select", type=int, default=256)
    parser.add_argument(
        "--link", type=int, default=512 * MIB, help="emulated, bytes/s; 0: this machine's"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    rows = [*(searches() if args.what == "bytes" else sides(args))]
    shown = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in r.items()}
        for r in rows
    ]
    say(table(shown, list(dict.fromkeys(name for row in shown for name in row))))
    finish("sparse_brought", {"options": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
