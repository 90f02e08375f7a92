"""The cores that this process may use, and how its OpenMP threads wait for one another.

PyTorch's OpenMP threads wait by spinning: 300,000 turns in GNU's library, 200 ms in LLVM's. Where
another process runs on one of the cores, each of thousands of parallel regions then lasts until
the scheduler takes the spinning thread away. A short spin bridges the gaps between two operators of
a decoding step, and costs little beside other processes (docs/log/2026-11.md#a-busy-machine).

The libraries read their policy from the environment while PyTorch is imported, so this module sets
it when `beamwright` is imported. It is the only one that reads or writes the environment, a
decided exception: the variables are the libraries' own, and change no result. A policy that the
user has set stays; `engine.threads` sees to programs that have imported PyTorch before.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SPINS = 2000
_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def shorten_spins() -> None:
    """Set a short spin for PyTorch's import, unless it is too late or the user has set a policy."""
    if "torch" not in sys.modules and wait_policy() is None:
        # LLVM's library counts in milliseconds.
        os.environ.update(GOMP_SPINCOUNT=str(SPINS), KMP_BLOCKTIME="1")


def wait_policy() -> str | None:
    """The environment's wait policy; None if PyTorch was imported without one."""
    return next((f"{n}={os.environ[n]}" for n in _POLICIES if n in os.environ), None)


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, or its container's CPU quota if that is less.

    A fraction of a core counts as one. root: where /proc and /sys are.
    """
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return min([len(affinity(0)), *map(math.ceil, _quotas(root))])


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the container may use; None without a limit."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    """Limits of this process's control group and of its parents, in cores (cgroup v1 and v2).

    Inside a container the group's own path may be the host's, whose folders are not there. The
    mounted folder is then the container's.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
        homes = {controllers, "cpu"} if "cpu" in controllers.split(",") else {"", "unified"}
        for home in homes:
            folder = root / "sys/fs/cgroup" / home / group.strip("/")
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no such folder; "max"
                    texts = [(each / name).read_text(encoding="utf-8") for name in files]
                    quota, period = map(int, " ".join(texts).split())
                    if quota > 0:
                        yield quota / period
