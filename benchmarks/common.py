"""What all benchmarks share: the machine, its ceiling, interleaved rounds, JSON and tables.

A benchmark measures both sides in one process tree, in interleaved rounds, reports minimum and
median, and ends with one JSON line on standard output.
Run it from the repository root: `python -m benchmarks.FOLDER.NAME`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from beamwright.hardware import measure_gemm_flops
from beamwright.models import ModelShape

RESULTS = Path(__file__).parent / "results"


def say(*parts: object) -> None:
    """Progress, on standard error."""
    print(*parts, file=sys.stderr, flush=True)


# --- the machine -----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import transformers

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_1min": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Ceiling:
    """Best float32 GEMM rate seen (FLOP/s). Measured again between rounds: it only ever rises."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.refresh()

    def refresh(self) -> None:
        self.flops = max(self.flops, measure_gemm_flops())

    def share(self, num_flops: float, seconds: float) -> float:
        return num_flops / seconds / self.flops


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters that every token is multiplied with (an untied input embedding is looked up)."""
    lookup = 0 if shape.tied else shape.vocab * (shape.embed_dim or shape.hidden)
    if shape.learned_positions is not None:
        lookup += (shape.full_context + shape.learned_positions) * shape.hidden
    return shape.num_parameters - lookup


def decode_flops(shape: ModelShape, num_tokens: int, num_visible: int) -> float:
    """FLOPs of `num_tokens` tokens that see `num_visible` tokens in sum."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * num_visible
    return 2.0 * matmul_parameters(shape) * num_tokens + attention


# --- rounds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds of the rounds of one side."""

    rounds_s: tuple[float, ...]

    @property
    def min_s(self) -> float:
        return min(self.rounds_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)


def interleave(
    sides: Mapping[str, Callable[[], float | None]],
    num_rounds: int,
    between: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Run every side once per round, in rotating order.

    A side returns the seconds that count, or None to be timed from outside. `between` is called
    after every round.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            own = sides[name]()
            took = time.perf_counter() - start
            seconds[name].append(took if own is None else own)
            say(f"  round {number + 1}/{num_rounds}  {name}: {seconds[name][-1]:.3f} s")
        if between is not None:
            between()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


# --- output ----------------------------------------------------------------------------------


def fingerprint(folder: Path) -> str:
    """Eight hex digits of a model folder's weights and settings: results belong to them."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.json"))
    for file in [*files, *sorted(folder.glob("*.yaml"))]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A markdown table; None is an empty cell."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ["" if row.get(c) is None else str(row[c]) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_json(name: str, result: Mapping[str, Any]) -> Path:
    """The full result, indented, under `benchmarks/results/`."""
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def finish(name: str, result: Mapping[str, Any]) -> None:
    """Write the result and print it as the one last JSON line."""
    full = {"benchmark": name, **result, "machine": machine()}
    say(f"written: {write_json(name, full)}")
    print(json.dumps(full), flush=True)
