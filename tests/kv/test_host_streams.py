"""The link over copier threads: bytes, order, counts, cancelling, and its death."""

import threading

import numpy as np
import pytest

from beamwright.errors import LinkError
from beamwright.kv.link import StreamLink, TransferState
from beamwright.kv.streams import HostStreams, Piece
from beamwright.protocols import Direction

PATIENCE_S = 20.0


@pytest.fixture
def make_link():
    """Links that are closed at the end of the test."""
    links = []

    def make():
        links.append(StreamLink(HostStreams()))
        return links[-1]

    yield make
    for link in links:
        link.close()


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def piece(source, destination=None):
    held = np.zeros(source.shape, source.dtype) if destination is None else destination
    return Piece(held, source, source.nbytes)


def broken_piece():
    return Piece(np.zeros(3, np.uint8), np.zeros(5, np.uint8), 5)


class GatedArray(np.ndarray):
    """Bytes whose copy starts only when a gate opens: `reached` is set before."""

    def __array_function__(self, function, types, args, kwargs):
        self.reached.set()
        assert self.gate.wait(PATIENCE_S)
        plain = [a.view(np.ndarray) if isinstance(a, GatedArray) else a for a in args]
        return function(*plain, **kwargs)


def gated(source):
    held = source.view(GatedArray)
    held.gate, held.reached = threading.Event(), threading.Event()
    return held


def test_a_direction_keeps_its_order_and_the_other_does_not_wait(make_link):
    link = make_link()
    first, place = gated(random_bytes(8, 1)), np.zeros(8, np.uint8)
    transfers = [link.submit(Direction.H2D, "load", [piece(first, place)])]
    for seed in range(2, 20):
        transfers.append(link.submit(Direction.H2D, "load", [piece(random_bytes(8, seed), place)]))
    assert first.reached.wait(PATIENCE_S)
    other = link.submit(Direction.D2H, "store", [piece(random_bytes(8))])
    link.wait([other])  # while the first direction is stuck
    assert not any(t.finished for t in transfers)
    first.gate.set()
    link.wait(transfers[-1:])
    assert all(t.finished for t in transfers)
    assert np.array_equal(place, random_bytes(8, 19)), "the last one written is the last submitted"


def test_queued_transfers_are_cancelled_and_move_nothing(make_link):
    link = make_link()
    first = gated(random_bytes(16))
    running = link.submit(Direction.H2D, "load", [piece(first)])
    assert first.reached.wait(PATIENCE_S)
    kept, dropped = (piece(random_bytes(16, seed)) for seed in (1, 2))
    queued = link.submit(Direction.H2D, "load", [dropped])
    last = link.submit(Direction.H2D, "load", [kept])
    link.cancel([queued])
    link.wait([queued])
    assert queued.state is TransferState.CANCELLED
    first.gate.set()
    link.wait([running, last])
    assert not dropped.destination.any()
    assert np.array_equal(kept.destination, kept.source)
    assert link.bytes_moved[Direction.H2D] == 32, "what was cancelled is not counted"


def test_cancelling_a_running_transfer_waits_for_it(make_link):
    link = make_link()
    first, second = gated(random_bytes(16)), piece(random_bytes(16, 1))
    running = link.submit(Direction.D2H, "store", [piece(first), second])
    assert first.reached.wait(PATIENCE_S)
    opener = threading.Timer(0.05, first.gate.set)
    opener.start()
    link.cancel([running])
    assert first.gate.is_set(), "blocks may change hands only when nothing writes to them"
    assert running.finished
    assert running.state is TransferState.CANCELLED
    assert np.array_equal(second.destination, second.source)
    assert link.bytes_moved[Direction.D2H] == 32
    link.cancel([running])  # again, and it is still over


def test_a_dead_copier_is_heard_of_and_close_brings_it_back(make_link):
    link = make_link()
    first = gated(random_bytes(4))
    before = link.submit(Direction.H2D, "load", [piece(first)])
    assert first.reached.wait(PATIENCE_S)
    broken = link.submit(Direction.H2D, "load", [broken_piece()])
    behind = link.submit(Direction.H2D, "load", [piece(random_bytes(4))])
    first.gate.set()
    with pytest.raises(LinkError, match="copying KV to the device failed"):
        link.wait([broken])
    with pytest.raises(LinkError):
        link.wait([behind])  # queued behind it
    with pytest.raises(LinkError):
        link.submit(Direction.H2D, "load", [piece(random_bytes(4))])
    assert before.state is TransferState.DONE
    link.cancel([before, broken, behind])
    there = piece(random_bytes(4, 3))
    link.wait([link.submit(Direction.D2H, "store", [there])])  # the other one lives
    link.close()
    again = piece(random_bytes(4, 4))
    link.wait([link.submit(Direction.H2D, "load", [again])])
    assert np.array_equal(again.destination, again.source)
