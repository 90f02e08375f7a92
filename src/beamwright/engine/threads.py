"""How many of torch's threads a search uses on a CPU. Knows the size of its models.

torch's OpenMP threads wait for one another by spinning. A small model's products are over in
microseconds, so a second thread gains little; and where another process has the second core, every
one of thousands of parallel regions waits for a thread that does not run (docs/experiments.md).
Larger models take all cores that nobody else wants, and look again every few milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SMALL_PARAMETERS = 20_000_000
_UNSET = "OMP_NUM_THREADS : [not set]"
_LOOK_EVERY_S, _LOOK_SHARE = 0.005, 0.01
_LOAD, _OWN = Path("/proc/loadavg"), Path("/proc/self/task")


@dataclass(frozen=True)
class Threads:
    """Threads of one product, and why so many. gives_way: fewer, while others want the cores."""

    count: int
    why: str
    gives_way: bool = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with so many threads, and put back what the host program had."""
        before = torch.get_num_threads()
        if before != self.count:
            torch.set_num_threads(self.count)
        try:
            yield
        finally:
            if before != torch.get_num_threads():
                torch.set_num_threads(before)


def threads_for(num_parameters: int) -> Threads:
    """Threads for models of which the largest has so many parameters.

    One for small models; for others, or where OMP_NUM_THREADS says how many, what torch has.
    """
    available = torch.get_num_threads()
    if _UNSET not in torch.__config__.parallel_info():
        return Threads(available, "OMP_NUM_THREADS is set")
    limit = f"{SMALL_PARAMETERS // 10**6} million parameters"
    if num_parameters > SMALL_PARAMETERS:
        gives_way = available > 1 and free_cores() is not None
        return Threads(available, f"a model has more than {limit}", gives_way)
    return Threads(1, f"no model has more than {limit}; OMP_NUM_THREADS overrides it")


def free_cores() -> int | None:
    """Cores that no other process wants at this moment; None where the system does not say."""
    try:
        running = int(_LOAD.read_text().split()[3].partition("/")[0])
        own = sum(_is_running(task) for task in _OWN.iterdir())
    except (OSError, ValueError, IndexError):
        return None
    return (os.cpu_count() or 1) - max(0, running - own)


def _is_running(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):  # it has ended
        return False


class GiveWay:
    """Called often while something is computed: takes up to `most` threads, but only free cores.

    A thread that waits for a core holds up all others at the end of every parallel region. It looks
    every five milliseconds, and spends at most a hundredth of the time on it.
    """

    def __init__(self, most: int, free: Callable[[], int | None] = free_cores) -> None:
        self._most, self._free = most, free
        self._next_s = 0.0

    def __call__(self) -> None:
        now = time.perf_counter()
        if now < self._next_s:
            return
        free = self._free()
        # A look reads files of the system: a tenth of a millisecond, more where others compute.
        took = time.perf_counter() - now
        self._next_s = now + max(_LOOK_EVERY_S, took / _LOOK_SHARE)
        count = self._most if free is None else max(1, min(self._most, free))
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
