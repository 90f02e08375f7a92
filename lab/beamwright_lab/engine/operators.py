"""Operator calls of a decode step, by layer and by purpose, from several checkouts in turns.

One process per checkout stays and decodes n paths behind one prompt when it is told to. Calls are
torch's operators as Python calls them, copies are `aten::copy_` wherever they happen, too, inside
other operators (from torch's profiler, whose seconds are not used). Milliseconds of a group are its
functions' own, from timers that count every instant once, and include the Python around the
operators; those of a step are of runs without timers: least and median of all steps in all rounds.

    python -m beamwright_lab.engine.operators CHECKOUT CHECKOUT --models bundled --n 8 64
    python -m beamwright_lab.engine.operators --models qwen2.5-0.5b --dtype bfloat16 --n 1 16 64
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright.models.decoder import Decoder
from beamwright_lab.common import finish, interleave, say, table
from beamwright_lab.engine.worker import Worker
from beamwright_lab.peers.models import model_folder

_ROOT = Path(__file__).resolve().parents[3]
_STEPS = (
    "model",
    "n",
    "checkout",
    "calls/layer",
    "calls/step",
    "copies/step",
    "least ms",
    "median ms",
)
_GROUPS = ("model", "n", "group", "checkout", "calls/step", "copies/step", "ms")

# (group, module, name inside the module); names that a checkout lacks fall to their callers.
_TIMED = (
    ("products", "models.decoder", "Linear.__call__"),
    ("products", "models.onednn", "PackedLinear.__call__"),
    ("products", "models.onednn", "PackedInt8Linear.__call__"),
    ("norms", "models.decoder", "Norm.__call__"),
    ("rotary, split", "models.decoder", "Decoder._before"),
    ("activation, residual", "models.decoder", "Decoder._after"),
    ("embedding, layers", "models.decoder", "Decoder.hidden"),
    ("shared segments", "attention.tree", "_Shared.attend"),
    ("tails", "attention.tree", "attend_few"),
    ("merge of parts", "attention.tree", "TreeDecode.attend"),
    ("merge of parts", "attention.tree", "_Merge.merge"),
    ("KV append", "kv.row_tails", "RowTails.write"),
    ("sampling", "decode.sampling", "Sampler.sample"),
    ("stops, buffers", "decode.tensor_rows", "TensorRows._step"),
)
_OUTSIDE = "outside the step"


class _Groups:
    """Exclusive seconds by group, and ranges of the same names for torch's profiler."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stack: list[float] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self, *, ranges: bool) -> None:
        for group, module, path in _TIMED:
            try:
                owner = importlib.import_module(f"beamwright.{module}")
                *parents, name = path.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                original = vars(owner)[name]
            except (ImportError, AttributeError, KeyError):
                continue
            self._originals.append((owner, name, original))
            wrap = self._ranged if ranges else self._timed
            setattr(owner, name, wrap(group, original))

    def remove(self) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals = []

    def _timed(self, group: str, call: Callable[..., Any]) -> Callable[..., Any]:
        stack = self._stack

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            stack.append(0.0)
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[group] += took - stack.pop()
                if stack:
                    stack[-1] += took

        return timed

    @staticmethod
    def _ranged(group: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"group:{group}"):
                return call(*args, **kwargs)

        return ranged


def _group_of(event: Any) -> tuple[str, bool]:
    """The group that an operator ran in, and whether Python called it."""
    outer, called = event.cpu_parent, True
    while outer is not None and not outer.name.startswith("group:"):
        called, outer = False, outer.cpu_parent
    return (outer.name.removeprefix("group:") if outer is not None else _OUTSIDE), called


class _Decoding:
    """What a worker does: searches of n paths whose steps are timed."""

    def __init__(self, options: dict[str, Any], prompt_tokens: int) -> None:
        self._solver = Solver(verifier="logprob", search="best-of-n", ignore_eos=True, **options)
        self._prompt_tokens = prompt_tokens
        self._starts: list[float] = []
        hidden = Decoder.hidden

        @functools.wraps(hidden)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._starts.append(time.perf_counter())
            return hidden(*args, **kwargs)

        Decoder.hidden = noted  # type: ignore[method-assign]
        self.search()

    def search(self) -> list[float]:
        """Seconds of every decode step; the prompt's prefill is not among them."""
        self._starts.clear()
        self._solver.synthetic(self._prompt_tokens)
        ends = [*self._starts[2:], time.perf_counter()]
        return [end - start for start, end in zip(self._starts[1:], ends, strict=True)][:-1]

    def groups(self) -> dict[str, float]:
        """Exclusive milliseconds of a step by group."""
        timers = _Groups()
        timers.install(ranges=False)
        num_steps = len(self.search()) + 1
        timers.remove()
        return {group: 1e3 * took / num_steps for group, took in timers.seconds.items()}

    def calls(self) -> dict[str, Any]:
        """Calls and copies of a step by group, and calls of a layer."""
        ranges, layers = _Groups(), self._solver.generator.decoder.shape.layers
        ranges.install(ranges=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            num_steps = len(self.search()) + 1
        ranges.remove()
        calls: Counter[str] = Counter()
        copies: Counter[str] = Counter()
        for event in profiler.events():
            if event.name.startswith("group:") or "::" not in event.name:
                continue
            group, called = _group_of(event)
            calls[group] += called
            copies[group] += event.name == "aten::copy_"
        return {"calls": dict(calls), "copies": dict(copies), "steps": num_steps, "layers": layers}


def worker(options: dict[str, Any], prompt_tokens: int) -> None:
    """Obeys lines on standard input, answers with a line of JSON each."""
    decoding = _Decoding(options, prompt_tokens)
    answers = {"search": decoding.search, "groups": decoding.groups, "calls": decoding.calls}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


class Engine(Worker):
    """A checkout's engine in a process of its own."""

    def __init__(self, checkout: Path, options: dict[str, Any], prompt_tokens: int) -> None:
        words = ["-m", "beamwright_lab.engine.operators", "--worker"]
        words += [json.dumps(options), str(prompt_tokens)]
        super().__init__(words, _ROOT, [checkout / "src", _ROOT], {})
        self.steps_s: list[float] = []

    def search(self) -> float:
        """Seconds of all decode steps of one search."""
        found = self.ask("search")
        self.steps_s += found
        return float(sum(found))


def compare(
    args: argparse.Namespace, model: str, n: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of both tables for one model and n."""
    spec = model if model.startswith("random:") else str(model_folder(model))
    options = {
        "model": spec,
        "n": n,
        "dtype": args.dtype,
        "weights": args.weights,
        "step_tokens": args.tokens,
        "max_tokens": args.tokens,
    }
    steps, groups = [], []
    with ExitStack() as stack:
        workers = {}
        for each in args.checkouts:
            workers[str(each)] = Engine(each.resolve(), options, args.prompt_tokens)
            stack.callback(workers[str(each)].close)
        for each in workers.values():
            each.search()
            each.steps_s.clear()
        interleave({name: each.search for name, each in workers.items()}, args.rounds)
        for name, each in workers.items():
            own_ms, counted = each.ask("groups"), each.ask("calls")
            common = {"model": model, "n": n, "checkout": name}
            steps.append({**common, **_step_row(each.steps_s, counted)})
            for group in dict.fromkeys(group for group, *_ in _TIMED):
                numbers = {
                    f"{kind}/step": round(counted[kind].get(group, 0) / counted["steps"], 1)
                    for kind in ("calls", "copies")
                }
                groups.append(
                    {**common, "group": group, **numbers, "ms": round(own_ms.get(group, 0.0), 3)}
                )
    return steps, groups


_IN_LAYERS = (
    "products", "norms", "rotary, split", "activation, residual", "shared segments", "tails",
    "merge of parts", "KV append",
)  # fmt: skip


def _step_row(steps_s: list[float], counted: dict[str, Any]) -> dict[str, Any]:
    num_steps = counted["steps"]
    inside = {group: count for group, count in counted["calls"].items() if group != _OUTSIDE}
    layers = sum(inside.get(group, 0) for group in _IN_LAYERS) / num_steps / counted["layers"]
    copies = sum(count for group, count in counted["copies"].items() if group != _OUTSIDE)
    return {
        "calls/layer": round(layers, 1),
        "calls/step": round(sum(inside.values()) / num_steps),
        "copies/step": round(copies / num_steps),
        "least ms": round(1e3 * min(steps_s), 3),
        "median ms": round(1e3 * statistics.median(steps_s), 3),
    }


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_ROOT], help="default: this")
    parser.add_argument("--models", nargs="+", default=["bundled"])
    parser.add_argument("--n", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    steps: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for model in args.models:
        for n in args.n:
            say(f"{model}, n={n}")
            found = compare(args, model, n)
            steps += found[0]
            groups += found[1]
    print(table(groups, _GROUPS))
    print()
    print(table(steps, _STEPS))
    finish("operators", {"dtype": args.dtype, "steps": steps, "groups": groups})


if __name__ == "__main__":
    main()
