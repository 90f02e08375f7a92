"""Tails in one tensor: memory that stays, and lengths that give the same sums. What is read of
each row, `attention/test_backends.py` compares with the oracle."""

import pytest
import torch

from beamwright.kv.pool import KVBlockView, ScratchMeter
from beamwright.kv.store import KVReader
from beamwright.kv.tails import RowTails, padded_path, padded_tail


def test_memory_that_stays_keeps_its_addresses_and_no_numbers_of_before(layout):
    """A captured step holds the addresses; NaN times a weight of zero is NaN."""
    kv = KVReader(KVBlockView(layout, torch.empty(0)), torch.device("cpu"), ScratchMeter())
    tails = RowTails(kv, 80, stays=True)

    def memory():
        parts = tails.storage, tails.places, tails.counts
        return [part.data_ptr() for part in parts], tails.num_moves

    tails.arrange([], 8)
    tails.set_lengths([70] * 8, 1)
    before = memory()
    tails.storage.fill_(torch.nan)
    tails.close()
    tails.arrange([], 3)
    tails.set_lengths([2, None, 7], 16)
    for _ in range(16):
        tails.advance()
    assert memory() == before
    assert all(part.isfinite().all() for part in tails.read(0))
    assert tails.places.tolist() == [18, 16, 23], "a row that has left has places, too"
    tails.arrange(range(3), 9)
    assert tails.num_moves > before[1]


# --- padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 5, 8, 16, 25, 26, 64, 128])
@pytest.mark.parametrize(("padded", "most"), [(padded_tail, 256), (padded_path, 2000)])
def test_lengths_are_few_and_hold_all_tokens(padded, most, head_dim):
    for count in range(1, most + 1):
        length = padded(count, head_dim)
        assert length % 16 == 0
        assert padded(length, head_dim) == length >= count
        assert length * head_dim > 400, "torch has a routine of its own for less"
        assert head_dim < 26 or length < 2 * count + 16


@pytest.mark.parametrize(("padded", "most"), [(padded_tail, 256), (padded_path, 700)])
@pytest.mark.parametrize("head_dim", [8, 20, 64])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_zeros_behind_a_rows_keys_do_not_change_its_sums(padded, most, head_dim, group):
    """On the machine at hand, in float32: products and sums as attention takes them."""
    generator = torch.Generator().manual_seed(0)
    lengths = sorted({padded(count, head_dim) for count in range(1, most + 1)})
    size = lengths[-1]
    query, keys, values = (
        torch.randn(8, tokens, head_dim, generator=generator) for tokens in (group, size, size)
    )
    weights = torch.rand(8, group, size, generator=generator)
    for count in (3, 16, 33, 64, 65, 128, 129, 192, 193, 256):
        found = []
        for length in (each for each in lengths if each >= padded(count, head_dim)):
            own = torch.zeros(8, group, length)
            own[..., :count] = weights[..., :count]
            scores = torch.bmm(query, keys[:, :length].contiguous().transpose(1, 2))
            context = torch.bmm(own, values[:, :length].contiguous())
            found.append((context, scores[..., :count], own.sum(-1)))
        for others in found[1:]:
            assert all(map(torch.equal, found[0], others)), (count, len(found))
