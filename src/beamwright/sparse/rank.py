"""Cache ranks: who finds what a layer reads, and when. Knows no tensors.

AsyncSpade's second device (section 4.1). What a rank finds never depends on which one it is: a
layer that needs its selection waits for it, unless the rule lets it go on without (`late`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from beamwright.counters import Counters

Work = Callable[[], Any]


class CacheRank:
    """Work is pushed as soon as it can be done, and taken when it is needed.

    This one does it when it is needed: the specification.
    """

    def __init__(self) -> None:
        self._work: dict[int, Any] = {}

    def push(self, layer: int, work: Work) -> None:
        """What a layer of the present token needs, if nothing was pushed for it before."""
        self._work.setdefault(layer, work)

    def take(self, layer: int) -> Any:
        """What it needs; None where nothing was pushed."""
        work = self._work.pop(layer, None)
        return None if work is None else work()

    def is_late(self, layer: int) -> bool:
        """True if it would have to be waited for."""
        del layer
        return False

    def drop(self, layer: int) -> None:
        """What was pushed is no longer needed."""
        self._work.pop(layer, None)

    def settle(self) -> None:
        """Nothing that was dropped runs any more when it returns."""

    def close(self) -> None:
        """Forget what was pushed; nothing runs any more when it returns."""
        self._work.clear()


class ThreadRank(CacheRank):
    """Does it at once, on a thread of its own, in the order in which it was pushed.

    counts: what it took, and what was waited for.
    """

    def __init__(self, counts: Counters) -> None:
        super().__init__()
        self._counts, self._thread = counts, ThreadPoolExecutor(1, "cache-rank")
        self._dropped: list[Future[Any]] = []

    def push(self, layer: int, work: Work) -> None:
        def run() -> Any:
            began = time.perf_counter()
            try:
                with torch.inference_mode():
                    return work()
            finally:
                self._counts.rank_s += time.perf_counter() - began

        if layer not in self._work:
            self._work[layer] = self._thread.submit(run)

    def take(self, layer: int) -> Any:
        found = self._work.pop(layer, None)
        if found is None:
            return None
        self._counts.rank_takes += 1
        if found.done():
            return found.result()
        self._counts.rank_late += 1
        began = time.perf_counter()
        try:
            return found.result()
        finally:
            self._counts.rank_waited_s += time.perf_counter() - began

    def is_late(self, layer: int) -> bool:
        return layer in self._work and not self._work[layer].done()

    def drop(self, layer: int) -> None:
        dropped = self._work.pop(layer)
        self._counts.rank_takes += 1
        self._counts.rank_reused += 1
        if not dropped.cancel():
            self._dropped = [*(each for each in self._dropped if not each.done()), dropped]

    def settle(self) -> None:
        wait(self._dropped)
        self._dropped.clear()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        super().close()
