"""Trace files: well-formed, in the form that the viewers need."""

import json

import pytest

from beamwright.engine.timeline import TRACKS, NullTimeline, Timeline
from beamwright.errors import InputError
from beamwright.evaluate.trace_file import write_trace


def at(seconds):
    """A timeline that started at `seconds`."""
    return Timeline(lambda: seconds)


def events_of(timeline, tmp_path, title="a search"):
    path = tmp_path / "trace.json"
    write_trace(timeline, path, title)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["otherData"] == {"title": title}
    return content["traceEvents"]


def thread_names(events):
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_every_event_has_what_the_format_requires(tmp_path):
    timeline = at(100.0)
    for i, track in enumerate(TRACKS):
        timeline.add(f"work {i}", track, 100.0 + i, 100.5 + i, group=i, device_bytes=64 * i)
    events = events_of(timeline, tmp_path)
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(event)
        assert event["ph"] in "MXC"
        assert event["ts"] >= 0
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in complete] == [
        (f"work {i}", track, i * 1e6, 0.5e6) for i, track in enumerate(TRACKS)
    ]
    assert complete[3]["args"] == {"group": 3, "device_bytes": 192}


def test_threads_are_named_and_ordered_even_when_idle(tmp_path):
    events = events_of(NullTimeline(), tmp_path)
    assert list(thread_names(events).values()) == [
        "compute",
        "host to device",
        "device to host",
        "stall",
        "schedule",
        "verify",
    ]
    order = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    assert order == sorted(order)
    assert len(set(order)) == len(TRACKS)


def test_spans_share_a_thread_only_if_they_follow_each_other(tmp_path):
    timeline = at(0.0)
    for name, start, end in [("a", 0, 4), ("across", 3, 6), ("after", 6, 7)]:
        timeline.add(name, "h2d", float(start), float(end))
    events = events_of(timeline, tmp_path)
    names = thread_names(events)
    threads = {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"}
    assert threads["a"] == threads["after"] == "host to device"
    assert threads["across"] == "host to device 2"


def test_byte_counters_come_from_the_spans_that_name_them(tmp_path):
    timeline = at(0.0)
    timeline.add("load", "h2d", 2.0, 3.0, device_bytes=200, queued_bytes=7)
    timeline.add("load", "h2d", 1.0, 2.0, device_bytes=100)
    counters = [e for e in events_of(timeline, tmp_path) if e["ph"] == "C"]
    assert [(e["name"], e["ts"], *e["args"].values()) for e in counters] == [
        ("KV on the device", 1e6, 100),
        ("KV on the device", 2e6, 200),
        ("bytes queued on the link", 2e6, 7),
    ]


def test_rows_of_the_batch_are_a_counter_of_two(tmp_path):
    timeline = at(0.0)
    with timeline.span("decode", "compute", group=0) as facts:
        facts["open_rows"], facts["rows_ahead"] = 5, 3
    timeline.add("prefill", "compute", 1.0, 2.0)
    (counter,) = [e for e in events_of(timeline, tmp_path) if e["ph"] == "C"]
    assert (counter["name"], counter["args"]) == ("rows", {"open_rows": 5, "rows_ahead": 3})


def test_work_from_before_the_timeline_moves_the_origin(tmp_path):
    timeline = at(10.0)
    timeline.add("early", "compute", 9.0, 11.0)
    timeline.add("late", "compute", 12.0, 13.0)
    complete = [e for e in events_of(timeline, tmp_path) if e["ph"] == "X"]
    assert [e["ts"] for e in complete] == [0.0, 3e6]


def test_titles_and_names_may_hold_anything(tmp_path):
    timeline = at(0.0)
    timeline.add('"</script>\ud800', "compute", 0.0, 1.0, beams=(1, 2), where=tmp_path)
    (event,) = [e for e in events_of(timeline, tmp_path, "caf\u00e9 \ud800") if e["ph"] == "X"]
    assert event["name"] == '"</script>\ud800'
    assert event["args"] == {"beams": [1, 2], "where": str(tmp_path)}


def test_a_trace_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(NullTimeline(), tmp_path / "missing" / "trace.json", "a search")
