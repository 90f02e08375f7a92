"""CacheRank: who finds what layers read, beside who computes them (AsyncSpade, section 4.1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from beamwright.counters import Counters


@dataclass(frozen=True)
class Selected:
    """What rows read in one layer.

    columns [rows, sets, count], and the logarithm of what all others weigh: see `Selector.select`;
    None where another layer's scores chose them. stored: their keys and values [2, rows, sets,
    count, head_dim], but of a tail's.
    """

    rows: Tensor
    columns: Tensor
    rest: Tensor | None
    stored: Tensor


class LayerSelection(NamedTuple):
    """A layer's: by these queries [rows, heads, head_dim], of which these rows [rows] are foreseen;
    of each class of rows."""

    guess: Tensor
    foreseen: Tensor
    selected: list[Selected]


Pack = dict[int, LayerSelection]
Work = Callable[[], Pack]


class CacheRank:
    """Who finds what layers read: AsyncSpade's second device (section 4.1).

    Work is pushed as soon as it can be done, a pack of layers at a time, and taken when the first
    of them needs it. threaded: done at once, on a thread of its own, in the order in which it was
    pushed; else when it is taken, which is the specification: what is found never depends on it.
    counts: what a thread took, and what was waited for.
    """

    def __init__(self, counts: Counters, *, threaded: bool = False) -> None:
        self._counts = counts
        self._thread = ThreadPoolExecutor(1, "cache-rank") if threaded else None
        self._work: dict[int, Work] = {}
        self._running: list[Future[Pack]] = []

    def push(self, layer: int, work: Work) -> None:
        """What a pack of layers needs next, if nothing was pushed for it before."""
        if layer not in self._work:
            if self._thread is not None:
                self._running.append(self._thread.submit(self._run, work))
                work = partial(self._wait, self._running[-1])
            self._work[layer] = work

    def take(self, layer: int) -> Pack | None:
        """What it needs; None where nothing was pushed."""
        work = self._work.pop(layer, None)
        return None if work is None else work()

    def settle(self) -> None:
        """Nothing runs when it returns, and what was found stays."""
        wait(self._running)
        self._running = []

    def forget(self) -> None:
        """What was pushed is not needed, and nothing runs when it returns."""
        for found in self._running:
            found.cancel()
        self.settle()
        self._work.clear()

    def close(self) -> None:
        """The last call."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, work: Work) -> Pack:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return work()
        finally:
            self._counts.rank_s += time.perf_counter() - began

    def _wait(self, found: Future[Pack]) -> Pack:
        began, late = time.perf_counter(), not found.done()
        try:
            return found.result()
        finally:
            self._running = [each for each in self._running if not each.done()]
            self._counts.rank_takes += 1
            if late:
                self._counts.rank_late += 1
                self._counts.rank_waited_s += time.perf_counter() - began
