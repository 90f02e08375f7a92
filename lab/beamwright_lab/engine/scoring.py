"""Milliseconds of a verifier's prefills, from several checkouts in turns, and their share of GEMM.

Rounds of real searches are recorded once - paths, lengths, tokens of every step that was scored -
and replayed by every checkout's `TreeModel` in a process of its own, on the bundled verifier or on
random weights of another shape. KV and hidden states have to be the same bits everywhere.

    python -m beamwright_lab.engine.scoring CHECKOUT CHECKOUT --n 16 64 --rounds 7
    python -m beamwright_lab.engine.scoring --model random:qwen2.5-0.5b --stretch 2 --problems 1
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright.evaluate import load_problems
from beamwright.models import ModelShape
from beamwright.models.decoder import Linear
from beamwright.models.find import read_shape, resolve_folder
from beamwright.models.named_shapes import shape_from_text
from beamwright.models.onednn import prepack
from beamwright_lab.common import Ceiling, Timing, finish, interleave, say, table
from beamwright_lab.engine.worker import Worker

_ROOT = Path(__file__).resolve().parents[3]
_COLUMNS = (
    "dtype", "n", "checkout", "steps", "tokens", "ms a step", "median", "us a token", "GEMM share",
    "operators a layer", "others a pass", "same bits",
)  # fmt: skip
_WORKER = """
import hashlib, json, sys, time
import torch
from beamwright import Solver
from beamwright.kv import PathPart
from beamwright.models import PrefillRequest
from beamwright.models.decoder import Decoder
options, file = json.loads(sys.argv[1]), sys.argv[2]
torch.set_num_threads(options.pop("threads"))
bundled = options["model"] == "bundled"
more = {"verifier": "bundled"} if bundled else {"verifier": "none", "search": "best-of-n"}
solver = Solver(kv_memory="2GiB", **more, **options)
model = solver._tree_models[-1]
searches = json.load(open(file))

@torch.inference_mode()
def replay(digest=None):
    took_s = 0.0
    for passes in searches:
        segments = {}
        def segment(number):
            if number not in segments:
                segments[number] = model.store.create()
            return segments[number]
        for requests in passes:
            made = []
            for path, own, ids, start in requests:
                parts = tuple(PathPart(segment(number), seen) for number, seen in path)
                made.append(PrefillRequest(parts, segment(own), ids, start))
                if not bundled:  # scored at the step's end, which is all that may be computed
                    made[-1].read = [len(ids) - 1]
            begin = time.perf_counter()
            hidden = model.prefill(made)
            took_s += time.perf_counter() - begin
            for each in hidden if digest else ():
                digest.update(each[-1].float().numpy().tobytes())
        for each in segments.values():
            if digest:
                digest.update(model.store.gather(each, each.length).float().numpy().tobytes())
            model.store.free(each)
    return took_s

def operators():
    hidden = Decoder.hidden
    def marked(self, *args, **kwargs):
        with torch.profiler.record_function("layers"):
            return hidden(self, *args, **kwargs)
    Decoder.hidden = marked
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        replay()
    Decoder.hidden = hidden
    found = [each for each in profile.events() if each.name.startswith(("aten::", "mkldnn::"))]
    outer = [each.cpu_parent for each in found]
    inside = sum(each is not None and each.name == "layers" for each in outer)
    return [inside, sum(each is None for each in outer)]

def digest():
    found = hashlib.sha256()
    replay(found)
    return found.hexdigest()

asked = {"replay": replay, "operators": operators, "digest": digest}
for line in sys.stdin:
    print(json.dumps(asked[line.strip()]()), flush=True)
"""


# A search's passes; a pass's requests: (segment, visible tokens) of the path, segment, ids, start.
Request = tuple[list[tuple[int, int]], int, list[int], int]
Searches = list[list[list[Request]]]


def record(n: int, width: int, num_problems: int) -> Searches:
    """What the bundled verifier prefills in searches of the first problems of bundled:test."""
    solver = Solver(model="bundled", verifier="bundled", n=n, width=width)
    verifier, searches, numbers = solver._tree_models[1], Searches(), dict[Any, int]()
    prefill = verifier.prefill

    def number(segment: Any) -> int:
        return numbers.setdefault(segment, len(numbers))

    def recorded(requests: Any, *args: Any, **kwargs: Any) -> Any:
        if requests:
            searches[-1].append(
                [
                    (
                        [(number(part.segment), part.visible) for part in request.path],
                        number(request.segment),
                        list(request.token_ids),
                        request.start,
                    )
                    for request in requests
                ]
            )
        return prefill(requests, *args, **kwargs)

    verifier.prefill = recorded  # type: ignore[method-assign]
    for problem in load_problems("bundled:test", limit=num_problems).problems:
        searches.append([])
        solver.solve(problem.problem, problem_id=problem.unique_id)
    return searches


def stretched(searches: Searches, times: int) -> Searches:
    """The same searches with every token so often."""
    return [
        [
            [
                (
                    [(segment, seen * times) for segment, seen in path],
                    own,
                    [token for token in ids for _ in range(times)],
                    start * times,
                )
                for path, own, ids, start in requests
            ]
            for requests in passes
        ]
        for passes in searches
    ]


@dataclass(frozen=True)
class Work:
    """What the prefills of some searches come to. visible: tokens seen, over all tokens."""

    passes: int
    steps: int
    tokens: int
    visible: int

    @classmethod
    def of(cls, searches: Searches) -> Work:
        passes = [requests for search in searches for requests in search]
        steps = [(len(ids), start) for requests in passes for _, _, ids, start in requests]
        return cls(
            len(passes),
            len(steps),
            sum(length for length, _ in steps),
            sum(length * start + length * (length + 1) // 2 for length, start in steps),
        )

    def flops(self, shape: ModelShape) -> float:
        """Products and attention; no head, and no embedding."""
        tables = shape.vocab * (shape.embed_dim or shape.hidden) * (1 if shape.tied else 2)
        attention = 4.0 * shape.layers * shape.heads * shape.head_dim * self.visible
        return 2.0 * (shape.num_parameters - tables) * self.tokens + attention


def linear_products(rows: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], object]]:
    """The product of rows and a weight as the decoder has it: prepacked, and plain."""
    linear = Linear(weight)
    return [partial(prepack(linear), rows), partial(linear, rows)]


class Prefills(Worker):
    """A checkout's model in a process of its own."""

    def __init__(self, checkout: Path, options: dict[str, Any], file: Path) -> None:
        words = ["-c", _WORKER, json.dumps(options), str(file)]
        environment = {"OMP_NUM_THREADS": str(options["threads"])}
        super().__init__(words, checkout, [checkout / "src"], environment)
        self.digest: str = self.ask("digest")
        self.operators: list[int] = self.ask("operators")

    def replay(self) -> float:
        """Seconds of all prefills."""
        return float(self.ask("replay"))


def measure(
    checkouts: list[Path], options: dict[str, Any], searches: Searches, rounds: int
) -> tuple[dict[str, tuple[Timing, Prefills]], Ceiling]:
    """Seconds of every checkout's prefills, and the ceiling beside them."""
    torch.set_num_threads(options["threads"])
    ceiling = Ceiling(options["dtype"], (512, 1024), linear_products)
    workers = dict[str, Prefills]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "searches.json"
        file.write_text(json.dumps(searches), encoding="utf-8")
        try:
            for each in checkouts:
                workers[str(each)] = Prefills(each, options, file)
            sides = {name: worker.replay for name, worker in workers.items()}
            timings = interleave(sides, rounds, ceiling.refresh)
        finally:
            for worker in workers.values():
                worker.close()
    return {name: (timings[name], worker) for name, worker in workers.items()}, ceiling


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_ROOT], help="default: this")
    parser.add_argument("--model", default="bundled", help="bundled, or random:SHAPE")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--problems", type=int, default=3)
    parser.add_argument("--stretch", type=int, default=1, help="every token so often")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    checkouts = [each.resolve() for each in args.checkouts]
    rows = []
    for n in args.n:
        searches = stretched(record(n, args.width, args.problems), args.stretch)
        work = Work.of(searches)
        for dtype in args.dtypes:
            options = {"model": args.model, "dtype": dtype, "threads": args.threads}
            found, ceiling = measure(checkouts, options, searches, args.rounds)
            shape = shape_of(args.model)
            first = found[str(checkouts[0])][1].digest
            for name, (timing, worker) in found.items():
                inside, others = worker.operators
                rows.append(
                    {
                        "dtype": dtype,
                        "n": n,
                        "checkout": name,
                        "passes": work.passes,
                        "steps": work.steps,
                        "tokens": work.tokens,
                        "ms a step": f"{1e3 * timing.min_s / work.steps:.3f}",
                        "median": f"{1e3 * timing.median_s / work.steps:.3f}",
                        "us a token": f"{1e6 * timing.min_s / work.tokens:.1f}",
                        "GEMM share": f"{work.flops(shape) / timing.min_s / ceiling.flops:.3f}",
                        "GEMM GFLOP/s": round(ceiling.flops / 1e9),
                        "operators a layer": round(inside / work.passes / shape.layers, 1),
                        "others a pass": round(others / work.passes),
                        "same bits": worker.digest == first,
                    }
                )
            say(table(rows, _COLUMNS))
    print(table(rows, _COLUMNS))
    finish("scoring", {"settings": {**vars(args), "checkouts": len(checkouts)}, "rows": rows})


def shape_of(model: str) -> ModelShape:
    """The shape of the bundled verifier, or of random weights."""
    if model != "bundled":
        return shape_from_text(model.partition(":")[2])
    return read_shape(resolve_folder("bundled", "verifier"), None)


if __name__ == "__main__":
    main()
