"""Helpers of all benchmarks: facts about the machine, interleaved timing, JSON results, tables.

A benchmark runs all sides in interleaved rounds, reports minimum and median, and ends with one JSON
line on standard output. Run it from the repository root: `python -m beamwright_lab.FOLDER.NAME`.
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

import beamwright_lab.baselines  # noqa: F401 (declares the baselines if the lab is not installed)
from beamwright.cores import num_cores
from beamwright.models.shape import ModelShape

RESULTS = Path(__file__).parent / "results"
_LOOP = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


def say(*parts: object) -> None:
    """Print progress to standard error."""
    print(*parts, file=sys.stderr, flush=True)


# --- the machine -----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return the facts about this machine that results are stored with."""
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
    """Return the command line of this run."""
    module = sys.modules["__main__"].__spec__
    name = f"-m {module.name}" if module is not None else Path(sys.argv[0]).name
    return shlex.join(["python", *name.split(), *sys.argv[1:]])


def commit() -> str | None:
    """Return the commit, with a plus if files are modified; None without git."""
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
    """Highest measured rates of torch: GEMM by element type (FLOP/s) and reading memory (bytes/s).

    They are measured again between rounds and only rise. Better kernels than torch's may exceed
    them.
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
        # A sum reads memory faster than torch's matrix-vector product does.
        values = torch.ones(1 << 28, dtype=torch.bfloat16)
        self.read = max(self.read, values.nbytes / least_s(values.sum))

    def facts(self) -> dict[str, float]:
        found = {f"gemm_{dtype}_gflops": rate / 1e9 for dtype, rate in self.gemm.items()}
        return {name: round(v, 1) for name, v in {**found, "read_gb_s": self.read / 1e9}.items()}


def least_s(run: Callable[[], object], repeats: int = 8) -> float:
    """Return the seconds of the fastest of some runs."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def matmul_parameters(shape: ModelShape) -> int:
    """Count the parameters that each token is multiplied with: all but those that are looked up."""
    lookup = 0 if shape.tied else shape.vocab * shape.hidden
    if shape.learned_positions is not None:
        lookup += (shape.full_context + shape.learned_positions) * shape.hidden
    return shape.num_parameters - lookup


# --- rounds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """The seconds that one side took in each round."""

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
    """Time every side once per round, in rotating order.

    A side returns its own seconds, or None to be timed here. between: called after each round.
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
    """Keep `count` cores busy with endless loops during a measurement, for at most ten minutes."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", _LOOP]))
            stack.callback(loop.kill)
        yield


# --- output ----------------------------------------------------------------------------------


def fingerprint(folder: Path) -> str:
    """Return eight hex digits that identify a model folder's weights and settings."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.json"))
    for file in [*files, *sorted(folder.glob("*.yaml"))]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a markdown table. A None becomes an empty cell."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ["" if row.get(c) is None else str(row[c]) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_json(name: str, result: Mapping[str, Any]) -> Path:
    """Write a result to `lab/beamwright_lab/results/NAME.json`, and return the file."""
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def finish(name: str, result: Mapping[str, Any]) -> None:
    """Write a result with its command, commit and machine, and print it as one JSON line.

    If it has a part `quoted`, `beamwright_lab.publish` shows only that part on pages.
    """
    origin = {"command": _command(), "commit": commit(), "machine": machine()}
    full = {"benchmark": name, **result, **origin}
    say(f"written: {write_json(name, full)}")
    print(json.dumps(full), flush=True)
