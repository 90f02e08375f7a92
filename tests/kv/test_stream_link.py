"""The stream link: its two races, its counts, on streams that run as early as they may."""

import time

import numpy as np
import pytest

from beamwright.errors import LinkError
from beamwright.kv import Direction, Piece, StreamLink, TransferState


class EagerStreams:
    """Compute runs when told to; a copy runs at the first moment at which its marker allows it.

    careless: copies ignore what they must wait for, as a link without events would.
    """

    def __init__(self, *, careless=False):
        self.careless = careless
        self.compute, self.done = [], 0
        self.side = []

    def queue(self, operation):
        self.compute.append(operation)

    def run_compute(self):
        while self.done < len(self.compute):
            self.compute[self.done]()
            self.done += 1
            self._advance()

    def _advance(self):
        while self.side and (self.careless or self.side[0].after.place <= self.done):
            self.side.pop(0).run()

    def mark(self):
        return Mark(self, len(self.compute))

    def copy(self, direction, pieces, after):
        copied = Copied(self, pieces, after)
        self.side.append(copied)
        self._advance()
        return copied


class Mark:
    def __init__(self, streams, place):
        self.streams, self.place = streams, place

    def query(self):
        return self.streams.done >= self.place

    def synchronize(self):
        self.streams.run_compute()


class Copied:
    def __init__(self, streams, pieces, after):
        self.streams, self.pieces, self.after = streams, pieces, after
        self.ran = False

    def run(self):
        for piece in self.pieces:
            np.copyto(piece.destination, piece.source)
        self.ran = True

    def query(self):
        return self.ran

    def synchronize(self):
        self.streams.run_compute()
        assert self.ran


def piece(destination, source):
    return Piece(destination, source, source.nbytes)


def stored(streams):
    """What reaches the host when a block is stored right after compute was told to write it."""
    block, host = np.zeros(8, np.uint8), np.full(8, 9, np.uint8)
    link = StreamLink(streams)
    streams.queue(lambda: block.fill(1))
    transfer = link.submit(Direction.D2H, "store", [piece(host, block)])
    link.wait([transfer])
    return host.tolist()


def read(streams):
    """What compute reads from a block into which something else is loaded right afterwards."""
    block, host, seen = np.ones(8, np.uint8), np.full(8, 5, np.uint8), np.zeros(8, np.uint8)
    link = StreamLink(streams)
    streams.queue(lambda: np.copyto(seen, block))
    transfer = link.submit(Direction.H2D, "load", [piece(block, host)])
    link.wait([transfer])
    assert block.tolist() == [5] * 8
    return seen.tolist()


def test_a_store_waits_for_the_compute_that_writes_its_block():
    assert stored(EagerStreams()) == [1] * 8
    assert stored(EagerStreams(careless=True)) == [0] * 8, "the race is there without the event"


def test_a_load_waits_for_the_last_reader_of_its_block():
    assert read(EagerStreams()) == [1] * 8
    assert read(EagerStreams(careless=True)) == [5] * 8, "the race is there without the event"


def test_bytes_and_states():
    streams = EagerStreams()
    link = StreamLink(streams)
    streams.queue(lambda: None)
    one = link.submit(Direction.D2H, "store", [piece(np.zeros(8), np.ones(8))] * 2)
    assert not one.finished
    assert one.num_bytes == 128
    two = link.submit(Direction.H2D, "load", [piece(np.zeros(4), np.ones(4))])
    assert link.wait([one, two]) >= 0
    assert one.finished
    assert (one.state, two.state) == (TransferState.DONE, TransferState.DONE)
    assert link.bytes_moved == {Direction.D2H: 128, Direction.H2D: 32}


def test_cancelling_waits_because_a_queued_copy_cannot_be_recalled():
    streams = EagerStreams()
    link, host = StreamLink(streams), np.zeros(4)
    streams.queue(lambda: None)
    transfer = link.submit(Direction.D2H, "store", [piece(host, np.ones(4))])
    link.cancel([transfer])
    assert transfer.finished
    assert transfer.state is TransferState.CANCELLED
    assert host.tolist() == [1] * 4, "its bytes have moved before anyone gets its blocks"
    link.close()


def test_an_emulated_link_is_not_done_before_its_time():
    link = StreamLink(EagerStreams(), emulated_bandwidth=1_000_000)
    start = time.perf_counter()
    transfers = [
        link.submit(Direction.H2D, "load", [piece(np.zeros(10_000), np.ones(10_000))])
        for _ in range(2)
    ]
    assert not transfers[1].finished
    link.wait(transfers)
    assert time.perf_counter() - start >= 0.16


def test_the_timeline_hears_of_each_transfer_once():
    spans = []

    class Sink:
        def add(self, name, track, start_s, end_s, **args):
            spans.append((name, track, args["bytes"], end_s >= start_s))

    link = StreamLink(EagerStreams(), timeline=Sink())
    transfer = link.submit(Direction.H2D, "prefetch", [piece(np.zeros(2), np.ones(2))])
    link.wait([transfer])
    link.wait([transfer])
    link.close()
    assert spans == [("prefetch", "h2d", 16, True)]


def test_a_failing_stream_is_a_link_error():
    class Broken(EagerStreams):
        def copy(self, direction, pieces, after):
            raise RuntimeError("illegal address")

    with pytest.raises(LinkError, match=r"h2d stream failed.*illegal address"):
        StreamLink(Broken()).submit(Direction.H2D, "load", [])


def test_a_copy_that_fails_later_is_an_error_for_who_waits_and_for_nobody_else():
    class Dying(EagerStreams):
        def copy(self, direction, pieces, after):
            return Dead()

    class Dead:
        def query(self):
            raise RuntimeError("device lost")

        synchronize = query

    link = StreamLink(Dying())
    waited, other = (link.submit(Direction.D2H, "store", []) for _ in range(2))
    with pytest.raises(LinkError, match="d2h stream failed: device lost"):
        link.wait([waited])
    assert other.finished, "nobody waits for it for ever"
    link.cancel([waited, other])
    link.close()
    link.close()
