"""States that a step reads and writes in their blocks, as kernels do: captured, and equal trees."""

import pytest
import torch

from engines import assert_nothing_allocated, grow
from recurring import Recurring, load_recurring
from tape import FixedAttention, put_on_tape

SIZES = {"dtype": "float64", "n": 8, "width": 2, "max_rounds": 4}


class InPlace(Recurring):
    """`Recurring` that knows of a decoded row no more than tables say.

    wrong: rows whose state was another token's; a captured step cannot look.
    """

    steps_in_place = True

    def hidden(self, token_ids, positions, view, read=None):
        states = getattr(view, "states", None)
        if states is None or states.lengths is not None:
            return super().hidden(token_ids, positions, view, read)
        found = self._inner.hidden(token_ids, positions, view)
        parts = states.placed(self._layer)
        counts, sums = (self._read(parts[kind]) for kind in ("conv", "recurrent"))
        ways = parts["conv"].blocks.ways
        self.wrong += ((counts[:, 0].long() != positions) & (ways > 0)).sum()
        total = sums * self._decay + found.float()[:, None]
        self._write(parts["conv"], counts + 1)
        self._write(parts["recurrent"], total)
        return found + self._out(total).to(found.dtype)

    def _read(self, part):
        size = self._size(part)
        records = part.blocks.storage[part.blocks.sources.long()].flatten(1)
        values = bytes_of(records, part, size).contiguous().view(part.dtype).unflatten(1, size)
        begun = (part.blocks.ways == 2).view(-1, *[1] * len(size))
        return torch.where(begun, values, torch.zeros_like(values))

    def _write(self, part, values):
        storage, _, targets, ways = part.blocks
        fresh = values.to(part.dtype).flatten(1).contiguous().view(torch.uint8)
        for row, own in enumerate(targets.long()):  # idle rows name others' blocks
            record = storage[own].flatten()[None]
            place = bytes_of(record, part, self._size(part))
            place.copy_(torch.where(ways[row] > 0, fresh[row], place))
            storage.index_copy_(0, own, record.view(len(own), -1))

    def _size(self, part):
        sizes = {each.wide: each.size for each in self.shape.states}
        return sizes[part.offset == 0]  # the recurrent part is in front


def bytes_of(records, part, size):
    count = torch.Size(size).numel() * part.dtype.itemsize
    return records[:, part.offset : part.offset + count]


@pytest.fixture
def solvers(make_solver, monkeypatch):
    """Makes solvers whose states are read and written by their host, or in place."""

    def make(*, in_place, **options):
        def load(*args, **kwargs):
            loaded = load_recurring(*args, **kwargs)
            if in_place:
                loaded.decoder.__class__ = InPlace
                loaded.decoder.wrong = torch.zeros((), dtype=torch.long)
            return loaded

        monkeypatch.setattr("beamwright.solver.machinery.load_model", load)
        return make_solver(**{**SIZES, **options})

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 3},
        {"step_tokens": 20, "max_tokens": 70, "ignore_eos": True, "n": 4},
        {"search": "lookahead", "lookahead": 2, "max_rounds": 3, "n": 4},
    ],
    ids=str,
)
def test_a_replayed_step_finds_states_by_tables(solvers, monkeypatch, options):
    with solvers(in_place=False, **options) as solver:
        expected, tree = grow(solver)
    with solvers(in_place=True, graphs="on", **options) as solver:
        replay = put_on_tape(monkeypatch, solver, FixedAttention(solver.generator.backend))
        solution, found = grow(solver)
        assert solution.tree_hash == expected.tree_hash
        assert [n.text for n in found.nodes()] == [n.text for n in tree.nodes()]
        assert replay.num_played > 10
        assert not solver.generator.decoder.wrong
        assert_nothing_allocated(solver)


def test_states_that_the_host_moves_are_not_captured(solvers):
    for in_place in (False, True):
        with solvers(in_place=in_place, graphs="on") as solver:
            assert (solver._machinery.batch._rows._stays) == in_place
