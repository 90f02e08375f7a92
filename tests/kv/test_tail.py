import pytest
import torch

from beamwright.kv import ScratchMeter, TailBuffer

CAPACITY = 50


def filled(layout, num_rows, num_tokens, scratch=None):
    """A tail and what was written: [tokens, layers, rows, 2, kv_heads, head_dim]."""
    tail = TailBuffer(layout, num_rows, CAPACITY, scratch or ScratchMeter())
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, layout.num_layers, num_rows, 2, layout.num_kv_heads, layout.head_dim)
    written = torch.randn(shape, generator=generator)
    for token in written:
        tail.make_room()
        for layer, key_value in enumerate(token):
            tail.write(layer, key_value)
        tail.length += 1
    return tail, written


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 33, CAPACITY])
def test_reading_includes_the_token_that_is_being_decoded(layout, num_tokens):
    tail, written = filled(layout, 3, num_tokens)
    tail.length -= 1
    keys, values = tail.read(1)
    assert keys.shape == (3, layout.num_kv_heads, num_tokens, layout.head_dim)
    assert torch.equal(keys, written[:, 1, :, 0].permute(1, 2, 0, 3))
    assert torch.equal(values, written[:, 1, :, 1].permute(1, 2, 0, 3))


def test_a_row_is_taken_in_the_order_of_the_pool(layout):
    tail, written = filled(layout, 3, 20)
    assert torch.equal(tail.take(2, 5, 18), written[5:18, :, 2])


def test_rows_are_dropped_and_reordered(layout):
    tail, written = filled(layout, 4, 3)
    tail.keep_rows(torch.tensor([3, 1]))
    assert tail.num_rows == 2
    assert torch.equal(tail.take(0, 0, 3), written[:, :, 3])
    assert torch.equal(tail.take(1, 0, 3), written[:, :, 1])


def test_it_is_full_at_its_capacity_and_can_be_cleared(layout):
    tail, _ = filled(layout, 1, CAPACITY - 1)
    assert not tail.full
    tail.length += 1
    assert tail.full
    tail.clear()
    assert (tail.length, tail.full) == (0, False)


def test_its_bytes_are_counted_exactly_until_it_is_closed(layout):
    scratch = ScratchMeter()
    tail, _ = filled(layout, 3, 40, scratch)
    assert scratch.used_bytes == tail.storage.numel() * 4
    tail.keep_rows(torch.tensor([0]))
    assert scratch.used_bytes == tail.storage.numel() * 4
    tail.close()
    tail.close()
    assert scratch.used_bytes == 0
    assert scratch.peak_bytes > 0


@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_what_was_parked_is_read_as_if_it_had_never_left(layout, num_tokens):
    tail, written = filled(layout, 3, num_tokens)
    fresh = TailBuffer(layout, 3, CAPACITY, ScratchMeter())
    fresh.restore([written[:, :, row].permute(1, 2, 0, 3, 4) for row in range(3)])
    assert fresh.length == tail.length
    tail.length -= 1
    fresh.length -= 1
    for layer in range(layout.num_layers):
        for there, here in zip(fresh.read(layer), tail.read(layer), strict=True):
            assert torch.equal(there, here)
