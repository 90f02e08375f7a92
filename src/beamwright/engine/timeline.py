"""When things ran and where each segment's KV was. Knows clocks and names, no torch, no policy.

A timeline is off by default: callers hold a `NullTimeline`, which has the same methods and
does nothing, so that no caller branches. `report` draws what a timeline has collected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# In the order in which they are drawn.
TRACKS = ("compute", "h2d", "d2h", "stall", "schedule", "verify")
CHANGES = ("device", "host", "both", "none")


@dataclass(frozen=True)
class Span:
    """Something that ran from `start_s` to `end_s`, by the timeline's clock.

    track: one of TRACKS. args: what to show beside it (a group number, bytes, a kind).
    """

    name: str
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Residence:
    """From `time_s` on, a segment's KV is on the `device`, the `host`, `both` or `none`.

    segment: the dotted lineage of its node, `0.3.1`.
    """

    time_s: float
    segment: str
    change: str


class Timeline:
    """Collects spans and residences from any thread.

    clock: seconds from any fixed origin; spans that are timed elsewhere must use the same clock.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.spans: list[Span] = []
        self.residences: list[Residence] = []
        self.started_s = clock()

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Any) -> None:
        """Write down something that ran.

        Raises:
            ValueError: if the track is unknown or the end lies before the start.
        """
        if track not in TRACKS:
            raise ValueError(f"no track {track!r}; tracks are {', '.join(TRACKS)}")
        if not end_s >= start_s:
            raise ValueError(f"{name} ends ({end_s} s) before it starts ({start_s} s)")
        with self._lock:
            self.spans.append(Span(name, track, start_s, end_s, args))

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Time a block of code; it is written down even if the block fails.

        What the block adds to the dictionary that it gets is written down, too.
        """
        start_s = self._clock()
        try:
            yield args
        finally:
            self.add(name, track, start_s, self._clock(), **args)

    def residence(self, segment: str, change: str) -> None:
        """Say where a segment's KV is from this moment on.

        Raises:
            ValueError: if `change` is not one of CHANGES.
        """
        if change not in CHANGES:
            raise ValueError(f"no residence {change!r}; known are {', '.join(CHANGES)}")
        # The clock is read under the lock, so that the list is in the order of its times.
        with self._lock:
            self.residences.append(Residence(self._clock(), segment, change))


class NullTimeline(Timeline):
    """A timeline that is off: takes everything, keeps nothing, reads no clock."""

    def __init__(self) -> None:
        super().__init__(clock=_no_clock)

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Any) -> None:
        """Do nothing."""

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Run the block."""
        yield args

    def residence(self, segment: str, change: str) -> None:
        """Do nothing."""


def _no_clock() -> float:
    return 0.0
