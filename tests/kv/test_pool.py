"""Blocks, budgets and segments: all or nothing, and what is lost is found."""

import gc
import mmap
from itertools import pairwise

import pytest
import torch

from beamwright.errors import CapacityError, format_bytes
from beamwright.kv import streams
from beamwright.kv.pool import BlockPool, ByteBudget
from beamwright.kv.segments import PathPart, truncate_path
from kv.conftest import values_of


@pytest.fixture
def pool(layout):
    return BlockPool([layout], ByteBudget(5 * layout.bytes_per_block + 7))


def test_allocation_is_all_or_nothing_and_the_error_has_the_numbers(pool, layout):
    held = pool.allocate(3)
    with pytest.raises(CapacityError) as caught:
        pool.allocate(3)
    error, block = caught.value, layout.bytes_per_block
    numbers = error.needed_bytes, error.free_bytes, error.budget_bytes
    assert numbers == (3 * block, 2 * block + 7, 5 * block + 7)
    assert all(format_bytes(number) in str(error) for number in numbers)
    assert "--kv-memory" in str(error)
    assert pool.num_free == 2
    assert pool.budget.used_bytes == 3 * block
    pool.check(held)
    assert len(pool.allocate(2)) == 2


def test_check_finds_a_lost_a_shared_and_a_stolen_block(pool):
    blocks = pool.allocate(3)
    with pytest.raises(AssertionError, match="5 blocks, but 2 owned"):
        pool.check(blocks[:2])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([*blocks, blocks[0]])
    pool.free(blocks[:1])
    with pytest.raises(AssertionError, match="on the free list"):
        pool.check(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks[:1])


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


# --- segments of a store ---------------------------------------------------------------------


def test_append_that_does_not_fit_changes_nothing(tiers, layout):
    store = tiers(device=3, host=0)
    first, second = store.create(), store.create()
    store.append([first], [values_of(layout, 6)])
    before = store.gather(first, 6).clone()
    with pytest.raises(CapacityError):
        store.append([first, second], [values_of(layout, 4)], [3, 1])
    assert (first.length, second.length, second.blocks) == (6, 0, [])
    assert torch.equal(store.gather(first, 6), before)
    store.check()


def test_check_finds_a_leaked_and_a_surplus_block(tiers, layout):
    store = tiers(device=16, host=0)
    segment = store.create()
    store.append([segment], [values_of(layout, 9)])
    extra = store.pool.allocate(1)
    with pytest.raises(AssertionError, match="owned"):
        store.check()
    segment.blocks.extend(extra)
    store.check()
    store.trim(segment)
    store.check()
    assert len(segment.blocks) == 3
    store.pool.free([segment.blocks.pop()])
    with pytest.raises(AssertionError, match="9 tokens lack blocks"):
        store.check()


def test_a_path_is_cut_inside_between_and_before_its_parts(tiers):
    store = tiers(device=16, host=0)
    a, b = store.create(), store.create()
    path = (PathPart(a, 5), PathPart(b, 3))
    cut = [truncate_path(path, count) for count in (99, 8, 7, 5, 2, 0)]
    assert cut == [path, path, (path[0], PathPart(b, 2)), path[:1], (PathPart(a, 2),), ()]
    assert truncate_path((), 4) == ()


# --- page-locked -----------------------------------------------------------------------------


class Registry:
    """CUDA's register of locked memory: a page is in it once. refuses: from so many on."""

    def __init__(self, monkeypatch, refuses=99):
        self.held, self.refuses, self.stale_errors = {}, refuses, 0
        monkeypatch.setattr(streams, "_LOCKED_BYTES", 1)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch, "ones", self.launch)

    def launch(self, size, device):
        """A launch reports the last error, and clears it."""
        stale, self.stale_errors = self.stale_errors, 0
        if stale:
            raise RuntimeError("CUDA error: out of memory")
        return 1

    def cudaHostRegister(self, address, size, flags):
        assert address % mmap.PAGESIZE == 0
        if len(self.held) >= self.refuses:
            self.stale_errors = 1
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.held[address]


def locked(layout, num_blocks=2000):
    return BlockPool([layout], ByteBudget(num_blocks * layout.bytes_per_block), pinned=True)


def test_host_memory_is_locked_as_it_comes_into_use(layout, monkeypatch):
    registry = Registry(monkeypatch)
    pool = locked(layout)
    first = sum(registry.held.values())
    assert 0 < first < pool.storage.nbytes // 4
    blocks = pool.allocate(pool.num_blocks // 2)
    locked_bytes = sum(registry.held.values())
    assert len(blocks) * layout.bytes_per_block <= locked_bytes < pool.storage.nbytes
    pool.free(blocks)
    pool.allocate(len(blocks))
    assert sum(registry.held.values()) == locked_bytes, "what is locked is used again"
    ends = sorted((at, at + size) for at, size in registry.held.items())
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    del pool
    gc.collect()
    assert registry.held == {}


def test_memory_that_cannot_be_registered_is_pinned_by_torch(layout, monkeypatch):
    registry, asked = Registry(monkeypatch, refuses=0), []
    zeros = torch.zeros

    def pinning(*size, pin_memory=False, **options):
        asked.append(pin_memory)
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", pinning)
    pool = locked(layout)
    assert (asked, registry.held, registry.stale_errors) == ([True], {}, 0)
    pool.allocate(3)
    pool.block_memory(2).fill_(1)
    assert pool.storage[2].any()
    assert not pool.storage[:2].any()
