"""States in a pool's blocks: when they are written, stored and given up."""

import pytest
import torch

from beamwright.kv.host import HostTier
from beamwright.kv.link import StreamLink
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.states import StateCells, StateLayout, StateTensor
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import HostStreams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32, block_tokens=4)
TENSORS = (
    StateTensor(1, "conv", (7, 3), torch.bfloat16),
    StateTensor(1, "recurrent", (5, 6, 4), torch.float32),
    StateTensor(3, "conv", (5,), torch.float32),
    StateTensor(3, "recurrent", (12, 12), torch.float32),
)


def new_pool():
    budget = ByteBudget(64 * LAYOUT.bytes_per_block)
    return BlockPool([LAYOUT], budget, states=StateLayout(TENSORS))


@pytest.fixture
def store():
    link = StreamLink(HostStreams())
    yield SegmentStore(new_pool(), HostTier(new_pool(), link))
    link.close()


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        (p.layer, p.kind): torch.randn(1, *p.size, generator=generator).to(p.dtype) for p in TENSORS
    }


def write(rows, values):
    for layer in (1, 3):
        rows.write(layer, {kind: values[layer, kind] for kind in ("conv", "recurrent")})


def read(rows):
    return {(layer, kind): v for layer in (1, 3) for kind, v in rows.read(layer).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], values) for key, values in expected.items())


def grown(store, num_tokens, seed=0):
    """A segment with so many tokens of KV and a state; returns it and that state."""
    segment, values = store.create(str(seed)), drawn(seed)
    size = (num_tokens, 2, 2, 3, 5)
    rows = store.make_row_states([None], [segment])
    write(rows, values)
    store.append([segment], [torch.zeros(size)])
    return segment, values


def test_what_is_put_off_takes_no_memory_when_it_is_written(store, monkeypatch):
    """Where it runs out half-way, a pass that is tried again would begin from half a state."""
    segment, before = grown(store, 3)
    own, values = segment.group_segments[-1], drawn(1)
    rows = store.make_row_states([own], [segment], [2], deferred=True)
    write(rows, values)
    assert_equal(read(store.make_row_states([own], [segment])), before)
    for name in ("to_cells", "cell_numbers"):
        monkeypatch.setattr(StateCells, name, None)
    rows.commit()
    monkeypatch.undo()
    assert_equal(read(store.make_row_states([own], [segment])), values)


def test_a_running_row_is_not_written_back_before_its_step_is_complete(store):
    segment, _ = grown(store, 9)
    store.write_back([segment], sealed=False)
    assert (segment.host_length, segment.group_segments[-1].host_length) == (8, 0)
    store.write_back([segment])
    assert (segment.host_length, segment.group_segments[-1].host_length) == (9, 9)
    store.evict_all()
    with pytest.raises(AssertionError, match="not on the device"):
        store.make_row_states([segment.group_segments[-1]], [store.create()])


def test_a_state_that_nobody_needs_goes_alone(store):
    segment, _ = grown(store, 9)
    store.free_window(segment, 2)
    kv, state = segment.group_segments
    assert (len(kv.copies), state.copies, state.out_of_window) == (1, [], True)
    store.check()
