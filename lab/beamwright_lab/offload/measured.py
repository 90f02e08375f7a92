"""Measure decoding with about half of the layers off the device, on this CPU.

    python -m beamwright_lab.offload.measured [--n 1 16 64] [--rounds 5]

Sides take turns in one run: all weights resident; layers in host memory behind an emulated link of
each bandwidth; layers in a temporary file, mostly in the page cache. All trees are equal, or the
run fails. The floor is the longer of two times: to move the bytes at the link's bandwidth, and to
run with all weights resident.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from beamwright import Solver
from beamwright.models.hf_config import find_shape
from beamwright.models.load import resolve_precision
from beamwright.sections import ModelSettings
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.solution import Solution
from beamwright_lab.common import Timing, finish, interleave, say
from beamwright_lab.models.published_files import FILES
from beamwright_lab.offload.predicted import shown

MODELS: Mapping[str, tuple[str, Any]] = {
    "smollm2": (str(FILES["smollm2"].path), "auto"),
    "random 0.5b int8": ("random:qwen2.5-0.5b", "int8"),
    "tiny": (
        "random:qwen2,layers=8,hidden=64,heads=4,kv_heads=2,intermediate=256,vocab=256,context=512",
        "int8",
    ),
}
LINKS = {"500MB/s": 5e8, "4GB/s": 4e9}
_KV_BYTES, _RESIDENT = 256 * 2**20, "resident"
_TOKENS = 32
_PATHS: dict[str, Any] = {
    "verifier": "none", "search": "best-of-n", "choose": "majority", "step_tokens": 16,
    "max_tokens": _TOKENS, "ignore_eos": True, "dtype": "bfloat16", "kv_memory": _KV_BYTES,
}  # fmt: skip


def limit_of(model: str, weights: Any) -> int:
    """Return a `--memory` with which half of the layers do not fit."""
    settings = ModelSettings(model=model, weights=weights, dtype="bfloat16")
    shape = find_shape(settings)
    dtype, storage = resolve_precision(settings, shape, "generator")
    sizes = ModelBytes(shape, dtype.itemsize, storage)
    return sizes.with_offloaded(max(3, shape.layers // 2)).weights + _KV_BYTES


def measure(name: str, n: int, num_rounds: int) -> list[dict[str, Any]]:
    """Measure all sides with one model and n; return a row per side.

    Raises:
        RuntimeError: if trees differ, or nothing was moved.
    """
    model, weights = MODELS[name]
    less = {"memory": limit_of(model, weights), "weights_home": "host"}
    sides: dict[str, dict[str, Any]] = {
        _RESIDENT: {},
        **{f"host, {link}": {**less, "link_bandwidth": link} for link in LINKS},
        "disk": {**less, "weights_home": "disk"},
    }
    last: dict[str, Solution] = {}
    with ExitStack() as stack:
        run = {}
        for side, options in sides.items():
            solver = stack.enter_context(
                Solver(model=model, weights=weights, n=n, **_PATHS, **options)
            )
            run[side] = partial(_search, solver, side, last)
            run[side]()  # untimed: the first run tests kernels
        timings = interleave(run, num_rounds)
    if len({each.tree_hash for each in last.values()}) != 1:
        raise RuntimeError("trees differ")
    if not all(each.weights for side, each in last.items() if side != _RESIDENT):
        raise RuntimeError("all layers were on the device")
    return [_row(name, n, side, timings, last[side]) for side in sides]


def _search(solver: Solver, side: str, last: dict[str, Solution]) -> None:
    last[side] = solver.synthetic(64)


def _row(
    name: str, n: int, side: str, timings: Mapping[str, Timing], solution: Solution
) -> dict[str, Any]:
    timing, num_tokens = timings[side], n * _TOKENS
    row = {
        "model": name, "n": n, "side": side, "s, min": timing.min_s, "s, median": timing.median_s,
        "tokens/s": num_tokens / timing.min_s,
    }  # fmt: skip
    if (moved := solution.weights.get("generator")) is not None:
        resident_s, link = timings[_RESIDENT].min_s, side.removeprefix("host, ")
        floor_s = max(resident_s, moved.moved_bytes / LINKS[link] if link in LINKS else 0.0)
        row |= {
            "layers off": moved.layers,
            "MB on the device": moved.device_bytes / 1e6,
            "MB a token": moved.moved_bytes / num_tokens / 1e6,
            "share of the floor": floor_s / timing.min_s,
            "bound": "compute" if floor_s == resident_s else "link",
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS][:2], choices=[*MODELS])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    given, rows = parser.parse_args(), list[dict[str, Any]]()
    for name in given.models:
        for n in given.n:
            say(f"{name}, n = {n}")
            rows += measure(name, n, given.rounds)
    found = {**vars(given), "rows": rows}
    print(shown(found))
    finish("offload_measured", found)


if __name__ == "__main__":
    main()
