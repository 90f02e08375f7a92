"""Clocks of a run: every instant counted once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Accounting:
    """Phase seconds ("decode", "verify", "schedule") and groups of one run.

    Tokens are counted on the nodes that they were spent on (`Node.usage`).
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_groups = 0

    def stalled(self, phase: str, seconds: float) -> None:
        """So much of a phase was a wait for transfers: it counts as "stall" instead."""
        self.seconds[phase] -= seconds
        self.seconds["stall"] += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Phases do not nest, so that every instant is counted once."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
