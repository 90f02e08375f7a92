"""Clocks of a run: every instant counted once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Accounting:
    """Phase seconds ("decode", "verify", "schedule") and groups of one run.

    Tokens are counted on the nodes that they were spent on (`Node.usage`).
    clock: seconds from any fixed origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_groups = 0

    def since(self, seconds: Mapping[str, float], num_groups: int) -> Accounting:
        """What has been added to these."""
        added = Accounting(self._clock)
        for name, total in self.seconds.items():
            added.seconds[name] = total - seconds.get(name, 0.0)
        added.num_groups = self.num_groups - num_groups
        return added

    def stalled(self, phase: str, seconds: float) -> None:
        """So much of a phase was a wait for transfers: it counts as "stall" instead."""
        self.seconds[phase] -= seconds
        self.seconds["stall"] += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Phases do not nest, so that every instant is counted once."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] += self._clock() - start
