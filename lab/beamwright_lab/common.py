"""What all benchmarks share: the machine, its ceiling, interleaved rounds, JSON and tables.

A benchmark measures both sides in one process tree, in interleaved rounds, reports minimum and
median, and ends with one JSON line on standard output.
Run it from the repository root: `python -m beamwright_lab.FOLDER.NAME`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import beamwright_lab.baselines  # noqa: F401 (declared where the lab is on the path, not installed)
from beamwright.cores import num_cores
from beamwright.models.shape import ModelShape

RESULTS = Path(__file__).parent / "results"
_LOOP = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


def say(*parts: object) -> None:
    """Progress, on standard error."""
    print(*parts, file=sys.stderr, flush=True)


# --- the machine -----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import transformers

    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_1min": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def _command() -> str:
    """What was typed, from the repository's root."""
    module = sys.modules["__main__"].__spec__
    name = f"-m {module.name}" if module is not None else Path(sys.argv[0]).name
    return shlex.join(["python", *name.split(), *sys.argv[1:]])


def commit() -> str | None:
    """The checkout's, with a plus where files differ from it; None where there is no git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Ceilings:
    """Best rates seen in torch: GEMM by element type (FLOP/s), and reading memory (bytes/s).

    A peer with better kernels may pass them. Measured again between rounds: they only ever rise.
    """

    def __init__(self, dtypes: Sequence[str] = ("float32", "bfloat16", "int8")) -> None:
        self.gemm = dict.fromkeys(dtypes, 0.0)
        self.read = 0.0
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        for dtype, size in product(self.gemm, (1024, 2048)):
            left, right = (30 * torch.randn(2, size, size)).to(getattr(torch, dtype))
            multiply = torch._int_mm if dtype == "int8" else torch.matmul
            rate = 2 * size**3 / least_s(partial(multiply, left, right))
            self.gemm[dtype] = max(self.gemm[dtype], rate)
        # A sum reads faster than torch's matrix-vector product, which peers pass by far.
        values = torch.ones(1 << 28, dtype=torch.bfloat16)
        self.read = max(self.read, values.nbytes / least_s(values.sum))

    def facts(self) -> dict[str, float]:
        found = {f"gemm_{dtype}_gflops": rate / 1e9 for dtype, rate in self.gemm.items()}
        return {name: round(v, 1) for name, v in {**found, "read_gb_s": self.read / 1e9}.items()}


def least_s(run: Callable[[], object], repeats: int = 8) -> float:
    """Least seconds of a few runs."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters that every token is multiplied with (an untied input embedding is looked up)."""
    lookup = 0 if shape.tied else shape.vocab * shape.hidden
    if shape.learned_positions is not None:
        lookup += (shape.full_context + shape.learned_positions) * shape.hidden
    return shape.num_parameters - lookup


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
            counted_s = sides[name]()
            took_s = time.perf_counter() - start
            seconds[name].append(took_s if counted_s is None else counted_s)
            say(f"  round {number + 1}/{num_rounds}  {name}: {seconds[name][-1]:.3f} s")
        if between is not None:
            between()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run so many processes that compute without end beside a measurement, at most ten minutes."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", _LOOP]))
            stack.callback(loop.kill)
        yield


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
    """The full result, indented, under `lab/beamwright_lab/results/`."""
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def finish(name: str, result: Mapping[str, Any]) -> None:
    """Write the result, with what it came from, and print it as the one last JSON line.

    Its `quoted`, if it has one, is the part that pages quote (`beamwright_lab.publish`).
    """
    origin = {"command": _command(), "commit": commit(), "machine": machine()}
    full = {"benchmark": name, **result, **origin}
    say(f"written: {write_json(name, full)}")
    print(json.dumps(full), flush=True)
