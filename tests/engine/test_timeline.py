"""Timelines: what is written down, by which clock, from which thread."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from beamwright.engine.timeline import CHANGES, TRACKS, NullTimeline, Residence, Span, Timeline


def ticking():
    """A clock that says 0.0, 1.0, 2.0, ..."""
    return map(float, itertools.count()).__next__


def test_a_span_is_timed_by_the_given_clock():
    timeline = Timeline(ticking())
    with timeline.span("group 0", "compute", beams=4):
        pass
    timeline.add("load", "h2d", 1.5, 1.75, bytes=8, kind="prefetch")
    assert timeline.started_s == 0.0
    assert timeline.spans == [
        Span("group 0", "compute", 1.0, 2.0, {"beams": 4}),
        Span("load", "h2d", 1.5, 1.75, {"bytes": 8, "kind": "prefetch"}),
    ]


def test_a_span_that_fails_is_written_down_and_its_error_goes_on():
    timeline = Timeline(ticking())
    with pytest.raises(KeyError), timeline.span("score", "verify"):
        raise KeyError
    assert [(span.start_s, span.end_s) for span in timeline.spans] == [(1.0, 2.0)]


def test_residences_carry_their_time():
    timeline = Timeline(ticking())
    for change in CHANGES:
        timeline.residence("0.3.1", change)
    assert timeline.residences == [
        Residence(1.0 + i, "0.3.1", change) for i, change in enumerate(CHANGES)
    ]


@pytest.mark.parametrize("track", TRACKS)
def test_every_track_takes_an_empty_span(track):
    timeline = Timeline()
    timeline.add("instant", track, 1.0, 1.0)
    assert [span.track for span in timeline.spans] == [track]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda t: t.add("x", "gpu", 0.0, 1.0), "no track 'gpu'"),
        (lambda t: t.add("x", "compute", 2.0, 1.0), "before it starts"),
        (lambda t: t.add("x", "compute", 0.0, float("nan")), "before it starts"),
        (lambda t: t.residence("0", "disk"), "no residence 'disk'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(bad, message):
    timeline = Timeline()
    with pytest.raises(ValueError, match=message):
        bad(timeline)
    assert not timeline.spans
    assert not timeline.residences


def test_threads_lose_nothing_and_residences_stay_in_the_order_of_time():
    timeline = Timeline()

    def work(number):
        for i in range(200):
            timeline.residence(f"{number}.{i}", "host")
            with timeline.span(f"{number}.{i}", "d2h"):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    expected = {f"{number}.{i}" for number in range(4) for i in range(200)}
    assert {span.name for span in timeline.spans} == expected
    assert len(timeline.spans) == len(timeline.residences) == len(expected)
    times = [residence.time_s for residence in timeline.residences]
    assert times == sorted(times)


def test_a_null_timeline_runs_the_block_and_keeps_nothing():
    timeline = NullTimeline()
    ran = []
    with timeline.span("group 0", "compute", beams=4):
        ran.append(True)
    timeline.add("load", "h2d", 0.0, 1.0, bytes=8)
    timeline.residence("0", "device")
    assert ran == [True]
    assert not timeline.spans
    assert not timeline.residences


def test_a_null_timeline_lets_errors_through():
    with pytest.raises(KeyError), NullTimeline().span("score", "verify"):
        raise KeyError
