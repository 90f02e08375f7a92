"""Profiling of a run: seconds per phase, and a timeline in Chrome's trace format.

A timeline is off by default: callers then hold a `NullTimeline`, whose methods do nothing, so that
no caller branches. A trace file opens in Perfetto and chrome://tracing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from beamwright.counters import Counters
from beamwright.io import write_atomically

# Tracks from top to bottom, with the names that a trace shows.
TRACKS = {
    "compute": "compute",
    "h2d": "host to device",
    "d2h": "device to host",
    "stall": "stall",
    "schedule": "schedule",
    "verify": "verify",
}
_COUNTERS = {
    "KV on the device": ("device_bytes",),
    "bytes queued on the link": ("queued_bytes",),
    "rows": ("open_rows", "rows_ahead"),
}


@dataclass(frozen=True)
class Span:
    """A named interval of the timeline, such as a decode iteration or a transfer.

    track: one of TRACKS.
    args: values to show with it (a group number, bytes, a kind).
    """

    name: str
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


class Timeline:
    """Collector of spans from any thread.

    clock: returns seconds from any fixed origin. Spans timed by other code must use the same clock.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.spans: list[Span] = []
        self.started_s = clock()

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record a span."""
        with self._lock:
            self.spans.append(Span(name, track, start_s, end_s, args))

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Time a block of code, and record it even if the block fails.

        The block may add entries to the yielded dictionary, which are recorded too.
        """
        start_s = self._clock()
        try:
            yield args
        finally:
            self.add(name, track, start_s, self._clock(), **args)


class NullTimeline(Timeline):
    """A timeline that is off: all methods do nothing."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Any) -> None:
        """Do nothing."""


# --- a trace file ------------------------------------------------------------------------------


def write_trace(timeline: Timeline, path: Path, title: str) -> None:
    """Write a timeline as a Chrome trace. Times are microseconds from its start.

    A span whose args contain a counter's names (_COUNTERS) also gives a sample of that counter.

    Raises:
        InputError: if the file cannot be written.
    """
    content = {"traceEvents": list(_events(timeline, title)), "otherData": {"title": title}}
    write_atomically(path, json.dumps(content, default=str) + "\n")


def _events(timeline: Timeline, title: str) -> Iterator[dict[str, Any]]:
    # Work that began before the timeline, such as loading weights, must not get a negative time.
    origin_s = min([timeline.started_s, *(span.start_s for span in timeline.spans)])

    def event(kind: str, name: str, thread: int, start_s: float, **more: Any) -> dict[str, Any]:
        place = {"pid": 1, "tid": thread, "ts": (start_s - origin_s) * 1e6}
        return {"name": name, "ph": kind, **place, **more}

    yield event("M", "process_name", 0, origin_s, args={"name": title})
    threads = count(1)
    for track, shown in TRACKS.items():
        spans = [span for span in timeline.spans if span.track == track]
        for lane, lane_spans in enumerate(_lanes(spans)):
            thread = next(threads)
            name = f"{shown} {lane + 1}" if lane else shown
            yield event("M", "thread_name", thread, origin_s, args={"name": name})
            yield event("M", "thread_sort_index", thread, origin_s, args={"sort_index": thread})
            for span in lane_spans:
                duration = (span.end_s - span.start_s) * 1e6
                more = {"cat": span.track, "dur": duration, "args": dict(span.args)}
                yield event("X", span.name, thread, span.start_s, **more)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        for name, keys in _COUNTERS.items():
            if span.args.keys() >= {*keys}:
                yield event("C", name, 0, span.start_s, args={k: span.args[k] for k in keys})


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Divide spans into lanes without overlaps; at least one lane."""
    lanes: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        free = (lane for lane in lanes if not lane or lane[-1].end_s <= span.start_s)
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return lanes


# --- phases ------------------------------------------------------------------------------------


class PhaseTimer:
    """Timer of the phases of a run ("decode", "verify", "schedule"), from any thread.

    Phases of one thread do not nest. Time in which two different phases run counts as "both".
    Tokens are not counted here but on their nodes (`Node.usage`).

    clock: returns seconds from any fixed origin.
    counts: the counters that receive the seconds; other code may count in them too.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, counts: Counters | None = None
    ) -> None:
        self._clock, self.counts = clock, counts or Counters()
        self._lock = threading.Lock()
        self._phases: dict[object, tuple[str, int]] = {}  # running phases: name and thread
        self._counted_s = 0.0

    def now(self) -> Counters:
        """Return a copy of the counters, with the time of running phases included."""
        with self._lock:
            self._count()
            return self.counts.copy()

    @contextmanager
    def phase(self, name: str, stalled_s: Callable[[], float] | None = None) -> Iterator[None]:
        """Time a block of code as a phase.

        stalled_s: returns the seconds spent waiting for transfers so far. Seconds that the block
            adds count as "stall" instead of the phase, unless another phase ran meanwhile.
        """
        stalled, phase, field = 0.0 if stalled_s is None else stalled_s(), object(), f"{name}_s"
        with self._lock:
            self._count()
            self._phases[phase] = name, threading.get_ident()
            before = getattr(self.counts, field)
        try:
            yield
        finally:
            with self._lock:
                self._count()
                counts = self._phases.pop(phase, None) is not None
                if counts and stalled_s is not None:
                    stalled = min(stalled_s() - stalled, getattr(self.counts, field) - before)
                    self._add(**{field: -stalled, "stall_s": stalled})

    def add(self, **counts: int) -> None:
        """Add to counters by name; safe from any thread."""
        with self._lock:
            self._add(**counts)

    def abandon_thread(self, thread: int | None) -> None:
        """Stop timing the phase of a thread that was abandoned."""
        with self._lock:
            self._count()
            self._phases = {p: run for p, run in self._phases.items() if run[1] != thread}

    def _count(self) -> None:
        """Add the time since the last call to the phases that are running."""
        now = self._clock()
        if names := {name for name, _ in self._phases.values()}:
            name = names.pop() if len(names) == 1 else "both"
            self._add(**{f"{name}_s": now - self._counted_s})
        self._counted_s = now

    def _add(self, **counts: float) -> None:
        for name, more in counts.items():
            setattr(self.counts, name, getattr(self.counts, name) + more)
