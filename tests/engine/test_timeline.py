"""Clocks of a run: phases that are counted once, and what timelines write down."""

import itertools
import json

import pytest

from beamwright.counters import Counters
from beamwright.engine.timeline import PhaseTimer, Span, Timeline, write_trace


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# --- phases ----------------------------------------------------------------------------------


def test_what_two_phases_share_is_counted_once():
    clock = Clock()
    phase_timer = PhaseTimer(clock)
    decode, verify = phase_timer.phase("decode"), phase_timer.phase("verify")
    for now, change in ((1.0, decode.__enter__), (4.0, verify.__enter__)):
        clock.now = now
        change()
    clock.now = 6.0
    assert (phase_timer.now() - Counters(decode_s=1.0)).seconds == {"decode": 2.0, "both": 2.0}
    decode.__exit__(None, None, None)
    clock.now = 13.0
    verify.__exit__(None, None, None)
    clock.now = 20.0
    assert phase_timer.now().seconds == {"decode": 3.0, "both": 2.0, "verify": 7.0}


def test_a_wait_for_the_link_is_no_stall_where_the_other_phase_goes_on():
    clock, waited = Clock(), [5.0]
    phase_timer = PhaseTimer(clock)
    verify = phase_timer.phase("verify")
    with phase_timer.phase("decode", lambda: waited[0]):
        clock.now = 1.0
        verify.__enter__()
        clock.now, waited[0] = 10.0, 9.0
    verify.__exit__(None, None, None)
    with phase_timer.phase("decode", lambda: waited[0]):
        clock.now, waited[0] = 13.0, 11.0
    assert phase_timer.counts.seconds == {"decode": 1.0, "stall": 3.0, "both": 9.0}


# --- timelines -------------------------------------------------------------------------------


def test_what_is_written_down_is_timed_by_the_given_clock():
    timeline = Timeline(map(float, itertools.count()).__next__)
    with timeline.span("group 0", "compute", beams=4):
        pass
    with pytest.raises(KeyError), timeline.span("score", "verify"):
        raise KeyError
    assert timeline.started_s == 0.0
    assert timeline.spans == [
        Span("group 0", "compute", 1.0, 2.0, {"beams": 4}),
        Span("score", "verify", 3.0, 4.0, {}),
    ]


# --- trace files -----------------------------------------------------------------------------


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
    timeline.add("work", "h2d", 103.0, 103.5, group=3, device_bytes=192)
    (span,) = events_of(timeline, "X")
    assert [span[key] for key in ("name", "cat", "ts", "dur")] == ["work", "h2d", 3e6, 0.5e6]
    assert span["args"] == {"group": 3, "device_bytes": 192}


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
