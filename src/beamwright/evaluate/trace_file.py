"""A timeline as a Chrome trace-event file: opens in Perfetto and chrome://tracing.

Knows the trace format, nothing of what ran. One named thread per track, in a fixed order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
_COUNTERS = {"device_bytes": "KV on the device", "queued_bytes": "bytes queued on the link"}
_ROWS = frozenset({"open_rows", "rows_ahead"})
_PROCESS = 1
_MAX_LANES = 100  # thread numbers per track


def write_trace(timeline: Timeline, path: Path, title: str) -> None:
    """Write the trace; times are microseconds from the start of the timeline.

    A span with `device_bytes` or `queued_bytes` among its args is also a sample of that counter,
    taken at its start; one with `open_rows` and `rows_ahead` of the rows of the running batch.

    Raises:
        InputError: if the file cannot be written.
    """
    content = {
        "traceEvents": list(_events(timeline, title)),
        "displayTimeUnit": "ms",
        "otherData": {"title": title},
    }
    write_whole(path, json.dumps(content, default=str) + "\n")


def _events(timeline: Timeline, title: str) -> Iterator[dict[str, Any]]:
    # Work that began before the timeline did (a load of weights, say) must not be negative.
    origin_s = min([timeline.started_s, *(span.start_s for span in timeline.spans)])

    def event(kind: str, name: str, thread: int, start_s: float, **more: Any) -> dict[str, Any]:
        place = {"pid": _PROCESS, "tid": thread, "ts": (start_s - origin_s) * 1e6}
        return {"name": name, "ph": kind, **place, **more}

    yield event("M", "process_name", 0, origin_s, args={"name": title})
    for number, (track, shown) in enumerate(_TRACKS.items()):
        spans = [span for span in timeline.spans if span.track == track]
        for lane, lane_spans in enumerate(_lanes(spans)):
            thread = 1 + number * _MAX_LANES + lane
            name = f"{shown} {lane + 1}" if lane else shown
            yield event("M", "thread_name", thread, origin_s, args={"name": name})
            yield event("M", "thread_sort_index", thread, origin_s, args={"sort_index": thread})
            for span in lane_spans:
                duration = (span.end_s - span.start_s) * 1e6
                more = {"cat": span.track, "dur": duration, "args": dict(span.args)}
                yield event("X", span.name, thread, span.start_s, **more)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        for key, name in _COUNTERS.items():
            if key in span.args:
                yield event("C", name, 0, span.start_s, args={"bytes": span.args[key]})
        if span.args.keys() >= _ROWS:
            rows = {name: span.args[name] for name in sorted(_ROWS)}
            yield event("C", "rows", 0, span.start_s, args=rows)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans by lane, at least one. On one thread the viewers nest spans, so two that overlap
    without nesting go to different lanes."""
    lanes: list[list[Span]] = [[]]
    open_ends: list[list[float]] = [[]]
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        for ends in open_ends:
            while ends and ends[-1] <= span.start_s:
                ends.pop()
        fitting = (i for i, ends in enumerate(open_ends) if not ends or span.end_s <= ends[-1])
        lane = next(fitting, min(len(lanes), _MAX_LANES - 1))
        if lane == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[lane].append(span)
        open_ends[lane].append(span.end_s)
    return lanes
