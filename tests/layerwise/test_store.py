"""Segments parted by layers: what resides where, and that it is the same KV on either side."""

import pytest
import torch

from beamwright.kv.link import StreamLink
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.layerwise.store import LayeredStore
from beamwright.layerwise.tail import LayeredTail, LayeredTokens
from beamwright.protocols import Direction
from streams import EagerStreams


@pytest.fixture
def layout():
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32, block_tokens=4)


@pytest.fixture
def link():
    return StreamLink(EagerStreams())


@pytest.fixture
def store(layout, link):
    pool = BlockPool(layout, ByteBudget(16 * layout.bytes_per_block))
    return LayeredStore(pool, torch.device("cpu"), link, ByteBudget(1 << 30))


def tokens(layout, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (count, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return torch.randn(size, generator=generator)


def split(values, resident, num_before=0):
    return LayeredTokens(values[num_before:, :resident], values[:, resident:], num_before)


def held(store, segment):
    return store.gather(segment, segment.length).permute(2, 0, 1, 3, 4)


def move(store, link, segment, layer, visible=None):
    pieces = list(store.leave(segment, visible or segment.length, layer))
    return link.submit(Direction.D2H, "store", pieces)


def test_whole_tokens_reside_on_the_device_until_they_leave(store, layout, link):
    segment, values = store.create(), tokens(layout, 6)
    store.append([segment], [values])
    assert (store.device_layers(segment), store.host_from(segment)) == (2, 2)
    assert torch.equal(held(store, segment), values)
    link.wait([move(store, link, segment, 1)])
    store.drop_layers(segment, 1)
    assert (store.device_layers(segment), store.host_from(segment)) == (1, 1)
    assert torch.equal(held(store, segment), values)
    assert torch.equal(store.host_layer(segment, 6, 1), values[:, 1])
    assert link.bytes_moved[Direction.D2H] == 6 * layout.bytes_per_token // 2


def test_bytes_of_a_leaving_layer_are_those_of_the_tokens_that_are_seen(store, layout, link):
    segment = store.create()
    store.append([segment], [tokens(layout, 6)])
    pieces = list(store.leave(segment, 5, 1))
    token_bytes = layout.bytes_per_token // 2
    assert [piece.num_bytes for piece in pieces] == [4 * token_bytes, token_bytes]
    assert list(store.leave(segment, 5, 2)) == [], "there is no such layer on the device"


@pytest.mark.parametrize("resident", [0, 1, 2])
def test_tokens_go_where_their_layers_reside(store, layout, resident):
    segment, values = store.create(), tokens(layout, 11)
    for part in values.split([3, 1, 7]):
        store.append([segment], [split(part, resident)])
    assert torch.equal(held(store, segment), values)
    assert store.device_layers(segment) == store.host_from(segment) == resident
    store.check()


def test_older_tokens_of_a_tail_are_written_back_with_the_layers_that_left(store, layout):
    segment, values = store.create(), tokens(layout, 7)
    store.append([segment], [split(values[:4], 2)])
    store.append([segment], [split(values, 1, num_before=4)])
    assert (store.device_layers(segment), store.host_from(segment)) == (1, 1)
    assert torch.equal(held(store, segment), values)


def test_new_tokens_of_layers_that_the_older_ones_lack_are_written_back(store, layout, link):
    segment, values = store.create(), tokens(layout, 7)
    store.append([segment], [split(values[:4], 1)])
    store.append([segment], [split(values[4:], 2)])
    assert (store.device_layers(segment), store.host_from(segment)) == (1, 1)
    assert torch.equal(held(store, segment), values)
    assert link.bytes_moved[Direction.D2H] == 3 * layout.bytes_per_token // 2


def test_a_layer_that_came_back_is_on_the_host_too(store, layout, link):
    one, two = store.create(), store.create()
    values = tokens(layout, 6)
    store.append([one, two], [split(values, 1), split(values, 1)])
    store.add_layer(one, store.host_layer(one, 6, 1))
    link.wait(store.bring([one, two], 2))
    assert link.bytes_moved[Direction.H2D] == 6 * layout.bytes_per_token // 2, "only of the other"
    for segment in (one, two):
        assert (store.device_layers(segment), store.host_from(segment)) == (2, 1)
        assert torch.equal(store.device_layer(segment, 5, 1), values[:5, 1])


def test_landed_layers_are_taken_from_where_they_landed(store, layout, link):
    first, second = store.create(), store.create()
    values = tokens(layout, 5)
    landed = values[:, 1] + 1
    store.landing = {1: (landed, link.submit(Direction.D2H, "store", []))}
    store.append([first, second], list(values.split([2, 3])))
    for segment, part in ((first, slice(0, 2)), (second, slice(2, 5))):
        assert store.device_layers(segment) == 1
        assert torch.equal(store.host_layer(segment, segment.length, 1), landed[part])
        assert torch.equal(store.device_layer(segment, segment.length, 0), values[part, 0])


def test_a_cleared_segment_begins_anew(store, layout):
    segment = store.create()
    store.append([segment], [split(tokens(layout, 3), 0)])
    store.clear(segment)
    values = tokens(layout, 5, seed=1)
    store.append([segment], [values])
    assert store.device_layers(segment) == 2
    assert torch.equal(held(store, segment), values)


def test_a_tail_keeps_real_rows_and_says_what_resides_where(store, layout):
    tail = store.make_tail(64)
    assert isinstance(tail, LayeredTail)
    tail.arrange([], 8)
    tail.count_rows(3)
    values = tokens(layout, 4 * 20).view(20, 4, *tokens(layout, 1).shape[1:])
    tail.resident = 1
    for step in range(20):
        tail.make_room()
        tail.device_layer(0)[step] = values[step, :3, 0]
        tail.host_layer(1)[step] = values[step, :3, 1]
        tail.advance()
    assert (tail.num_rows, tail.length, store.scratch.used_bytes > 0) == (8, 20, True)
    tail.arrange([2, 0, 5], 3)
    tail.count_rows(2)
    for row, was in enumerate([2, 0]):
        taken = tail.take(row, 16, 20)
        assert (taken.num_tokens, taken.num_before) == (4, 0)
        assert torch.equal(taken.on_device[:, 0], values[16:, was, 0])
        assert torch.equal(taken.on_host[:, 0], values[16:, was, 1])
    tail.left = True
    assert tail.take(0, 16, 20).on_host.shape[0] == 20
    tail.begin([0, 0, None], 1)
    assert (tail.length, tail.left) == (0, False)
    tail.close()
    assert store.scratch.used_bytes == 0
