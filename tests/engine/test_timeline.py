"""Clocks of a run: phases that are counted once, and what timelines write down."""

import itertools
import threading

import pytest

from beamwright.counters import Counters
from beamwright.engine.timeline import (
    TRACKS,
    Accounting,
    Span,
    Timeline,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def ticking():
    """A clock that says 0.0, 1.0, 2.0, ..."""
    return map(float, itertools.count()).__next__


# --- phases ----------------------------------------------------------------------------------


def test_what_two_phases_share_is_counted_once():
    clock = Clock()
    accounting = Accounting(clock)
    decode, verify = accounting.phase("decode"), accounting.phase("verify")
    for now, change in ((1.0, decode.__enter__), (4.0, verify.__enter__)):
        clock.now = now
        change()
    clock.now = 6.0
    assert (accounting.now() - Counters(decode_s=1.0)).seconds == {"decode": 2.0, "both": 2.0}
    decode.__exit__(None, None, None)
    clock.now = 13.0
    verify.__exit__(None, None, None)
    clock.now = 20.0
    assert accounting.now().seconds == {"decode": 3.0, "both": 2.0, "verify": 7.0}


def test_a_wait_for_the_link_is_no_stall_where_the_other_phase_goes_on():
    clock, waited = Clock(), [5.0]
    accounting = Accounting(clock)
    verify = accounting.phase("verify")
    with accounting.phase("decode", lambda: waited[0]):
        clock.now = 1.0
        verify.__enter__()
        clock.now, waited[0] = 10.0, 9.0
    verify.__exit__(None, None, None)
    with accounting.phase("decode", lambda: waited[0]):
        clock.now, waited[0] = 13.0, 11.0
    assert accounting.counts.seconds == {"decode": 1.0, "stall": 3.0, "both": 9.0}


def test_what_a_thread_does_that_was_left_does_not_count():
    clock = Clock()
    accounting = Accounting(clock)
    verify = accounting.phase("verify", lambda: clock.now)
    verify.__enter__()
    clock.now = 2.0
    accounting.leave(threading.get_ident())
    with accounting.phase("verify"):
        clock.now = 5.0
        verify.__exit__(None, None, None)
        clock.now = 7.0
    assert accounting.counts.seconds == {"verify": 7.0}


# --- timelines -------------------------------------------------------------------------------


def test_what_is_written_down_is_timed_by_the_given_clock():
    timeline = Timeline(ticking())
    with timeline.span("group 0", "compute", beams=4):
        pass
    timeline.add("load", "h2d", 1.5, 1.75, bytes=8, kind="prefetch")
    with pytest.raises(KeyError), timeline.span("score", "verify"):
        raise KeyError
    for track in TRACKS:
        timeline.add("instant", track, 1.0, 1.0)
    assert timeline.started_s == 0.0
    assert timeline.spans[:3] == [
        Span("group 0", "compute", 1.0, 2.0, {"beams": 4}),
        Span("load", "h2d", 1.5, 1.75, {"bytes": 8, "kind": "prefetch"}),
        Span("score", "verify", 3.0, 4.0, {}),
    ]
    assert [span.track for span in timeline.spans[3:]] == [*TRACKS]
