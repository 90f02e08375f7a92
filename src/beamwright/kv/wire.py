"""Wire: what one physical link carries, however many threads queue transfers on it."""

from __future__ import annotations

import threading
from collections import Counter

from beamwright.protocols import Direction


class Wire:
    """Counts bytes, and says when an emulated bandwidth lets the next ones begin and arrive.

    emulated_bandwidth: bytes per second in each direction, of all links over it together; None for
        the real one.
    """

    def __init__(self, emulated_bandwidth: int | None = None) -> None:
        self.emulated_bandwidth = emulated_bandwidth
        self.bytes_moved: Counter[Direction] = Counter()
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._lock = threading.Lock()

    def take(self, direction: Direction, num_bytes: int, now_s: float) -> tuple[float, float]:
        """Count bytes that are sent now; gives when they begin to move and when they are there."""
        with self._lock:
            self.bytes_moved[direction] += num_bytes
            if self.emulated_bandwidth is None:
                return 0.0, 0.0
            begins_s = max(now_s, self._free_at_s[direction])
            ends_s = begins_s + num_bytes / self.emulated_bandwidth
            self._free_at_s[direction] = ends_s
            return begins_s, ends_s

    def give_back(self, direction: Direction, num_bytes: int, seconds: float) -> None:
        """Bytes that did not move after all, and seconds in which nothing will."""
        with self._lock:
            self.bytes_moved[direction] -= num_bytes
            self._free_at_s[direction] -= seconds
