"""Count the CPU cores that this process may use, and shorten the spinning of its OpenMP threads.

PyTorch's OpenMP threads wait by spinning: for 300,000 iterations in GNU's library, for 200 ms in
LLVM's. If another process runs on one of the cores, each of thousands of parallel regions lasts
until the scheduler preempts the spinning thread. A short spin bridges the gaps between two
operators of a decode step, and costs little next to other processes
(docs/log/2026-11.md#a-busy-machine).

The libraries read their wait policy from the environment while PyTorch is imported, so this module
sets the policy when `beamwright` is imported. No other module reads or writes the environment. The
exception is deliberate: the variables belong to the libraries and change no result. A policy that
the user has set is kept. `engine.threads` handles programs that imported PyTorch first.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SPINS = 2000  # iterations that an idle thread of GNU's library spins before it sleeps
_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def shorten_spins() -> None:
    """Let idle OpenMP threads of PyTorch spin only briefly, by setting environment variables.

    Do nothing if PyTorch is already imported, or if the user has set a wait policy.
    """
    if "torch" not in sys.modules and wait_policy() is None:
        # LLVM's library takes milliseconds, GNU's takes iterations.
        os.environ.update(GOMP_SPINCOUNT=str(SPINS), KMP_BLOCKTIME="1")


def wait_policy() -> str | None:
    """Return the OpenMP wait policy in the environment, such as "KMP_BLOCKTIME=1", or None."""
    return next((f"{n}={os.environ[n]}" for n in _POLICIES if n in os.environ), None)


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use.

    The number is the smaller of the process's CPU affinity and its container's CPU quota. A
    fraction of a core counts as one core.

    root: the folder that contains /proc and /sys.
    """
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return min([len(affinity(0)), *map(math.ceil, _cpu_quotas(root))])


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the container's CPU quota in cores; None without a quota."""
    return min(_cpu_quotas(root), default=None)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control group and its parents, in cores.

    Both cgroup v1 and v2 are read.

    Inside a container, the group's path may be the path on the host, which does not exist here. In
    that case the mounted folder, a parent of that path, holds the container's quota.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
        homes = {controllers, "cpu"} if "cpu" in controllers.split(",") else {"", "unified"}
        for home in homes:
            folder = root / "sys/fs/cgroup" / home / group.strip("/")
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no such folder, or "max"
                    texts = [(each / name).read_text(encoding="utf-8") for name in files]
                    quota, period = map(int, " ".join(texts).split())
                    if quota > 0:
                        yield quota / period
