"""Two tiers under leases: pins, eviction, write-back, prefetch, copies; contents never change."""

import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.protocols import Direction
from kv.conftest import filled, values_of


def several(store, count, num_tokens=8):
    return dict(filled(store, num_tokens, seed) for seed in range(count))


def moved(store):
    return dict(store.host.link.bytes_moved)


def check_leased(store, expected, copies=1):
    for segment, values in expected.items():
        with store.lease({segment: copies}):
            assert len(segment.copies) >= copies
            for copy in range(len(segment.copies)):
                assert torch.equal(store.gather(segment, segment.length, copy), values)
        store.check()


def test_a_lease_pins_and_ends(tiers, layout):
    store = tiers(device=4)
    held, values = filled(store, 8, 0)
    other, _ = filled(store, 8, 1)
    with store.lease({held: 1}) as lease:
        third, _ = filled(store, 8, 2)
        assert (held.resident, other.resident) == (True, False)
        with pytest.raises(CapacityError), store.lease({other: 1, third: 1}):
            raise AssertionError("both cannot be there")
        assert third.resident, "what does not fit evicts nothing"
        assert torch.equal(store.gather(held, 8), values)
        lease.keep_only({})
        store.evict_all()
        assert not held.resident
    assert [segment.pins for segment in (held, other, third)] == [0, 0, 0]
    store.check()


def test_the_order_of_eviction(tiers, layout):
    """First what the round does not use, least recent first; then the farthest use first."""
    store = tiers(device=5)
    a, b, c, d, e = several(store, 5, num_tokens=4)
    for segment in (c, a, e, b, d):
        with store.lease({segment: 1}):
            pass
    store.announce_uses([[a], [c], [b, a]])
    gone = []
    for _ in range(5):
        store.reserve({store.create(): 4})  # a block without tokens is no candidate
        gone += [s for s in (a, b, c, d, e) if not s.resident and s not in gone]
        store.check()
    assert [segment.name for segment in gone] == [s.name for s in (e, d, b, c, a)]


def test_prefetch_takes_no_room_that_a_later_group_needs(tiers, layout):
    store = tiers(device=4)
    expected = several(store, 3)  # two blocks each: two of them fit
    first, second, third = expected
    assert [s.resident for s in expected] == [False, True, True]
    store.announce_uses([[first], [second, third]])
    store.prefetch_group({first: 1})
    assert [s.resident for s in expected] == [False, True, True]
    store.announce_uses([[first], [third]])
    store.prefetch_group({first: 1})
    assert [s.resident for s in expected] == [True, False, True]
    check_leased(store, {first: expected[first]})
    check_leased(store, expected)


def test_storing_for_a_group_stores_what_the_group_will_displace(tiers, layout):
    store = tiers(device=6)
    expected = several(store, 3)  # two blocks each: all fit
    _, second, third = expected
    fresh = store.create("fresh")
    store.announce_uses([[third]])
    store.store_for_group({third: 1}, [8], {second})
    assert [s.stored for s in expected] == [True, False, False], "the second one is growing"
    store.store_for_group({third: 1}, [8], ())
    assert [s.stored for s in expected] == [True, False, False], "room enough is stored"
    before = moved(store)
    store.reserve({fresh: 8})
    assert [s.resident for s in expected] == [False, True, True]
    assert moved(store) == before
    check_leased(store, expected)


@pytest.mark.parametrize("share_loads", [True, False])
def test_copies_per_beam(tiers, layout, share_loads):
    """Shared, a segment crosses once and is duplicated; else each copy crosses."""
    store = tiers(device=9, copies_per_beam=True, share_loads=share_loads)
    segment, values = filled(store, 7)
    store.write_back([segment])
    store.evict_all()
    check_leased(store, {segment: values}, copies=3)
    crossings = 1 if share_loads else 3
    assert moved(store)[Direction.H2D] == crossings * 2 * layout.bytes_per_block
    with store.lease({segment: 3}):
        assert len({b for blocks in segment.copies for b in blocks}) == 6
    filled(store, 8, 1)  # room enough only if spare copies go


def test_a_full_host_tier_is_named_and_loses_nothing(tiers, layout):
    store = tiers(device=4, host=3)
    expected = several(store, 2)
    late = store.create()
    with pytest.raises(CapacityError, match="host KV budget too small"):
        store.append([late], [values_of(layout, 16)])
    store.free(late)
    store.check()
    assert all(segment.resident for segment in expected)
    check_leased(store, expected)


def test_recompute_is_asked_parents_first_and_nothing_crosses(tiers, layout):
    store = tiers(device=4, recompute=True)
    expected = several(store, 2)
    values = {s: v.permute(2, 0, 1, 3, 4).clone() for s, v in expected.items()}
    asked = []

    def again(lost):
        asked.append(list(lost))
        given = [values[segment] for segment in lost]
        twins = [store.create() for _ in lost]
        store.append(twins, [torch.cat(given)], [*map(len, given)])
        for segment, twin in zip(lost, twins, strict=True):
            store.adopt_blocks(segment, twin)
            store.free(twin)

    store.recompute_segments = again
    parent, child = expected
    store.evict_all()
    with store.lease({parent: 1, child: 1}):
        assert all(torch.equal(store.gather(s, 8), v) for s, v in expected.items())
    assert asked == [[parent, child]]
    assert (store.counts.recomputed_tokens, moved(store)) == (16, {})
    store.check()
