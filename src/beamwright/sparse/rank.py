"""SelectionQueue: selects and loads KV for coming layers in the background (AsyncSpade, 4.1)."""

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
    """The tokens that rows read in one layer, for rows that select equally many tokens (a class).

    rows: indices of these rows in the batch.
    columns: [rows, sets, count], the selected tokens, numbered as in `select`, in one set for each
        KV head or for each query head.
    rest: log-sum-exp of the scores of all other tokens, see `Selector.select`; None where it is
        unknown, such as for tokens that another layer's scores chose.
    stored: keys and values [2, rows, sets, count, head_dim] of the columns. Entries for tokens in
        the tail have no meaning; their KV is read from the tail.
    """

    rows: Tensor
    columns: Tensor
    rest: Tensor | None
    stored: Tensor


class LayerSelection(NamedTuple):
    """The tokens that all rows read in one layer.

    guess: queries [rows, heads, head_dim] by which the tokens were selected.
    foreseen: mask [rows] of the rows whose query in `guess` is an estimate.
    selected: one entry for each class of rows.
    """

    guess: Tensor
    foreseen: Tensor
    selected: list[Selected]


Pack = dict[int, LayerSelection]
Work = Callable[[], Pack]


class SelectionQueue:
    """Queue of selections for coming layers: AsyncSpade's second device, the cache rank (4.1).

    A call that selects tokens for a pack of consecutive layers is pushed as soon as its inputs
    exist. Its result is taken when the first layer of the pack needs it.

    counts: counters to which the thread's time and the time spent waiting for it are added.
    threaded: True runs pushed calls at once, in order, on a thread. False runs a call when its
        result is taken, which is the specification: both give the same selections.
    """

    def __init__(self, counts: Counters, *, threaded: bool = False) -> None:
        self._counts = counts
        self._thread = ThreadPoolExecutor(1, "cache-rank") if threaded else None
        self._work: dict[int, Work] = {}
        self._running: list[Future[Pack]] = []

    def push(self, layer: int, work: Work) -> None:
        """Queue the work for the pack that begins with `layer`, unless it is queued already."""
        if layer not in self._work:
            if self._thread is not None:
                self._running.append(self._thread.submit(self._run, work))
                work = partial(self._wait, self._running[-1])
            self._work[layer] = work

    def take(self, layer: int) -> Pack | None:
        """Return the result for the pack that begins with `layer`; None if no work was pushed."""
        work = self._work.pop(layer, None)
        return None if work is None else work()

    def wait_for_work(self) -> None:
        """Wait until all pushed work has run. Results stay available to `take`."""
        wait(self._running)
        self._running = []

    def discard_work(self) -> None:
        """Discard all pushed work and results, and wait for work that is running."""
        for future in self._running:
            future.cancel()
        self.wait_for_work()
        self._work.clear()

    def close(self) -> None:
        """Discard pushed work and end the thread. The rank cannot be used afterwards."""
        self.discard_work()
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, work: Work) -> Pack:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return work()
        finally:
            self._counts.rank_s += time.perf_counter() - began

    def _wait(self, future: Future[Pack]) -> Pack:
        began, late = time.perf_counter(), not future.done()
        try:
            return future.result()
        finally:
            self._running = [each for each in self._running if not each.done()]
            self._counts.rank_takes += 1
            if late:
                self._counts.rank_late += 1
                self._counts.rank_waited_s += time.perf_counter() - began
