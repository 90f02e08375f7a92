"""Cache ranks: who finds what a layer reads, and when. Knows no tensors.

AsyncSpade's second device (section 4.1). What a rank finds never depends on which one it is: a
layer that needs its selection waits for it, unless the rule lets it go on without (`late`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch

from beamwright.counters import Counters

Work = Callable[[], Any]


class CacheRank(Protocol):
    """Work is pushed as soon as it can be done, and taken when it is needed."""

    def push(self, layer: int, work: Work) -> None:
        """What a layer of the present token needs, if nothing was pushed for it before."""
        ...

    def take(self, layer: int) -> Any:
        """What it needs; None where nothing was pushed."""
        ...

    def is_late(self, layer: int) -> bool:
        """True if it would have to be waited for."""
        ...

    def drop(self, layer: int) -> None:
        """What was pushed is no longer needed."""
        ...

    def settle(self) -> None:
        """Nothing that was dropped runs any more when it returns."""
        ...

    def close(self) -> None:
        """Forget what was pushed; nothing runs any more when it returns."""
        ...


class InlineRank:
    """Does it when it is needed: the specification."""

    def __init__(self) -> None:
        self._work: dict[int, Work] = {}

    def push(self, layer: int, work: Work) -> None:
        self._work.setdefault(layer, work)

    def take(self, layer: int) -> Any:
        work = self._work.pop(layer, None)
        return None if work is None else work()

    def is_late(self, layer: int) -> bool:
        del layer
        return False

    def drop(self, layer: int) -> None:
        self._work.pop(layer, None)

    def settle(self) -> None:
        """Nothing runs beside the caller."""

    def close(self) -> None:
        self._work.clear()


class ThreadRank:
    """Does it at once, on a thread of its own, in the order in which it was pushed.

    counts: what it took, and what was waited for.
    """

    def __init__(self, counts: Counters) -> None:
        self._counts, self._thread = counts, ThreadPoolExecutor(1, "cache-rank")
        self._found: dict[int, Future[Any]] = {}
        self._dropped: list[Future[Any]] = []

    def push(self, layer: int, work: Work) -> None:
        def run() -> Any:
            began = time.perf_counter()
            try:
                with torch.inference_mode():
                    return work()
            finally:
                self._counts.rank_s += time.perf_counter() - began

        if layer not in self._found:
            self._found[layer] = self._thread.submit(run)

    def take(self, layer: int) -> Any:
        found = self._found.pop(layer, None)
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
        return layer in self._found and not self._found[layer].done()

    def drop(self, layer: int) -> None:
        dropped = self._found.pop(layer)
        self._counts.rank_takes += 1
        self._counts.rank_reused += 1
        if not dropped.cancel():
            self._dropped = [*(each for each in self._dropped if not each.done()), dropped]

    def settle(self) -> None:
        wait(self._dropped)
        self._dropped.clear()

    def close(self) -> None:
        for each in self._found.values():
            each.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._found.clear()
