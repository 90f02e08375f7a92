"""A tail all of whose layers are resident: what is read and taken is what was written."""

import pytest
import torch

from beamwright.kv.link import StreamLink
from beamwright.kv.pool import KVLayout, ScratchMeter
from beamwright.layerwise.tail import LayeredTail
from streams import EagerStreams

CAPACITY = 50


@pytest.fixture
def layout():
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32, block_tokens=4)


def filled(layout, num_rows, num_tokens, scratch=None):
    """A tail and what was written: [tokens, layers, rows, 2, kv_heads, head_dim]."""
    link, device = StreamLink(EagerStreams()), torch.device("cpu")
    tail = LayeredTail(layout, CAPACITY, scratch or ScratchMeter(), device, link)
    tail.arrange([], num_rows)
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, layout.num_layers, num_rows, 2, layout.num_kv_heads, layout.head_dim)
    written = torch.randn(shape, generator=generator)
    for number, token in enumerate(written):
        tail.begin([number] * num_rows, 1)
        tail.make_room()
        for layer, key_value in enumerate(token):
            tail.write(layer, key_value)
        tail.advance()
    return tail, written


def taken(tail, row, first, end):
    found = tail.take(row, first, end)
    assert (found.num_tokens, found.on_host.shape[1]) == (end - first, 0)
    return found.on_device


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 33, CAPACITY])
def test_reading_includes_the_token_that_is_being_decoded(layout, num_tokens):
    tail, written = filled(layout, 3, num_tokens)
    tail.length -= 1
    keys, values = tail.read(1)
    assert keys.shape == (3, layout.num_kv_heads, num_tokens, layout.head_dim)
    assert torch.equal(keys, written[:, 1, :, 0].permute(1, 2, 0, 3))
    assert torch.equal(values, written[:, 1, :, 1].permute(1, 2, 0, 3))
    assert (tail.places.tolist(), tail.mask) == ([num_tokens - 1] * 3, None)


def test_a_row_is_taken_in_the_order_of_the_pool(layout):
    tail, written = filled(layout, 3, 20)
    assert torch.equal(taken(tail, 2, 5, 18), written[5:18, :, 2])


def test_rows_are_dropped_and_reordered(layout):
    tail, written = filled(layout, 4, 3)
    tail.arrange([3, 1], 2)
    assert tail.num_rows == 2
    assert torch.equal(taken(tail, 0, 0, 3), written[:, :, 3])
    assert torch.equal(taken(tail, 1, 0, 3), written[:, :, 1])


def test_it_is_full_at_its_capacity_and_can_begin_anew(layout):
    tail, _ = filled(layout, 1, CAPACITY - 1)
    assert tail.length < tail.num_tokens == CAPACITY
    tail.advance()
    assert tail.length == CAPACITY
    tail.begin([0], 1)
    assert (tail.length, tail.num_tokens) == (0, CAPACITY)


def test_rows_of_other_lengths_are_a_bug(layout):
    """They would be written to the same place."""
    tail, _ = filled(layout, 3, 5)
    tail.begin([5, None, 5], 16)
    for lengths in ([5, 0, 5], [4, 4, 4], [None, 6, 6]):
        with pytest.raises(AssertionError, match="begin together"):
            tail.begin(lengths, 1)
    with pytest.raises(AssertionError, match="parked"):
        tail.restore(0, torch.zeros(2, 2, 1, 3, 5))


@pytest.mark.parametrize("leave", [LayeredTail.close, LayeredTail.release])
def test_its_bytes_are_counted_exactly_until_it_is_closed(layout, leave):
    scratch = ScratchMeter()
    tail, _ = filled(layout, 3, 40, scratch)
    assert scratch.used_bytes == tail.num_bytes == CAPACITY * 3 * layout.bytes_per_token
    tail.arrange([0], 1)
    assert scratch.used_bytes == tail.num_bytes == CAPACITY * layout.bytes_per_token
    leave(tail)
    leave(tail)
    assert scratch.used_bytes == tail.num_bytes == 0
    assert scratch.peak_bytes > 0


def test_a_closed_tail_is_as_a_fresh_one(layout):
    """A session has one for all the rows that come and go."""
    tail, _ = filled(layout, 5, 40)
    tail.left, tail.resident = True, 1
    tail.close()
    fresh = LayeredTail(layout, CAPACITY, tail._scratch, tail._device, tail._link)
    assert vars(tail) == vars(fresh)
