"""Trace files: well-formed, in the form that the viewers need."""

import json

import pytest

from beamwright.engine.timeline import TRACKS, NullTimeline, Timeline, write_trace
from beamwright.errors import InputError


@pytest.fixture
def events_of(tmp_path):
    """Events of a kind that are written of a timeline: M (names), X (work) or C (counters)."""

    def written(timeline, kind, title="a search"):
        write_trace(timeline, tmp_path / "trace.json", title)
        content = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
        assert content["otherData"] == {"title": title}
        for event in content["traceEvents"]:
            assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(event)
            assert event["ts"] >= 0
        return [event for event in content["traceEvents"] if event["ph"] == kind]

    return written


def thread_names(events):
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_work_is_a_span_with_its_args(events_of):
    timeline = Timeline(lambda: 100.0)
    for i, track in enumerate(TRACKS):
        timeline.add(f"work {i}", track, 100.0 + i, 100.5 + i, group=i, device_bytes=64 * i)
    complete = events_of(timeline, "X")
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in complete] == [
        (f"work {i}", track, i * 1e6, 0.5e6) for i, track in enumerate(TRACKS)
    ]
    assert complete[3]["args"] == {"group": 3, "device_bytes": 192}


def test_threads_are_named_and_ordered_even_when_idle(events_of):
    events = events_of(NullTimeline(), "M")
    named = ["compute", "host to device", "device to host", "stall", "schedule", "verify"]
    assert list(thread_names(events).values()) == named
    order = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    assert order == sorted(set(order))


def test_spans_share_a_thread_only_if_they_follow_each_other(events_of):
    timeline = Timeline(lambda: 0.0)
    for name, start, end in [("a", 0, 4), ("across", 3, 6), ("after", 6, 7)]:
        timeline.add(name, "h2d", float(start), float(end))
    names = thread_names(events_of(timeline, "M"))
    threads = {e["name"]: names[e["tid"]] for e in events_of(timeline, "X")}
    assert threads["a"] == threads["after"] == "host to device"
    assert threads["across"] == "host to device 2"


def test_counters_come_from_the_spans_that_name_them(events_of):
    timeline = Timeline(lambda: 0.0)
    timeline.add("load", "h2d", 2.0, 3.0, device_bytes=200, queued_bytes=7)
    timeline.add("load", "h2d", 1.0, 2.0, device_bytes=100)
    timeline.add("decode", "compute", 3.0, 4.0, open_rows=5, rows_ahead=3)
    assert [(e["name"], e["ts"], e["args"]) for e in events_of(timeline, "C")] == [
        ("KV on the device", 1e6, {"device_bytes": 100}),
        ("KV on the device", 2e6, {"device_bytes": 200}),
        ("bytes queued on the link", 2e6, {"queued_bytes": 7}),
        ("rows", 3e6, {"open_rows": 5, "rows_ahead": 3}),
    ]


def test_titles_and_names_may_hold_anything(events_of, tmp_path):
    timeline = Timeline(lambda: 0.0)
    timeline.add('"</script>\ud800', "compute", 0.0, 1.0, beams=(1, 2), where=tmp_path)
    (event,) = events_of(timeline, "X", "caf\u00e9 \ud800")
    assert event["name"] == '"</script>\ud800'
    assert event["args"] == {"beams": [1, 2], "where": str(tmp_path)}


def test_a_trace_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(NullTimeline(), tmp_path / "missing" / "trace.json", "a search")
