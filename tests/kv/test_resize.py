"""Memory that goes from one store to another: nothing is lost, and what is given up is zeros."""

import random
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout, SharedPoolMemory
from kv.conftest import filled

TOTAL = 24


@pytest.fixture
def pair(tiers, layout):
    """Two stores that share the bytes of 24 blocks, with a host tier each."""
    size = layout.bytes_per_block
    shared = SharedPoolMemory(TOTAL * size, size)
    budgets = [ByteBudget(12 * size, together=shared) for _ in range(2)]
    return *(tiers(budget=budget, shared=shared) for budget in budgets), shared


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
    assert not one.pool.by_block.any()
    assert other.resize(TOTAL * layout.bytes_per_block) == TOTAL * layout.bytes_per_block


def test_without_a_host_tier_only_free_memory_moves(tiers, layout):
    size = layout.bytes_per_block
    store = tiers(device=8, host=0, shared=SharedPoolMemory(16 * size, size))
    filled(store, 12, 0)
    assert store.resize(0) == 3 * size
    assert store.resize(16 * size) == 16 * size
    filled(store, 13 * 4, 1)
    with pytest.raises(CapacityError):
        filled(store, 1, 2)
    store.check()


def spans(pool, blocks):
    """Bytes [first, end) of each of these blocks."""
    start, size = pool.by_block.data_ptr(), pool.bytes_per_block
    return [(start + block * size, start + (block + 1) * size) for block in blocks]


@pytest.mark.parametrize("sizes", [(4, 4), (1, 7), (7, 1), (3, 64), (64, 3)])
@pytest.mark.parametrize("total", [999, 4096, 10007])
def test_blocks_from_both_ends_never_meet(sizes, total):
    """However the bytes are divided; and nobody's block is nobody else's."""
    layouts = [KVLayout(1, 1, 4 * size, torch.bfloat16, 1) for size in sizes]
    shared = SharedPoolMemory(total, max(each.bytes_per_block for each in layouts))
    pools = [BlockPool([each], ByteBudget(0), shared=shared) for each in layouts]
    for pool in pools:
        assert pool.by_block.data_ptr() % 16 == 0
    for part in range(0, total + 1, max(1, total // 97)):
        held = []
        for pool, own in zip(pools, (part, total - part), strict=True):
            assert pool.resize(own) == own
            held.append(pool.allocate(pool.num_blocks))
            assert held[-1] == sorted(held[-1]), "neighbours are copied as one"
        both = zip(pools, held, strict=True)
        every = [(pool, [*blocks, len(pool.by_block) - 1]) for pool, blocks in both]
        ends = sorted(span for pool, blocks in every for span in spans(pool, blocks))
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        for pool, blocks in zip(pools, held, strict=True):
            pool.free(blocks)
            pool.resize(0)
            pool.forget_outside()


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_left_is_moved_together(pair, layout, monkeypatch, refused):
    """Held or not, at either end; the other store's own is written where it was. refused: the
    working memory of a copy."""
    if refused:
        monkeypatch.setattr(torch.Tensor, "index_copy_", Mock(side_effect=torch.OutOfMemoryError))
    one, other, _ = pair
    size = layout.bytes_per_block
    for store, rest in ((one, other), (other, one)):
        move(rest, store, 0, size)
        first, _ = filled(store, 40, 0)
        held, values = filled(store, 16, 1)
        free, others = filled(store, 8, 2)
        before = held.blocks[:]
        store.free(first)
        with store.lease({held: 1}):
            move(store, rest, 6, size)
            assert store.num_relocated == 6
            assert not {*before} & {*held.blocks}
            written, numbers = filled(rest, 4 * (TOTAL - 6), 3)
            for segment, expected in ((held, values), (free, others)):
                assert torch.equal(store.gather(segment, segment.length), expected)
            assert torch.equal(rest.gather(written, written.length), numbers)
        for each, segment in ((store, held), (store, free), (rest, written)):
            each.free(segment)
            each.check()
