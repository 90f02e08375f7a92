"""Measure whether sparse selection hides behind the forward pass (AsyncSpade, section 4.3).

The paper's two conditions: for a pack of layers, selecting on the cache rank, and copying the
selection, must each take less time than the pack's forward pass. Here one thread computes and a
second one is the cache rank, with all KV on the host (`sparse_home`). Both run on one CPU, so this
shows what is hidden, not a GPU's speed. A random model decodes behind random KV. Methods take
turns, and the fastest round of each is shown, in milliseconds per token. CPU times of both threads
(the rank's: selections and copies) do not include other load on the machine.

    python -m beamwright_lab.sparse.hiding
    python -m beamwright_lab.sparse.hiding --home device --methods off exact pages ahead-pages
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from beamwright import Solver
from beamwright.kv.segments import PathPart
from beamwright.models.session import DecodeSession
from beamwright_lab.common import finish, say, table

MODEL = (
    "random:llama,layers={layers},hidden=512,heads=8,kv_heads=2,intermediate=1408,vocab=512,"
    "context=70000"
)
METHODS = ("asyncspade", *(f"asyncspade,pack={size}" for size in (4, 6, 8, 12)))
Row = dict[str, Any]


class Decoding:
    """A decoding session of one sparse method, behind `tokens` tokens of random KV per row."""

    def __init__(self, method: str, tokens: int, args: argparse.Namespace) -> None:
        options: dict[str, Any] = {"sparse": method, "select": args.select, "sparse_from": 0}
        options |= {"sparse_home": args.home, "sparse_layers": args.full_layers}
        self.solver = Solver(
            model=MODEL.format(layers=args.layers), verifier="none", kv_memory="6GiB",
            host_memory="6GiB", **(options if method != "off" else {}),
        )  # fmt: skip
        model = self.solver.generator
        assert model is not None
        self.store = model.store
        self._session = DecodeSession(model.decoder, model.store, model.backend)
        layout, generator = model.store.pool.layout, torch.Generator().manual_seed(0)
        shape = (tokens, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
        paths = []
        for _ in range(args.rows):
            segment = model.store.create()
            model.store.append([segment], [torch.randn(shape, generator=generator)])
            paths.append((PathPart(segment, tokens),))
        self._session.arrange_rows([], paths, [model.store.create() for _ in paths])
        self._at, self._copied_s = tokens, 0.0
        self.store.fetch = self._timed(model.store.fetch)  # type: ignore[method-assign]

    def _timed(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `fetch`, which copies selected KV, so that its CPU time is counted."""

        def timed(slots: Any) -> Any:
            began = time.thread_time()
            found = fetch(slots)
            self._copied_s += time.thread_time() - began
            return found

        return timed

    @torch.inference_mode()
    def run(self, count: int) -> tuple[float, Row]:
        """Decode `count` tokens of every row; return the seconds and the columns of the table."""
        began, own, both = time.perf_counter(), time.thread_time(), time.process_time()
        self._copied_s = 0.0
        self._session.prepare(count)
        for _ in range(count):
            ids = torch.full((self._session.num_rows,), self._at % 512)
            self._session.compute(ids, torch.full_like(ids, self._at))
            self._session.advance()
            self._at += 1
        seconds, own = time.perf_counter() - began, time.thread_time() - own
        both = time.process_time() - both
        ms = {
            "ms": seconds, "forward CPU": own, "rank CPU": both - own, "copies CPU": self._copied_s
        }  # fmt: skip
        return seconds, {name: round(1e3 * value / count, 2) for name, value in ms.items()}


def rows_of(tokens: int, args: argparse.Namespace) -> list[Row]:
    """Measure all methods in alternating rounds; return a row per method."""
    made = {method: Decoding(method, tokens, args) for method in args.methods}
    found: dict[str, list[tuple[float, Row]]] = {method: [] for method in made}
    for each in made.values():
        each.run(2)
    for _ in range(args.rounds):
        for method, each in made.items():
            found[method].append(each.run(args.count))
    rows = []
    for method, runs in found.items():
        row = {"sparse": method, "tokens": tokens, "rows": args.rows}
        row |= min(runs, key=lambda run: run[0])[1]
        least = ("forward CPU", "rank CPU", "copies CPU")
        row |= {name: min(run[1][name] for run in runs) for name in least}
        rows.append(row)
        made[method].solver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--home", choices=["device", "host"], default="host", help="of KV")
    parser.add_argument("--rows", type=int, default=1, help="paths decoded together")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--full-layers", type=int, default=0, help="without selection")
    parser.add_argument("--select", type=int, default=256, help="tokens to select")
    parser.add_argument("--count", type=int, default=16, help="tokens per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the decoder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for tokens in args.tokens for row in rows_of(tokens, args)]
    say(table(rows, list(rows[0])))
    finish("sparse_hiding", {"options": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
