"""How many of torch's threads compute, by the sizes of the models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SMALL_PARAMETERS = 20_000_000
_UNSET = "OMP_NUM_THREADS : [not set]"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Threads:
    """Threads of one product, and why so many.

    torch's OpenMP threads wait for one another by spinning. A small model's products are over in
    microseconds, so a second thread gains little; and where another process has the second core,
    every one of thousands of parallel regions waits for a thread that does not run
    (docs/log/2026-11-22-one-thread.md).
    """

    count: int
    why: str

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
        return Threads(available, f"a model has more than {limit}")
    return Threads(1, f"no model has more than {limit}; OMP_NUM_THREADS overrides it")
