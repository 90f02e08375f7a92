"""Tails of different lengths in one tensor: what is read of each row is what it wrote."""

import random

import pytest
import torch

from beamwright.kv.pool import KVBlocks, ScratchMeter
from beamwright.kv.store import KVReader
from beamwright.kv.tails import RowTails, padded_path, padded_tail

CAPACITY = 80
CPU = torch.device("cpu")


class Plain:
    """The same rows, each a list of tokens [layers, 2, kv_heads, head_dim] of its own."""

    def __init__(self, layout, scratch=None, **how):
        self.layout, self.rows = layout, []
        kv = KVBlocks(layout, torch.empty(0))
        self.tails = RowTails(KVReader(kv, CPU, scratch or ScratchMeter()), CAPACITY, **how)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, *size):
        return torch.randn(size, generator=self.generator)

    def arrange(self, kept, restored=()):
        """Keep rows, then take in rows that hold so many tokens."""
        self.tails.arrange(kept, len(kept) + len(restored))
        self.rows = [self.rows[row] for row in kept]
        layout = self.layout
        for count in restored:
            held = self.draw(layout.num_layers, 2, count, layout.num_kv_heads, layout.head_dim)
            self.tails.restore(len(self.rows), [held])
            self.rows.append(list(held.unbind(2)))

    def decode(self, num_tokens, max_tokens=None):
        """As a session does: the host says once where each row is, then the device counts."""
        layout = self.layout
        self.tails.begin([len(row) for row in self.rows], max_tokens or num_tokens)
        for _ in range(num_tokens):
            shape = (len(self.rows), layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
            drawn = self.draw(*shape)
            for row, token in zip(self.rows, drawn, strict=True):
                row.append(token)
            for layer in range(layout.num_layers):
                self.tails.write(layer, drawn[:, layer])
            self.check_read()
            self.tails.advance()

    def check_read(self):
        """The current token, which is the last one of every row, is read like the others."""
        tails, layout = self.tails, self.layout
        assert tails.num_rows == len(self.rows)
        assert tails.places.tolist() == [len(row) - 1 for row in self.rows]
        assert tails.counts.tolist() == [len(row) for row in self.rows]
        assert (tails.counts.dtype, tails.mask.dtype) == (torch.int32, layout.dtype)
        seen = torch.arange(tails.num_tokens) < torch.tensor([[len(row)] for row in self.rows])
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        assert torch.equal(tails.mask.expand(len(self.rows), 1, 1, -1), mask[:, None, None])
        for layer in range(layout.num_layers):
            for which, found in enumerate(tails.read(layer)):
                assert found.isfinite().all(), "what is masked must be a number"
                for row, held in enumerate(self.rows):
                    expected = torch.stack([token[layer, which] for token in held], dim=1)
                    assert torch.equal(found[row, :, : len(held)], expected)

    def check_taken(self, first=0):
        for row, held in enumerate(self.rows):
            if len(held) > first:
                taken = self.tails.take([(row, first, len(held))])[0]
                assert torch.equal(taken, torch.stack(held[first:]))


@pytest.mark.parametrize("stays", [False, True])
def test_rows_of_any_lengths_join_and_leave(layout, stays):
    """Every token of every row is read and taken as it was written, through all of it."""
    rng, plain = random.Random(0), Plain(layout, stays=stays)
    plain.arrange([], [0, 0, 0])
    plain.decode(5)
    for _ in range(30):
        staying = [row for row, held in enumerate(plain.rows) if len(held) < CAPACITY - 8]
        kept = rng.sample(staying, rng.randint(0, len(staying)))
        if rng.random() < 0.5:  # those in front stay in place
            kept = sorted(kept)
        fresh = [rng.choice([0, 1, 15, 16, 33, 64, 71]) for _ in range(rng.randint(0, 3))]
        plain.arrange(kept, fresh if kept or fresh else [0])
        plain.check_taken()
        plain.decode(rng.randint(1, 8), max_tokens=8)
        plain.check_taken(first=3)
    plain.tails.close()


def test_rows_that_have_left_stay_inside(layout):
    """They go on being written where there is a place for every token of the iteration."""
    plain = Plain(layout)
    plain.arrange([], [2, CAPACITY - 1, 7])
    tails = plain.tails
    tails.begin([2, None, 7], 16)
    for _ in range(16):
        tails.write(0, torch.ones(3, 2, layout.num_kv_heads, layout.head_dim))
        tails.advance()
    assert tails.places.tolist() == [18, 16, 23]
    tails.begin([5, None, 5], 3)
    assert tails.places.tolist() == [5, 5, 5]


# --- what is masked --------------------------------------------------------------------------


def spoil(plain):
    """Every place in the memory holds NaN, as after rows whose logits were NaN."""
    plain.tails.storage.fill_(torch.nan)


@pytest.mark.parametrize("stays", [False, True])
def test_a_row_that_joins_reads_nothing_of_the_one_before_it(layout, stays):
    """NaN times a weight of zero is NaN: places that a row has not written hold zeros."""
    plain = Plain(layout, stays=stays)
    plain.arrange([], [0, 30, 3])
    plain.decode(2)
    plain.tails.storage[:, :, 2] = torch.nan
    plain.arrange([1, 0], [4])
    plain.decode(2)
    plain.tails.close()
    plain.rows = []
    plain.arrange([], [0, 40])
    plain.decode(1)
    spoil(plain)
    plain.tails.close()
    plain.rows = []
    plain.arrange([], [1, 0, 0])
    plain.decode(1)


# --- memory ----------------------------------------------------------------------------------


def test_its_addresses_change_only_when_it_grows(layout):
    """A captured step holds them."""
    plain = Plain(layout, stays=True)
    tails = plain.tails

    def addresses():
        return (tails.storage.data_ptr(), tails.places.data_ptr(), tails.counts.data_ptr())

    plain.arrange([], [70] * 8)
    plain.decode(1)
    places, moves = addresses(), tails.num_moves
    for kept, fresh in [([3], [1] * 7), ([0, 5], []), ([1, 0], [16] * 6), ([], [0])]:
        plain.arrange(kept, fresh)
        plain.decode(2)
        assert (addresses(), tails.num_moves) == (places, moves)
        plain.check_taken()
    tails.close()
    plain.rows = []
    plain.arrange([], [0] * 8)
    plain.decode(3)
    assert (addresses(), tails.num_moves) == (places, moves)
    plain.arrange(range(8), [0])
    assert tails.num_moves > moves
    plain.decode(1)


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
