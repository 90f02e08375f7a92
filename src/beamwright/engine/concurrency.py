"""How much computes at a time: the verifier beside decoding or in turn, and torch's threads.

What the settings name, or what is measured to be faster on this machine. Knows sizes and clocks,
no tree: nothing here changes one.

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
from dataclasses import dataclass, field
from pathlib import Path

import torch

from beamwright.models.tree_model import TreeModel
from beamwright.protocols import Verifier
from beamwright.sections import ScheduleSettings

WINDOW_S, PAIRS, LASTS = 0.25, 3, 40
"""Seconds of a window; windows that each of both ways gets; for how many the better one stays."""

SMALL_PARAMETERS = 20_000_000
_UNSET = "OMP_NUM_THREADS : [not set]"
_LOOK_EVERY_S, _LOOK_SHARE = 0.005, 0.01
_LOAD, _OWN = Path("/proc/loadavg"), Path("/proc/self/task")

Models = tuple[TreeModel | None, TreeModel | None]
"""The generator, None where it runs elsewhere, and the verifier's model, None if it has none."""


# --- the verifier beside decoding ------------------------------------------------------------


@dataclass
class Trial:
    """Whether scoring beside decoding does more a second than in turns, on this machine, now.

    Both ways get windows by turns; then the faster one runs, until both are tried again. A window
    ends where no score is awaited, so both have scored what they have decoded, and their tokens can
    be compared. Which way runs changes no tree.

    beside: decode while steps are scored.
    """

    clock: Callable[[], float] = time.perf_counter
    beside: bool = True
    _windows: list[tuple[bool, int, float]] = field(default_factory=list)
    _began_s: float | None = None
    _tokens: int = 0

    @property
    def drains(self) -> bool:
        """True if decoding waits for scores: in turns, or for the end of a window."""
        return not self.beside or self._is_over

    def begin(self) -> None:
        """Time in which nothing was in flight counts for neither."""
        self._began_s, self._tokens = None, 0

    def note(self, tokens: int, *, awaited: bool) -> None:
        """A piece of work is over. awaited: scores are still to come."""
        if self._began_s is None:
            self._began_s = self.clock()
            return
        self._tokens += tokens
        if self._is_over and not awaited:
            now = self.clock()
            self._windows.append((self.beside, self._tokens, now - self._began_s))
            self._began_s, self._tokens = now, 0
            self._next_window()

    @property
    def _is_over(self) -> bool:
        return self._began_s is not None and self.clock() >= self._began_s + WINDOW_S

    def _next_window(self) -> None:
        tried = len(self._windows)
        if tried < 2 * PAIRS:
            self.beside = not self.beside
        elif tried == 2 * PAIRS:
            self.beside = self._rate(beside=True) >= self._rate(beside=False)
        elif tried == 2 * PAIRS + LASTS:
            self._windows = []

    def _rate(self, *, beside: bool) -> float:
        """Tokens a second in the windows of this way."""
        done = [(tokens, seconds) for way, tokens, seconds in self._windows if way is beside]
        total_s = sum(seconds for _, seconds in done)
        return sum(tokens for tokens, _ in done) / total_s if total_s else 0.0


def overlaps(
    settings: ScheduleSettings,
    verifier: Verifier,
    models: Models,
    *,
    in_flight: int | None,
    exact: bool,
    num_threads: int,
) -> bool:
    """True if the verifier has a thread of its own; never one that does not say that it may.

    "auto": where that may be faster (docs/experiments.md), and changes nothing else: a model on a
    CPU with a core for each of the worker's threads, several trees in flight, no KV that has had to
    leave the device so far, and results that do not depend on a batch. `Trial` measures it then.

    in_flight: trees at a time; None for as many as there is work for. exact: results do not depend
    on a batch.
    """
    generator, scorer = models
    if not getattr(verifier, "beside_decoding", False):
        return False
    if are_apart(models):
        return True  # nobody waits, and each thread has a current device of its own
    if settings.executor != "auto":
        return settings.executor == "overlapped"
    if generator is None or scorer is None:
        return in_flight != 1 and scorer is not None
    return (
        in_flight != 1
        and exact
        and not (generator.store.outgrown or scorer.store.outgrown)
        and scorer.decoder.device.type == "cpu"
        and num_cores() >= 2 * num_threads
    )


def are_apart(models: Models) -> bool:
    """Both are here, on different devices."""
    generator, scorer = models
    if generator is None or scorer is None:
        return False
    return generator.decoder.device != scorer.decoder.device


# --- torch's threads -------------------------------------------------------------------------


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


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> int | None:
    """Cores that no other process wants at this moment; None where the system does not say."""
    try:
        running = int(_LOAD.read_text().split()[3].partition("/")[0])
        num_ours = sum(_is_running(task) for task in _OWN.iterdir())
    except (OSError, ValueError, IndexError):
        return None
    return (os.cpu_count() or 1) - max(0, running - num_ours)


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
