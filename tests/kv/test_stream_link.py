"""The stream link: its two races, its counts, on streams that run as early as they may."""

import numpy as np
import pytest

from beamwright.errors import LinkError
from beamwright.kv.link import StreamLink, Wire
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from streams import CopyHandle, EagerStreams


def piece(destination, source):
    return Piece(destination, source, source.nbytes)


@pytest.mark.parametrize(("careless", "seen"), [(False, 1), (True, 0)])
def test_a_store_waits_for_the_compute_that_writes_its_block(careless, seen):
    """What reaches the host of a block that compute was just told to write; careless: without the
    event the race is there."""
    streams, block, host = EagerStreams(careless=careless), np.zeros(8), np.full(8, 9.0)
    link = StreamLink(streams)
    streams.queue(lambda: block.fill(1))
    link.wait([link.submit(Direction.D2H, "store", [piece(host, block)])])
    assert host.tolist() == [seen] * 8


@pytest.mark.parametrize(("careless", "seen"), [(False, 1), (True, 5)])
def test_a_load_waits_for_the_last_reader_of_its_block(careless, seen):
    """What compute reads from a block into which something else is loaded right afterwards."""
    streams, block, host, read = EagerStreams(careless=careless), *map(np.full, [8] * 3, (1, 5, 0))
    link = StreamLink(streams)
    streams.queue(lambda: np.copyto(read, block))
    link.wait([link.submit(Direction.H2D, "load", [piece(block, host)])])
    assert block.tolist() == [5] * 8
    assert read.tolist() == [seen] * 8


def test_links_over_one_wire_share_its_bandwidth_and_its_counters():
    wire = Wire(emulated_bandwidth=1_000_000)
    links = [StreamLink(EagerStreams(), wire=wire) for _ in range(2)]
    transfers = [
        link.submit(Direction.D2H, "store", [piece(np.zeros(10_000), np.ones(10_000))])
        for link in links
    ]
    first, second = transfers
    assert second.begins_s == first.ends_s
    assert second.ends_s - second.begins_s == pytest.approx(0.08)
    assert links[0].bytes_moved is links[1].bytes_moved
    assert wire.bytes_moved == {Direction.D2H: 160_000}
    links[1].cancel([transfers[1]])
    assert wire.bytes_moved == {Direction.D2H: 80_000}
    again = links[0].submit(Direction.D2H, "store", [piece(np.zeros(1), np.ones(1))])
    assert again.begins_s < second.ends_s, "nobody needs that time any more"


def test_other_data_shares_the_bandwidth_of_a_wire_and_not_its_counters():
    wire = Wire(emulated_bandwidth=1_000_000)
    own = wire.with_own_counter()
    first, second = (
        StreamLink(EagerStreams(), wire=each).submit(
            Direction.H2D, "weights", [piece(np.zeros(10_000), np.ones(10_000))]
        )
        for each in (wire, own)
    )
    assert second.begins_s == first.ends_s
    assert wire.bytes_moved == own.bytes_moved == {Direction.H2D: 80_000}
    assert wire.bytes_moved is not own.bytes_moved


def test_a_copy_that_fails_later_is_an_error_for_who_waits_and_for_nobody_else():
    class Dying(EagerStreams):
        def copy(self, direction, pieces):
            return Dead()

    class Dead:
        def query(self):
            raise RuntimeError("device lost")

        synchronize = query

    link = StreamLink(Dying())
    waited, other = (link.submit(Direction.D2H, "store", []) for _ in range(2))
    with pytest.raises(LinkError, match="copying KV to the host failed: device lost"):
        link.wait([waited])
    assert other.finished, "nobody waits for it for ever"
    link.cancel([waited, other])
    link.close()
    link.close()


def test_compute_is_held_back_by_the_last_transfer_of_each_direction():
    streams = EagerStreams()
    link = StreamLink(streams)
    streams.queue(lambda: None)
    transfers = [
        link.submit(direction, "stream", [piece(np.zeros(4), np.ones(4))])
        for direction in (Direction.H2D, Direction.H2D, Direction.D2H)
    ]
    assert link.delay_compute(transfers) == 0.0
    assert streams.held == streams.copied[1:]
    assert not any(transfer.finished for transfer in transfers), "the host does not wait"
    assert link.held_back_s == 0.0
    link.wait(transfers)
    assert link.held_back_s == 0.02, "as the device says, once it can"
    link.delay_compute(transfers)
    assert len(streams.held) == 2, "nothing to wait for any more"


def test_a_batch_is_one_copy_whose_transfers_end_together_and_one_span(monkeypatch):
    """The timeline shows it when the device ran it."""
    streams, spans = EagerStreams(), []

    class Sink:
        def add(self, name, track, start_s, end_s, **args):
            spans.append((name, track, start_s, end_s, args["bytes"]))

    monkeypatch.setattr(CopyHandle, "times", (3.0, 4.5))
    link, device, host = StreamLink(streams, timeline=Sink()), np.zeros((4, 8)), np.ones((4, 8))
    streams.queue(lambda: None)
    with link.batch_transfers():
        ones = [link.submit(Direction.H2D, "load", [piece(device[i], host[i])]) for i in range(3)]
        other = link.submit(Direction.D2H, "store", [piece(host[3], device[3])])
        assert streams.copied == []
    assert [len(each.pieces) for each in streams.copied] == [3, 1]
    assert not any(transfer.finished for transfer in (*ones, other))
    link.wait(ones[:1])
    assert all(transfer.finished for transfer in ones)
    assert np.array_equal(device[:3], host[:3])
    assert link.bytes_moved == {Direction.H2D: 192, Direction.D2H: 64}
    link.close()
    assert spans == [("load", "h2d", 3.0, 4.5, 192), ("store", "d2h", 3.0, 4.5, 64)]
