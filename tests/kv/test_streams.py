"""What `CudaStreams` asks of a card, in which order; a scripted `torch.cuda` writes it down."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from beamwright.kv import copy_kernel
from beamwright.kv.host import HostTier
from beamwright.kv.link import StreamLink
from beamwright.kv.pool import BlockPool, ByteBudget
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import BlockMemory, Blocks, CudaStreams, Piece
from beamwright.protocols import Direction
from checksums import check_transfers
from kv.conftest import values_of


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
    held = streams.delay_compute(copied)
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


# --- blocks by number ------------------------------------------------------------------------


@pytest.fixture
def launches(card, monkeypatch):
    """Numbers of blocks that the kernel was given, launch by launch; the interpreter runs it."""
    if torch.cuda.is_available():
        pytest.skip("no interpreter where there is a card")
    listed, copies = [], copy_kernel.copy_numbered_blocks

    def launch(there, here, numbers):
        listed.append(numbers.shape[1])
        copies(there, here, numbers)

    monkeypatch.setattr(copy_kernel, "copy_numbered_blocks", launch)
    monkeypatch.setattr(copy_kernel, "sees_host_memory", lambda device: True)
    return listed


def moved(numbers, block_bytes=48, streams=None):
    """What a piece of 60 random blocks by these numbers, one to another, makes of zeros."""
    there = torch.zeros(60, block_bytes, dtype=torch.uint8)
    here = torch.randint(256, there.shape, dtype=torch.uint8)
    to, source = (tuple(side) for side in zip(*numbers, strict=True))
    sides = Blocks(BlockMemory(there, 60), to), Blocks(BlockMemory(here, 10), source)
    streams = streams or CudaStreams(torch.device("cuda"))
    streams.copy(Direction.H2D, [Piece(*sides, 0)])
    wanted = torch.zeros_like(there)
    wanted[list(to)] = here[list(source)]
    return torch.equal(there, wanted)


def scattered(count=41):
    """Blocks by number, none behind its neighbour."""
    return [*zip(torch.randperm(60)[:count].tolist(), torch.randperm(60).tolist(), strict=False)]


@pytest.mark.parametrize(
    ("block_bytes", "numbers", "launched"),
    [
        *((block_bytes, scattered(), [41]) for block_bytes in (16, 48, 40_000)),
        (48, [(3, 50), (9, 2), (10, 3)], []),  # few
        (48, [(at, at) for at in range(60)], []),  # neighbours, but for a locked piece's end
        (20, [(at, 59 - at) for at in range(60)], []),  # no whole units
        (2**20, [(at, 59 - at) for at in range(20)], []),  # large
    ],
)
def test_many_scattered_blocks_are_one_launch(launches, block_bytes, numbers, launched):
    assert moved(numbers, block_bytes)
    assert launches == launched


def test_copies_stay_inside_a_locked_piece(launches, monkeypatch):
    copied, copy = [], torch.Tensor.copy_

    def noted(to, source, **options):
        copied.append(len(source))
        return copy(to, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    assert moved([(at, at + 4) for at in range(30)])
    assert copied == [6, 10, 10, 4]


def test_a_kernel_that_cannot_run_is_not_tried_again(launches, monkeypatch):
    tried = []

    def refuses(*_):
        tried.append(1)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(copy_kernel, "copy_numbered_blocks", refuses)
    streams = CudaStreams(torch.device("cuda"))
    assert all(moved(scattered(), streams=streams) for _ in range(2))
    assert tried == [1]


def test_segments_go_to_the_host_and_come_back_by_number(launches, monkeypatch, layout):
    """Both pools are page-locked ones, whose blocks a card would see."""
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    device, host = (
        BlockPool([layout], ByteBudget(64 * layout.bytes_per_block), pinned=True) for _ in "ab"
    )
    link = StreamLink(CudaStreams(torch.device("cuda")))
    store = SegmentStore(device, HostTier(host, link))
    compared = check_transfers(store)
    segments = {store.create(): values_of(layout, 7, seed) for seed in range(20)}
    for part in (slice(4), slice(4, 7)):  # they grow together, so nobody's blocks are neighbours
        for segment, values in segments.items():
            store.append([segment], [values[part]])
    store.write_back(segments)
    store.evict_all()
    device.by_block.zero_()
    with store.lease(dict.fromkeys(reversed(segments), 1)):
        for segment, values in segments.items():
            assert torch.equal(store.gather(segment, 7), values.permute(1, 2, 0, 3, 4))
    assert launches == [40, 40]
    assert len(compared) == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize("direction", Direction)
def test_blocks_cross_a_card_s_link_in_one_launch(layout, direction):
    size = 600 * layout.bytes_per_block
    device, host = (
        BlockPool([layout], ByteBudget(size), "cuda"),
        BlockPool([layout], ByteBudget(size), pinned=True),
    )
    host.allocate(600)
    there, here = (host, device) if direction is Direction.D2H else (device, host)
    there.by_block.zero_()
    here.by_block.random_(0, 256)
    to, source = torch.randperm(600)[:500], torch.randperm(600)[:500]
    streams = CudaStreams(torch.device("cuda"))
    sides = Blocks(there.memory, tuple(to.tolist())), Blocks(here.memory, tuple(source.tolist()))
    streams.copy(direction, [Piece(*sides, 0)]).synchronize()
    assert streams._copy_listed is not None, "it ran, and was not refused"
    wanted = torch.zeros_like(there.by_block, device="cpu")  # one block more is nobody's
    wanted[to] = here.by_block.cpu()[source]
    assert torch.equal(there.by_block.cpu(), wanted)
