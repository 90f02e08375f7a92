"""Memory that goes from one store to another: nothing is lost, and freed pages are given back."""

import random

import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout, ScratchMeter
from beamwright.kv.store import SegmentStore
from kv.conftest import filled

TOTAL = 24


@pytest.fixture
def pair(tiers, layout):
    """Two stores that share the bytes of 24 blocks, with a host tier each."""
    used, size = ScratchMeter(), layout.bytes_per_block
    budgets = [ByteBudget(12 * size, together=used) for _ in range(2)]
    return *(tiers(budget=budget, most=TOTAL) for budget in budgets), used


def move(giver, taker, num_blocks, size):
    kept = giver.resize(num_blocks * size)
    taker.resize(TOTAL * size - kept)


def test_contents_survive_that_memory_moves(pair, layout):
    size, rng, contents = layout.bytes_per_block, random.Random(3), {}
    one, other, used = pair
    for number in range(60):
        giver, taker = rng.sample([one, other], 2)
        move(giver, taker, rng.randrange(TOTAL - 4), size)
        store = rng.choice([one, other])
        if store.device.num_blocks >= 3:
            segment, values = filled(store, rng.randrange(1, 9), number)
            contents[segment] = store, values
        if len(contents) > 12:
            gone = rng.choice(list(contents))
            contents.pop(gone)[0].free(gone)
        for each in (one, other):
            each.check()
            assert each.device.budget.used_bytes <= each.device.budget.total_bytes
        assert sum(each.device.budget.total_bytes for each in (one, other)) == TOTAL * size
        assert used.used_bytes == sum(each.device.budget.used_bytes for each in (one, other))
    one.resize(12 * size)
    other.resize(12 * size)
    for segment, (store, values) in contents.items():
        with store.lease({segment: 1}):
            assert torch.equal(store.gather(segment, segment.length), values)


def test_what_is_held_stays(pair, layout):
    one, other, _ = pair
    segment, values = filled(one, 20, 0)
    with one.lease({segment: 1}):
        assert one.resize(0) == 5 * layout.bytes_per_block
        assert torch.equal(one.gather(segment, 20), values)
    assert one.resize(0) == 0
    assert other.resize(TOTAL * layout.bytes_per_block) == TOTAL * layout.bytes_per_block


def test_without_a_host_tier_only_free_memory_moves(tiers, layout):
    size, store = layout.bytes_per_block, tiers(device=8, host=0, most=16)
    filled(store, 12, 0)
    assert store.resize(0) == 3 * size
    assert store.resize(16 * size) == 16 * size
    filled(store, 13 * 4, 1)
    with pytest.raises(CapacityError):
        filled(store, 1, 2)
    store.check()


def test_memory_that_is_given_back_takes_none():
    """Whole pages of free blocks are zeros again, and resident memory falls."""
    layout = KVLayout(4, 4, 64, torch.float32, 8)  # 64 KiB a block
    store = SegmentStore(
        BlockPool(layout, ByteBudget(200 * 2**16), most_bytes=400 * 2**16),
    )
    segment, _ = filled(store, 8 * 150, 0)
    last = segment.blocks[-1]
    assert torch.count_nonzero(store.pool.storage[last])
    store.free(segment)
    assert torch.count_nonzero(store.pool.storage[last])
    store.resize(0)
    assert not torch.count_nonzero(store.pool.storage[1 : last - 1])
