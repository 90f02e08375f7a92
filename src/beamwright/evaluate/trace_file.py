"""A timeline as a Chrome trace-event file: opens in Perfetto and chrome://tracing.

Knows the trace format, nothing of what ran. One named thread per track, in a fixed order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.io import write_whole

if TYPE_CHECKING:
    from beamwright.engine.timeline import Span, Timeline

# Top to bottom, with the names that a reader sees.
_TRACKS = {
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


def write_trace(timeline: Timeline, path: Path, title: str) -> None:
    """Write the trace; times are microseconds from the start of the timeline.

    A span with a counter's names (_COUNTERS) among its args is also a sample of it, taken at its
    start.

    Raises:
        InputError: if the file cannot be written.
    """
    content = {"traceEvents": list(_events(timeline, title)), "otherData": {"title": title}}
    write_whole(path, json.dumps(content, default=str) + "\n")


def _events(timeline: Timeline, title: str) -> Iterator[dict[str, Any]]:
    # Work that began before the timeline did (a load of weights, say) must not be negative.
    origin_s = min([timeline.started_s, *(span.start_s for span in timeline.spans)])

    def event(kind: str, name: str, thread: int, start_s: float, **more: Any) -> dict[str, Any]:
        place = {"pid": 1, "tid": thread, "ts": (start_s - origin_s) * 1e6}
        return {"name": name, "ph": kind, **place, **more}

    yield event("M", "process_name", 0, origin_s, args={"name": title})
    threads = count(1)
    for track, shown in _TRACKS.items():
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
    """Spans by lane, at least one; those that overlap go to different lanes."""
    lanes: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        free = (lane for lane in lanes if not lane or lane[-1].end_s <= span.start_s)
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return lanes
