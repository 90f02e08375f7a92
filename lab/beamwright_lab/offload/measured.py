"""Measure decoding with about half of the weights off the device, on this CPU.

    python -m beamwright_lab.offload.measured [--models smollm2 qwen2.5-0.5b] [--n 1 16 64]
        [--links 500MB/s 4GB/s] [--rounds 5] [--tokens 16] [--llama-python FILE]

Sides take turns in one run: all weights resident; layers in host memory behind an emulated link of
each bandwidth; layers in a temporary file. All trees are equal, or the run fails. The floor of a
side is the longer of two times: to move the bytes that it moved at the link's bandwidth, and to run
with all weights resident. Behind a file, the bandwidth is that of reading such a file here, mostly
from the page cache. For a GGUF file, llama.cpp (all weights in memory, mapped) decodes as many
paths for reference. Peak memory is of processes of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from beamwright import Solver
from beamwright.cores import num_cores
from beamwright.models.hf_config import find_shape
from beamwright.models.load import resolve_precision
from beamwright.sections import ModelSettings
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.solution import Solution
from beamwright.units import GIB, parse_size
from beamwright_lab.common import RESULTS, Timing, finish, interleave, least_s, say, table
from beamwright_lab.models.published_files import FILES
from beamwright_lab.peers.adapters.worker import LLAMA_PYTHON, PEERS_PYTHON, Worker
from beamwright_lab.peers.paths import find_missing_peers

# Models with their values of --model and --weights.
MODELS: dict[str, tuple[str, Literal["auto", "int8"]]] = {
    "smollm2": (str(FILES["smollm2"].path), "auto"),
    "qwen2.5-0.5b": ("random:qwen2.5-0.5b", "int8"),
    "tiny": (
        "random:qwen2,layers=8,hidden=64,heads=4,kv_heads=2,intermediate=256,vocab=256,context=512",
        "int8",
    ),
}
_DTYPE: Final = "bfloat16"
_TEMPERATURE, _KV_BYTES = 0.8, 512 * 2**20
_SHARE = 0.5  # of all weights to move home, as far as layers go
RESIDENT, LLAMA = "resident", "llama.cpp, all in memory"


@dataclass(frozen=True)
class Limit:
    """The `--memory` with which `num_layers` layers do not fit."""

    num_layers: int
    memory: int

    @classmethod
    def of(cls, sizes: ModelBytes, share: float = _SHARE) -> Limit:
        """Return the limit with which about `share` of the weights is off the device."""
        one = sizes.with_offloaded(1).offloaded
        assert one is not None
        wanted = round(share * sizes.all_weights / one.home_bytes)
        count = max(3, min(sizes.shape.layers, wanted))  # fewer than three save no memory
        return cls(count, sizes.with_offloaded(count).weights + _KV_BYTES)


def sizes_of(name: str) -> ModelBytes:
    """Return the sizes of a model of `MODELS`, without reading its weights."""
    model, weights = MODELS[name]
    settings = ModelSettings(model=model, weights=weights, dtype=_DTYPE)
    shape = find_shape(settings)
    dtype, storage = resolve_precision(settings, shape, "generator")
    return ModelBytes(shape, dtype.itemsize, storage)


def sides_of(limit: Limit, links: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each side beside those that all sides have."""
    less = {"memory": limit.memory, "weights_home": "host"}
    return {
        RESIDENT: {},
        **{f"host, {link}": {**less, "link_bandwidth": link} for link in links},
        "disk": {**less, "weights_home": "disk"},
    }


def open_solver(name: str, given: Namespace, n: int, options: Mapping[str, Any]) -> Solver:
    """Load a model that decodes n paths of equal length."""
    model, weights = MODELS[name]
    return Solver(
        model=model,
        weights=weights,
        dtype=_DTYPE,
        verifier="none",
        search="best-of-n",
        choose="majority",
        n=n,
        step_tokens=given.tokens,
        max_tokens=given.tokens,
        ignore_eos=True,
        temperature=_TEMPERATURE,
        drafts="off",
        kv_memory=_KV_BYTES,
        **options,
    )


def read_rate(num_bytes: int) -> float:
    """Return the bytes/s at which a temporary file of this size is read again."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(num_bytes))
        file.flush()
        buffer = bytearray(num_bytes)

        def read() -> None:
            at = 0
            while at < num_bytes:
                at += os.preadv(file.fileno(), [memoryview(buffer)[at:]], at)

        return num_bytes / least_s(read)


def floor_s(moved_bytes: int, bandwidth: float, resident_s: float) -> tuple[float, str]:
    """Return the floor of a run in seconds, and the bound that it is: "link" or "compute"."""
    link_s = moved_bytes / bandwidth
    return (link_s, "link") if link_s > resident_s else (resident_s, "compute")


def check_equal(solutions: Mapping[str, Solution], limit: Limit) -> None:
    """Check that all trees are equal, and that as many layers were off the device as planned.

    Raises:
        RuntimeError: if not.
    """
    hashes = {side: each.tree_hash for side, each in solutions.items()}
    if len(set(hashes.values())) != 1:
        raise RuntimeError(f"trees differ: {hashes}")
    for side, each in solutions.items():
        moved = {role: stats.layers for role, stats in each.weights.items()}
        if moved != ({} if side == RESIDENT else {"generator": limit.num_layers}):
            raise RuntimeError(f"{side}: layers off the device are {moved}")


def measure(name: str, n: int, given: Namespace, *, has_llama: bool) -> list[dict[str, Any]]:
    """Measure all sides with one model and n; return a row per side."""
    limit = Limit.of(sizes_of(name))
    solutions: dict[str, Solution] = {}
    prompt: list[int] = []
    with ExitStack() as stack:
        run: dict[str, Callable[[], float | None]] = {}
        for side, options in sides_of(limit, given.links).items():
            solver = stack.enter_context(open_solver(name, given, n, options))

            def once(side: str = side, solver: Solver = solver) -> None:
                solutions[side] = solver.synthetic(given.prompt_tokens)

            once()  # untimed: the first run tests kernels and fills the buffers
            run[side] = once
        check_equal(solutions, limit)
        prompt += solutions[RESIDENT].tree.root.token_ids
        if has_llama:
            worker = stack.enter_context(_llama(name, n, given))
            asked = {"prompt": prompt, "n": n, "num_new": given.tokens}
            run[LLAMA] = partial(_seconds, worker, asked)
            run[LLAMA]()
        timings = interleave(run, given.rounds)
        check_equal(solutions, limit)
    bandwidths = {f"host, {link}": _rate(link) for link in given.links}
    moved = solutions["disk"].weights["generator"]
    bandwidths["disk"] = read_rate(moved.home_bytes)
    return rows_of(name, n, given.tokens, timings, solutions, bandwidths)


def rows_of(
    name: str,
    n: int,
    tokens: int,
    timings: Mapping[str, Timing],
    solutions: Mapping[str, Solution],
    bandwidths: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return a row per side. The floor counts with minima, as does its share."""
    rows = []
    for side, timing in timings.items():
        row = {
            "model": name,
            "n": n,
            "side": side,
            "rounds_s": [round(seconds, 4) for seconds in timing.rounds_s],
            "min_s": timing.min_s,
            "median_s": timing.median_s,
            "tokens_s": n * tokens / timing.median_s,
        }
        if side in bandwidths:
            stats = solutions[side].weights["generator"]
            least, bound = floor_s(stats.moved_bytes, bandwidths[side], timings[RESIDENT].min_s)
            row |= {
                "layers": stats.layers,
                "home_bytes": stats.home_bytes,
                "device_bytes": stats.device_bytes,
                "moved_bytes": stats.moved_bytes,
                "moved_per_token": stats.moved_bytes / (n * tokens),
                "bandwidth": bandwidths[side],
                "bound": bound,
                "floor_share": least / timing.min_s,
            }
        rows.append(row)
    return rows


def _rate(link: str) -> float:
    return float(parse_size(link.removesuffix("/s")))


def _llama(name: str, n: int, given: Namespace) -> Worker:
    options = {"file": MODELS[name][0], "length": given.prompt_tokens + given.tokens}
    options |= {"n": n, "threads": num_cores()}
    log = RESULTS / "logs" / "llama.log"
    return Worker("llama_worker", options, log, python=given.llama_python)


def _seconds(worker: Worker, asked: Mapping[str, Any]) -> float:
    return float(worker.ask(op="paths", temperature=_TEMPERATURE, **asked)["seconds"])


def peaks(name: str, given: Namespace) -> list[dict[str, Any]]:
    """Return the peak memory of a process with all weights resident, and with layers on disk.

    Loading may need more than a search: random weights are drawn before they are rounded.
    """
    limit = Limit.of(sizes_of(name))
    model, weights = MODELS[name]
    rows = []
    for side, options in sides_of(limit, []).items():
        asked = {
            "folder": model, "weights": weights, "dtype": _DTYPE, "n": 1, "tokens": given.tokens,
            "prompt_tokens": given.prompt_tokens, "temperature": _TEMPERATURE,
            "threads": num_cores(), "more": {"kv_memory": _KV_BYTES, **options},
        }  # fmt: skip
        log = RESULTS / "logs" / "own.log"
        with Worker("own_worker", asked, log, python=Path(sys.executable)) as worker:
            loading = worker.ask(op="paths")["peak_rss"]
            worker.ask(op="reset_peak")
            running = worker.ask(op="paths")["peak_rss"]
        rows.append({"model": name, "side": side, "peak_bytes": loading, "running_bytes": running})
    return rows


# --- tables -----------------------------------------------------------------------------------


def speed_table(found: Mapping[str, Any]) -> str:
    """Return a row per model, n and side: speed, bytes moved per token, share of the floor."""
    rows = []
    for row in found["rows"]:
        shown = {
            "model": row["model"],
            "n": str(row["n"]),
            "side": row["side"],
            "tokens/s": f"{row['tokens_s']:.1f}",
            "s, min (median)": f"{row['min_s']:.3f} ({row['median_s']:.3f})",
        }
        moves = "moved_bytes" in row
        shown["layers off the device"] = str(row["layers"]) if moves else "0"
        per_token = f"{row['moved_per_token'] / 1e6:.2f}" if moves else "0"
        shown["MB moved per token"] = "" if row["side"] == LLAMA else per_token
        share = f"{row['floor_share']:.2f} ({row['bound']})" if moves else ""
        rows.append({**shown, "share of the floor": share})
    return table(rows, list(rows[0]))


def peak_table(found: Mapping[str, Any]) -> str:
    """Return a row per model and side: peak memory of its process in GiB."""
    rows = [
        {
            "model": row["model"],
            "side": row["side"],
            "peak memory, GiB": f"{row['peak_bytes'] / GIB:.2f}",
            "of a search after loading": f"{row['running_bytes'] / GIB:.2f}",
        }
        for row in found["peaks"]
    ]
    return table(rows, list(rows[0]))


def parse(words: Sequence[str] | None = None) -> Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    usual = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", default=usual, choices=[*MODELS])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--links", nargs="+", default=["500MB/s", "4GB/s"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--no-peaks", dest="peaks", action="store_false")
    parser.add_argument("--llama-python", type=Path, default=LLAMA_PYTHON, metavar="FILE")
    return parser.parse_args(words)


def main() -> None:
    given = parse()
    asked = Namespace(llama_python=given.llama_python, vllm_python=PEERS_PYTHON)
    missing = find_missing_peers(asked).get("llama.cpp")
    if missing is not None:
        say(f"llama.cpp is left out: {missing}")
    rows, of_processes = list[dict[str, Any]](), list[dict[str, Any]]()
    for name in given.models:
        is_file = Path(MODELS[name][0]).is_file()
        for n in given.n:
            say(f"{name}, n = {n}")
            rows += measure(name, n, given, has_llama=is_file and missing is None)
        of_processes += peaks(name, given) if given.peaks else []
    settings = {**vars(given), "llama_python": str(given.llama_python)}
    quoted = {"settings": settings, "rows": rows, "peaks": of_processes}
    print(speed_table(quoted), end="\n\n")
    if of_processes:
        print(peak_table(quoted), end="\n\n")
    finish("offload_measured", {"quoted": quoted})


if __name__ == "__main__":
    main()
