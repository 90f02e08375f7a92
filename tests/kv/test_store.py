import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.kv.segments import PathPart, truncate_path


def key_values(layout, num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("pieces", [[1], [4], [5], [3, 1], [3, 2], [4, 4], [1, 7, 1, 6], [9, 0, 2]])
def test_what_is_appended_is_gathered_across_block_borders(make_store, layout, pieces):
    store = make_store()
    segment, other = store.create(), store.create()
    written = []
    for seed, length in enumerate(pieces):
        values = key_values(layout, length, seed)
        store.append([segment, other], [values, -values])  # their blocks interleave
        written.append(values)
        store.check()
    whole = torch.cat(written)
    assert segment.length == len(whole) == sum(pieces)
    for visible in range(1, len(whole) + 1):
        expected = whole[:visible].permute(1, 2, 0, 3, 4)
        assert torch.equal(store.gather(segment, visible), expected)
        assert torch.equal(store.gather(other, visible), -expected)


def test_every_segment_starts_a_fresh_block(make_store, layout):
    store = make_store()
    segments = [store.create() for _ in range(3)]
    store.append(segments, [key_values(layout, 1)] * 3)
    assert len({segment.blocks[0] for segment in segments}) == 3
    assert store.pool.budget.used_bytes == 3 * layout.bytes_per_block


def test_append_that_does_not_fit_changes_nothing(make_store, layout):
    store = make_store(num_blocks=3)
    first, second = store.create(), store.create()
    store.append([first], [key_values(layout, 6)])
    before = store.gather(first, 6).clone()
    with pytest.raises(CapacityError):
        store.append([first, second], [key_values(layout, 3, 1), key_values(layout, 1, 2)])
    assert (first.length, second.length, second.blocks) == (6, 0, [])
    assert torch.equal(store.gather(first, 6), before)
    store.check()


def test_a_freed_segment_gives_its_blocks_back_once(make_store, layout):
    store = make_store()
    segment = store.create()
    store.append([segment], [key_values(layout, 9)])
    store.free(segment)
    assert store.num_segments == 0
    assert store.pool.budget.used_bytes == 0
    store.check()
    with pytest.raises(AssertionError, match="freed twice"):
        store.free(segment)


def test_check_finds_a_leaked_and_a_surplus_block(make_store, layout):
    store = make_store()
    segment = store.create()
    store.append([segment], [key_values(layout, 9)])
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


def test_a_path_is_cut_inside_between_and_before_its_parts(make_store):
    store = make_store()
    a, b = store.create(), store.create()
    path = (PathPart(a, 5), PathPart(b, 3))
    assert truncate_path(path, 8) == path
    assert truncate_path(path, 99) == path
    assert truncate_path(path, 7) == (PathPart(a, 5), PathPart(b, 2))
    assert truncate_path(path, 5) == (PathPart(a, 5),)
    assert truncate_path(path, 2) == (PathPart(a, 2),)
    assert truncate_path(path, 0) == ()
    assert truncate_path((), 4) == ()
