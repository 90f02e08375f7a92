import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.kv.segments import PathPart, truncate_path
from kv.conftest import values_of


@pytest.mark.parametrize("pieces", [[1], [4], [5], [3, 1], [3, 2], [4, 4], [1, 7, 1, 6], [9, 0, 2]])
def test_what_is_appended_is_gathered_across_block_borders(tiers, layout, pieces):
    store = tiers(device=16, host=0)
    segment, other = store.create(), store.create()
    written = []
    for seed, length in enumerate(pieces):
        values = values_of(layout, length, seed)
        both = torch.cat([values, -values])
        store.append([segment, other], [both], [length] * 2)  # their blocks interleave
        written.append(values)
        store.check()
    whole = torch.cat(written)
    assert segment.length == len(whole) == sum(pieces)
    for visible in range(1, len(whole) + 1):
        expected = whole[:visible].permute(1, 2, 0, 3, 4)
        assert torch.equal(store.gather(segment, visible), expected)
        assert torch.equal(store.gather(other, visible), -expected)


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
    assert truncate_path(path, 8) == path
    assert truncate_path(path, 99) == path
    assert truncate_path(path, 7) == (PathPart(a, 5), PathPart(b, 2))
    assert truncate_path(path, 5) == (PathPart(a, 5),)
    assert truncate_path(path, 2) == (PathPart(a, 2),)
    assert truncate_path(path, 0) == ()
    assert truncate_path((), 4) == ()
