"""Layers in groups: blocks of equal bytes, who is read, and what a window leaves behind."""

import pytest
import torch

from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout, group_layouts
from beamwright.kv.segments import PathPart, segments_read, whole, within_reach
from beamwright.kv.store import SegmentStore
from beamwright.plan.costs import group_blocks
from kv.conftest import values_of


@pytest.fixture
def store():
    """Of a group without a window, and of one with one."""
    groups = (KVLayout(count, 2, 8, torch.float32, window=w) for count, w in ((1, None), (5, 16)))
    return SegmentStore(BlockPool(group_layouts([*groups]), ByteBudget(1 << 20)))


@pytest.mark.parametrize("sizes", [[3, 5], [1, 26], [100, 300, 700], [7, 7, 9]])
def test_little_of_a_block_is_left_over(sizes):
    block_bytes, tokens = group_blocks(sizes)
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
        for held, part in zip(store.held(segment, 2, len(values[0])), values, strict=True):
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


def test_a_window_reaches_the_last_parts_alone(store):
    path = chain(store, [10, 9, 8, 7])
    first, second, third, fourth = (part.segment.group_segments for part in path)
    assert [part.segment for part in within_reach(path, 0)] == [part.segment for part in path]
    # The next token sees 15 before it: 7 + 8 of them are the last two parts'.
    assert [part.segment for part in within_reach(path, 1)] == [third[1], fourth[1]]
    own = (*path[:3], PathPart(path[3].segment, 7, own=True))
    seen = [part.segment for part in within_reach(own, 1)]
    assert seen == [second[1], third[1], fourth[1]]  # from where its own tokens begin
    assert segments_read(path) == [first[0], second[0], third[0], fourth[0], third[1], fourth[1]]
    assert whole({first[0]: 3}) == {first[0]: 3, first[1]: 3}


def test_what_no_window_reaches_is_freed_and_keeps_its_length(store):
    path = chain(store, [12, 8])
    segment, before = path[0].segment, store.pool.num_free
    full, windowed = segment.group_segments
    with store.lease({windowed: 1}):
        store.forget(segment, 16)
        assert not windowed.gone
    store.forget(segment, 64)  # of other layers
    assert store.pool.num_free == before
    store.forget(segment, 16)
    assert windowed.gone
    assert (windowed.length, windowed.copies, full.gone) == (12, [], False)
    assert store.pool.num_free == before + windowed.blocks_for(12)
    assert store.held_bytes == store.pool.budget.used_bytes
    store.check()
    store.free(segment)
    store.check()
