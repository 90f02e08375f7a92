"""Layers in groups: blocks of equal bytes, and what a window leaves behind."""

import pytest
import torch

from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout, equalise_block_bytes
from beamwright.kv.segments import PathPart
from beamwright.kv.store import SegmentStore
from beamwright.plan.blocks import choose_block_size
from kv.conftest import values_of


@pytest.fixture
def store():
    """Of a group without a window, and of one with one."""
    groups = (KVLayout(count, 2, 8, torch.float32, window=w) for count, w in ((1, None), (5, 16)))
    return SegmentStore(BlockPool(equalise_block_bytes([*groups]), ByteBudget(1 << 20)))


@pytest.mark.parametrize("sizes", [[3, 5], [1, 26], [100, 300, 700], [7, 7, 9]])
def test_little_of_a_block_is_left_over(sizes):
    block_bytes, tokens = choose_block_size(sizes)
    assert all(count & (count - 1) == 0 for count in tokens)
    used = [count * size / block_bytes for count, size in zip(tokens, sizes, strict=True)]
    assert max(used) <= 1
    assert min(used) > 0.5


def draw(store, count):
    return [values_of(each, count, seed=count) for each in store.pool.layouts]


def test_what_is_written_of_each_group_is_read(store):
    segments = [store.create(), store.create()]
    written = [draw(store, count) for count in (21, 6)]
    for cut, lengths in ((slice(5), [5, 5]), (slice(5, None), [16, 1])):
        by_group = zip(*written, strict=True)
        store.append(segments, [torch.cat([p[cut] for p in parts]) for parts in by_group], lengths)
    for segment, values in zip(segments, written, strict=True):
        for held, part in zip(store.read_tokens(segment, 2, len(values[0])), values, strict=True):
            assert torch.equal(held, part.permute(1, 2, 0, 3, 4)[:, :, 2:])
    blocks = [
        -(-21 // each.group.block_tokens) + -(-6 // each.group.block_tokens)
        for each in segments[0].group_segments
    ]
    assert store.pool.num_blocks - store.pool.num_free == sum(blocks)
    store.check()
    for segment in segments:
        store.free(segment)
    store.check()
    assert (store.num_segments, store.pool.budget.used_bytes) == (0, 0)


def chain(store, lengths):
    segments = [store.create() for _ in lengths]
    by_group = zip(*[draw(store, count) for count in lengths], strict=True)
    store.append(segments, [*map(torch.cat, by_group)], lengths)
    return tuple(PathPart(s, n) for s, n in zip(segments, lengths, strict=True))


def test_what_no_window_reaches_is_freed_and_keeps_its_length(store):
    path = chain(store, [12, 8])
    segment, before = path[0].segment, store.pool.num_free
    full, windowed = segment.group_segments
    with store.lease({windowed: 1}):
        store.free_window(segment, 16)
        assert not windowed.out_of_window
    store.free_window(segment, 64)  # of other layers
    assert store.pool.num_free == before
    store.free_window(segment, 16)
    assert windowed.out_of_window
    assert (windowed.length, windowed.copies, full.out_of_window) == (12, [], False)
    assert store.pool.num_free == before + windowed.blocks_for(12)
    assert store.held_bytes == store.pool.budget.used_bytes
    store.check()
    store.free(segment)
    store.check()
