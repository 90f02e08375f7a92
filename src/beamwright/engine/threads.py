"""Choose the number of torch's compute threads, and shorten how long idle ones spin."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from beamwright.cores import num_cores, wait_policy

SMALL_PARAMETERS = 20_000_000
_UNSET = "OMP_NUM_THREADS : [not set]"


@dataclass(frozen=True)
class Threads:
    """Number of threads that compute one matrix product, and the reason to show to a user.

    torch's OpenMP threads wait for one another at the end of every product. The products of a small
    model take microseconds. A second thread then gains little, and loses much if another process
    occupies the second core (docs/log/2026-11.md#a-busy-machine).
    """

    count: int
    why: str

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Set torch's number of threads within a block; restore the previous number afterwards."""
        before = torch.get_num_threads()
        if before != self.count:
            torch.set_num_threads(self.count)
        if self.count > 1 and wait_policy() is None:
            _shorten_waits()
        try:
            yield
        finally:
            if before != torch.get_num_threads():
                torch.set_num_threads(before)


def all_threads() -> Threads:
    """Return torch's own number of threads, but no more than the cores that this process may use.

    OMP_NUM_THREADS overrides this number, and the number for small models.
    """
    available, cores = torch.get_num_threads(), num_cores()
    if _UNSET not in torch.__config__.parallel_info():
        return Threads(available, "OMP_NUM_THREADS is set")
    if available > cores:
        return Threads(cores, "limited by CPU affinity or quota; OMP_NUM_THREADS overrides it")
    return Threads(available, "PyTorch's own number; OMP_NUM_THREADS overrides it")


def threads_for(num_parameters: int) -> Threads:
    """Return the threads for a set of models; `num_parameters` is the size of the largest one."""
    most = all_threads()
    if num_parameters > SMALL_PARAMETERS or _UNSET not in torch.__config__.parallel_info():
        return most
    limit = f"{SMALL_PARAMETERS // 10**6} million parameters"
    return Threads(1, f"no model has more than {limit}; OMP_NUM_THREADS overrides it")


def _shorten_waits() -> None:
    """Shorten the time that idle threads spin, if torch was imported before it could be configured.

    Environment variables come too late in this case. LLVM's OpenMP library (macOS) has a function
    for it, per thread. That call is untested, because no Mac was available. GNU's library has none,
    but its threads spin only 100 turns while it manages more threads than there are cores.
    """
    library = ctypes.CDLL(torch._C.__file__)  # also finds symbols of the libraries torch links
    if hasattr(library, "kmp_set_blocktime"):
        library.kmp_set_blocktime(1)
    elif hasattr(library, "GOMP_parallel"):
        _hold_idle_threads()


@cache
def _hold_idle_threads() -> None:
    """Start idle OpenMP threads for the life of the process, so that the others spin less.

    The idle threads raise GNU's count of managed threads above the number of cores. They belong to
    a daemon thread. A forked child does not have that thread, but keeps the count.
    """
    library, held = ctypes.CDLL(torch._C.__file__), threading.Event()

    def hold() -> None:
        library.GOMP_parallel(library.omp_get_level, None, library.omp_get_num_procs() + 1, 0)
        held.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="beamwright-openmp", daemon=True).start()
    held.wait()
