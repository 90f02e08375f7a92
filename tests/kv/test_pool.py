import pytest
import torch

from beamwright.errors import CapacityError, format_bytes
from beamwright.kv import BlockPool, ByteBudget, KVLayout


@pytest.fixture
def pool(layout):
    return BlockPool(layout, ByteBudget(5 * layout.bytes_per_block + 7))


def test_layout_counts_bytes_exactly(layout):
    assert layout.bytes_per_token == 2 * 2 * 3 * 5 * 4
    assert layout.bytes_per_block == 4 * layout.bytes_per_token
    half = KVLayout(2, 3, 5, torch.float16)
    assert half.bytes_per_token == layout.bytes_per_token // 2
    assert [layout.num_blocks(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_the_pool_holds_what_fits_its_budget(pool, layout):
    assert pool.num_blocks == pool.num_free == 5
    assert pool.storage.shape == (5, 2, 2, 4, 3, 5)
    assert pool.storage[0].numel() * 4 == layout.bytes_per_block
    assert not pool.storage.any()


def test_blocks_come_and_go_with_their_bytes(pool, layout):
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert pool.num_free == 2
    assert pool.budget.used_bytes == 3 * layout.bytes_per_block
    pool.check(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.budget.used_bytes) == (5, 0)
    assert pool.budget.peak_bytes == 3 * layout.bytes_per_block


def test_allocation_is_all_or_nothing_and_the_error_has_the_numbers(pool, layout):
    held = pool.allocate(3)
    with pytest.raises(CapacityError) as caught:
        pool.allocate(3)
    error, block = caught.value, layout.bytes_per_block
    assert error.needed_bytes == 3 * block
    assert error.free_bytes == 2 * block + 7
    assert error.budget_bytes == 5 * block + 7
    for number in (error.needed_bytes, error.free_bytes, error.budget_bytes):
        assert format_bytes(number) in str(error)
    assert "--kv-memory" in str(error)
    assert pool.num_free == 2
    assert pool.budget.used_bytes == 3 * block
    pool.check(held)
    assert len(pool.allocate(2)) == 2


def test_a_pool_without_room_for_a_block_says_so(layout):
    pool = BlockPool(layout, ByteBudget(layout.bytes_per_block - 1))
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.check([])


def test_nothing_is_allocated_for_nothing(pool):
    assert pool.allocate(0) == []
    assert pool.num_free == 5


def test_freed_blocks_are_reused(pool):
    first = pool.allocate(5)
    pool.free(first[1:3])
    assert sorted(pool.allocate(2)) == sorted(first[1:3])


def test_a_block_cannot_be_freed_twice(pool):
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks[:1])


def test_check_finds_a_lost_a_shared_and_a_stolen_block(pool):
    blocks = pool.allocate(3)
    with pytest.raises(AssertionError, match="5 blocks, but 2 owned"):
        pool.check(blocks[:2])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([*blocks, blocks[0]])
    pool.free(blocks[:1])
    with pytest.raises(AssertionError, match="on the free list"):
        pool.check(blocks)


def test_budget_peak_and_over_release():
    budget = ByteBudget(100)
    budget.charge(60, "one")
    budget.charge(40, "two")
    budget.release(70)
    assert (budget.used_bytes, budget.free_bytes, budget.peak_bytes) == (30, 70, 100)
    with pytest.raises(CapacityError, match="three needs 71 B, 70 B of 100 B"):
        budget.charge(71, "three")
    assert budget.used_bytes == 30
    budget.reset_peak()
    assert budget.peak_bytes == 30
    with pytest.raises(AssertionError, match="only 30"):
        budget.release(31)
