import pytest

from beamwright.engine.timeline import Timeline
from beamwright.kv.link import Piece, TransferState
from beamwright.protocols import Direction
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.link import VirtualLink


def second_per_byte(num_bytes, num_pieces, direction):
    del num_pieces, direction
    return float(num_bytes)


def pieces(*sizes):
    return [Piece(None, None, size) for size in sizes]


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def link(clock):
    return VirtualLink(clock, second_per_byte)


def test_a_clock_only_runs_forwards(clock):
    clock.advance(2.0)
    assert clock.advance_to(5.0) == 3.0
    assert clock.advance_to(1.0) == 0.0
    assert clock() == 5.0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="advance"):
            clock.advance(wrong)


def test_transfers_of_a_direction_queue_and_directions_do_not(clock, link):
    first = link.submit(Direction.H2D, "load", pieces(3, 1))
    second = link.submit(Direction.H2D, "load", pieces(2))
    back = link.submit(Direction.D2H, "store", pieces(5))
    assert (first.num_bytes, first.state) == (4, TransferState.RUNNING)
    assert second.state is TransferState.QUEUED
    clock.advance(3.9)
    assert not first.finished
    clock.advance(0.1)
    assert first.finished
    assert link.wait([first]) == 0.0
    assert link.wait([second, back]) == 2.0
    assert clock.now_s == 6.0
    assert link.busy_s == {Direction.H2D: 6.0, Direction.D2H: 5.0}


def test_what_has_not_started_is_cancelled_without_a_trace(clock, link):
    running, waiting, last = (link.submit(Direction.D2H, "store", pieces(4)) for _ in range(3))
    clock.advance(1.0)
    link.cancel([waiting])
    assert waiting.state is TransferState.CANCELLED
    assert waiting.finished
    assert link.wait([running, last]) == 7.0
    assert link.bytes_moved[Direction.D2H] == 8


def test_of_what_is_on_its_way_only_the_present_piece_still_moves(clock, link):
    running = link.submit(Direction.D2H, "store", pieces(2, 2, 2))
    following = link.submit(Direction.D2H, "store", pieces(1))
    clock.advance(3.0)
    link.cancel([running])
    assert running.finished
    assert link.bytes_moved[Direction.D2H] == 4
    assert not following.finished
    assert following.state is TransferState.QUEUED
    assert link.wait([following]) == 2.0  # one for the piece, one for itself


def test_a_timeline_sees_when_transfers_ran(clock):
    timeline = Timeline(clock)
    link = VirtualLink(clock, second_per_byte, timeline=timeline)
    clock.advance(1.0)
    link.wait([link.submit(Direction.H2D, "prefetch", pieces(4))])
    (span,) = timeline.spans
    assert (span.name, span.track, span.start_s, span.end_s) == ("prefetch", "h2d", 1.0, 5.0)
