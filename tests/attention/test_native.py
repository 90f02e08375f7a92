"""Attention by the library: bits follow from a row's tokens alone. What they are, `test_backends`
compares with the reference."""

from itertools import chain

import pytest
import torch

from attention.conftest import largest_difference, plain_softmax
from beamwright.attention import tree
from beamwright.kv.segments import PathPart
from beamwright.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="built without a C compiler")
HOW = {"dtype": torch.float32, "rows": 9}
KINDS = [{}, {"window": 20}, {"softcap": 2.0}, {"group": 1, "kv_heads": 5}, {"group": 12}]


def same(found, expected):
    return all(map(torch.equal, chain(*found), chain(*expected)))


def test_of_bfloat16_sums_in_float32(make_forest):
    forest, rows = make_forest(4, dtype=torch.bfloat16, rows=9), list(range(9))
    found = forest.decode("tree", rows, 3)
    assert largest_difference(found, plain_softmax(forest, rows, 3)) < 2e-2


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_has_the_same_bits_by_every_instruction_set_and_number_of_threads(
    make_forest, kind, monkeypatch
):
    forest, rows = make_forest(5, **HOW, **kind), list(range(9))
    found = forest.decode("tree", rows, 3)
    for number in range(library().bw_best() + 1):
        with monkeypatch.context() as patch:
            patch.setattr(library(), "bw_best", lambda number=number: number)
            assert same(found, forest.decode("tree", rows, 3))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert same(found, forest.decode("tree", rows, 3))


@pytest.mark.parametrize("window", [None, 20])
def test_has_the_same_bits_in_any_batch_and_however_a_path_is_cut(make_forest, window):
    forest = make_forest(5, **HOW, window=window)
    whole = forest.decode("tree", list(range(9)), 3, held={4: 20})
    forest.assert_bits("tree", [[0], [4], [8]], 3, [1] * 9, held={4: 20})
    for row, path in enumerate(forest.paths):
        held = [forest.store.gather(part.segment, part.visible) for part in path]
        joined = forest.store.create()
        tokens = torch.cat(held, dim=2).permute(2, 0, 1, 3, 4)
        forest.store.append([joined], [tokens.contiguous()])
        forest.paths[row] = (PathPart(joined, len(tokens)),)
    assert same(whole, forest.decode("tree", list(range(9)), 3, held={4: 20}))


def test_without_the_library_torch_attends(make_forest, monkeypatch):
    forest, rows = make_forest(5, **HOW), list(range(9))
    found = forest.decode("tree", rows, 3)
    monkeypatch.setattr(tree, "can_attend", lambda *_: False)
    assert largest_difference(found, forest.decode("tree", rows, 3)) < 1e-5
