"""A tail that stays where it is holds what a plain tail holds."""

import pytest
import torch

from beamwright.kv import FixedTail, ScratchMeter, TailBuffer

CAPACITY = 64


def pair(layout, num_rows, expected=1):
    fixed = FixedTail(layout, CAPACITY, ScratchMeter())
    fixed.expect(expected)
    fixed.open(num_rows)
    return TailBuffer(layout, num_rows, CAPACITY, ScratchMeter()), fixed


def write(tails, layout, num_tokens, seed=0):
    """The same tokens to each; a fixed tail is told its length once per block, as bursts do."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        shape = (layout.num_layers, tails[0].num_rows, 2, layout.num_kv_heads, layout.head_dim)
        token = torch.randn(shape, generator=generator)
        for tail in tails:
            tail.make_room()
            if isinstance(tail, FixedTail) and tail.length % 16 == 0:
                tail.load()
            for layer, key_value in enumerate(token):
                tail.write(layer, key_value)
            if isinstance(tail, FixedTail):
                tail.count()
            tail.length += 1


def same(plain, fixed):
    assert (fixed.length, fixed.num_rows) == (plain.length, plain.num_rows)
    for row in range(plain.num_rows):
        assert torch.equal(fixed.take(row, 0, fixed.length), plain.take(row, 0, plain.length))


@pytest.mark.parametrize("expected", [1, 40])
def test_it_holds_the_same_through_growth_and_compaction(layout, expected):
    plain, fixed = pair(layout, 5, expected)
    write((plain, fixed), layout, 21)
    same(plain, fixed)
    assert int(fixed.counter) == 22
    for tail in (plain, fixed):
        tail.keep_rows(torch.tensor([4, 0, 2]))
    same(plain, fixed)
    fixed.load()
    write((plain, fixed), layout, CAPACITY - 21, seed=1)
    same(plain, fixed)
    assert fixed.full


def test_what_was_parked_is_put_back(layout):
    plain, fixed = pair(layout, 2)
    held = [torch.randn(layout.num_layers, 2, 35, layout.num_kv_heads, layout.head_dim)] * 2
    for tail in (plain, fixed):
        tail.restore(held)
    same(plain, fixed)


def test_its_address_changes_only_when_it_grows(layout):
    _, fixed = pair(layout, 8, expected=60)
    place, moves = fixed.storage.data_ptr(), fixed.num_moves
    for num_rows, expected in [(2, 64), (8, 3), (3, 33), (8, 64)]:
        fixed.close()
        fixed.expect(expected)
        fixed.open(num_rows)
        assert (fixed.storage.data_ptr(), fixed.num_moves) == (place, moves)
    fixed.open(9)
    assert fixed.num_moves == moves + 1


def test_its_bytes_are_counted_until_it_is_released(layout):
    scratch = ScratchMeter()
    fixed = FixedTail(layout, CAPACITY, scratch)
    fixed.open(4)
    assert scratch.used_bytes == fixed.num_bytes == fixed.storage.nbytes
    fixed.close()
    assert scratch.used_bytes == fixed.num_bytes
    fixed.release()
    assert (scratch.used_bytes, fixed.num_bytes) == (0, 0)
    fixed.open(4)
    assert scratch.used_bytes == fixed.storage.nbytes
