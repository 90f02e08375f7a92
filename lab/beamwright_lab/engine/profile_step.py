"""Where the time of decoding goes: exclusive seconds by class of operation.

Wraps functions of the decode path with timers that count every instant once, for the innermost
wrapped function. The timers cost something themselves: the run without them is printed beside.
A name that has moved in the source is listed under `missing`, and its time falls to its caller.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from beamwright import Solver
from beamwright.models.config import read_shape
from beamwright_lab.common import Ceiling, decode_flops, finish, matmul_parameters, say, table
from beamwright_lab.peers.models import model_folder

# (class, module, name inside the module).
_TIMED = (
    ("linear", "models.decoder", "Linear.__call__"),
    ("linear", "models.linear", "PackedLinear.__call__"),
    ("norm", "models.decoder", "Norm.__call__"),
    ("rotary", "models.decoder", "_rotate"),
    ("activation", "models.decoder", "Decoder._mlp"),
    ("qkv split", "models.decoder", "Decoder._before"),
    ("embedding, residual", "models.decoder", "Decoder.hidden"),
    ("embedding, residual", "models.decoder", "Decoder._after"),
    ("attention glue", "attention.tree", "TreeDecode.attend"),
    ("attention shared glue", "attention.tree", "_Shared.attend"),
    ("attention over shared segments", "attention.tree", "attend_part"),
    ("merge, gather of parts", "attention.tree", "_Merge.merge"),
    ("attention over tails", "attention.tree", "attend_few"),
    ("attention over copies", "attention.dense", "attend_few"),
    ("attention glue", "attention.dense", "DenseDecode.attend"),
    ("tail write", "kv.row_tails", "RowTails.write"),
    ("packing segments", "attention.tree", "SharedSegments.__init__"),
    ("packing segments", "attention.dense", "PathCopies.__init__"),
    ("store append, gather", "kv.store", "SegmentStore.append"),
    ("store append, gather", "kv.store", "SegmentStore.gather"),
    ("sampling noise", "decode.sampling", "gumbel_noise"),
    ("sampling", "decode.sampling", "Sampler.sample"),
    ("stop detection", "decode.stops", "StopWords.observe"),
    ("tokens to buffers", "decode.tensor_rows", "StepBuffers.append"),
    ("tokens to rows", "decode.tensor_rows", "TensorRows._take"),
    ("rows join, compaction", "decode.tensor_rows", "TensorRows.admit"),
    ("session", "models.session", "DecodeSession.compute"),
    ("session", "models.session", "DecodeSession.prepare"),
    ("prompt prefill", "models.tree_model", "TreeModel.prefill"),
    ("iteration", "decode.tensor_rows", "TensorRows.run"),
    ("text and results", "decode.running", "RunningBatch._settle"),
    ("running batch, other", "decode.running", "RunningBatch.iterate"),
)


class Timers:
    """Exclusive time per class: a stack of the wrapped functions that are running."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.missing: list[str] = []
        self._stack: list[list[float]] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        for label, module, path in _TIMED:
            try:
                owner = importlib.import_module(f"beamwright.{module}")
                *parents, name = path.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                original = getattr(owner, name)
            except (ImportError, AttributeError):
                self.missing.append(f"{module}.{path}")
                continue
            self._originals.append((owner, name, original))
            setattr(owner, name, self._wrapped(label, original))

    def remove(self) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals = []

    def _wrapped(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        stack, seconds, calls, clock = self._stack, self.seconds, self.calls, self._clock

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner = [0.0]
            stack.append(inner)
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                took = clock() - start
                stack.pop()
                if stack:
                    stack[-1][0] += took
                seconds[label] += took - inner[0]
                calls[label] += 1

        return timed


def profile(args: argparse.Namespace) -> dict[str, Any]:
    spec = args.model if args.model.startswith("random:") else str(model_folder(args.model))
    common = {"model": spec, "verifier": "logprob", "search": "best-of-n", "n": args.n}
    solver = Solver(
        **common,
        step_tokens=args.step_tokens or args.tokens,
        max_tokens=args.tokens,
        ignore_eos=True,
        attention=args.attention,
    )
    clock = time.thread_time if args.cpu_time else time.perf_counter
    ceiling = Ceiling()
    plain_s = []
    solver.synthetic(args.prompt_tokens)
    for _ in range(args.rounds):
        start = clock()
        solver.synthetic(args.prompt_tokens)
        plain_s.append(clock() - start)
    timers = Timers(clock)
    timers.install()
    start = clock()
    try:
        for _ in range(args.rounds):
            solver.synthetic(args.prompt_tokens)
    finally:
        timers.remove()
    timed_s = (clock() - start) / args.rounds
    ceiling.refresh()
    shape = (
        solver.generator.decoder.shape
        if spec.startswith("random:")
        else read_shape(model_folder(args.model), None)
    )
    steps = args.tokens - 1
    seconds = {label: total / args.rounds for label, total in timers.seconds.items()}
    seconds["outside the decoder"] = timed_s - sum(seconds.values())
    rows = [
        {
            "class": label,
            "ms / token step": round(1e3 * took / steps, 3),
            "share": f"{100 * took / timed_s:.1f} %",
            "calls / token step": round(timers.calls[label] / args.rounds / steps, 1),
        }
        for label, took in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    visible = args.n * sum(range(args.prompt_tokens + 1, args.prompt_tokens + args.tokens))
    num_flops = decode_flops(shape, args.n * steps, visible)
    linear_flops = 2.0 * matmul_parameters(shape) * args.n * steps
    print(table(rows, list(rows[0])))
    best = min(plain_s)
    return {
        "model": args.model,
        "parameters": shape.num_parameters,
        "n": args.n,
        "attention": args.attention,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "clock": "CPU time of one thread" if args.cpu_time else "wall",
        "plain_s": round(best, 4),
        "plain_median_s": round(sorted(plain_s)[len(plain_s) // 2], 4),
        "timed_s": round(timed_s, 4),
        "ms_per_token_step": round(1e3 * best / steps, 3),
        "tokens_per_s": round(args.n * args.tokens / best),
        "gemm_gflops": round(ceiling.flops / 1e9, 1),
        "gemm_share": round(ceiling.share(num_flops, best), 4),
        "linear_gflops": round(linear_flops / seconds["linear"] / 1e9, 1),
        "limit_ms_per_token_step": round(1e3 * num_flops / ceiling.flops / steps, 3),
        "missing": timers.missing,
        "classes": rows,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-7m", help="bundled, llama-7m, random:..., folder")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, help="cut paths into steps of this length")
    parser.add_argument("--attention", default="tree", choices=["tree", "dense"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time: steady on a busy machine"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.cpu_time:
        args.threads = 1
    if args.threads:
        torch.set_num_threads(args.threads)
    result = profile(args)
    if result["missing"]:
        say(f"not found, counted with their callers: {', '.join(result['missing'])}")
    finish(f"profile_step-{args.model.partition(':')[0]}-{args.n}", result)


if __name__ == "__main__":
    main()
