"""What `CudaStreams` asks of a card, in which order; a scripted `torch.cuda` writes it down."""

from contextlib import contextmanager

import pytest
import torch

from beamwright.kv.streams import CudaStreams, Piece
from beamwright.protocols import Direction


@pytest.fixture
def card(monkeypatch):
    """The calls so far; time passes by a millisecond with every event."""
    calls = []

    class Stream:
        def __init__(self, device=None):
            self.name = f"side{sum(call[0] == 'new' for call in calls)}"
            calls.append(("new", self.name))

        def wait_event(self, event):
            calls.append(("wait", self.name, event.at))

    class Compute(Stream):
        def __init__(self):
            self.name = "compute"

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing
            self.at = None

        def record(self, stream):
            self.at = sum(call[0] == "event" for call in calls)
            calls.append(("event", stream.name, self.at))

        def query(self):
            return True

        def synchronize(self):
            calls.append(("synchronize", self.at))

        def elapsed_time(self, other):
            return float(other.at - self.at)

    @contextmanager
    def stream(chosen):
        calls.append(("enter", chosen.name))
        yield
        calls.append(("leave", chosen.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Compute())
    return calls


def test_a_copy_waits_for_compute_and_compute_for_the_copy(card):
    streams = CudaStreams(torch.device("cuda"))
    device, host = torch.zeros(4), torch.ones(4)
    card.clear()
    copied = streams.copy(Direction.H2D, [Piece(device, host, 16)])
    held = streams.hold_back(copied)
    assert card == [
        ("event", "compute", 0),
        ("wait", "side0", 0),
        ("enter", "side0"),
        ("leave", "side0"),
        ("event", "side0", 1),
        ("event", "compute", 2),
        ("wait", "compute", 1),
    ]
    assert device.tolist() == [1.0] * 4
    assert held() == 0.0, "it had arrived before compute was ready for it"


def test_a_strided_piece_is_refused(card):
    streams = CudaStreams(torch.device("cuda"))
    strided = torch.zeros(4, 4)[:, 0]
    with pytest.raises(AssertionError):
        streams.copy(Direction.D2H, [Piece(torch.zeros(4), strided, 16)])
