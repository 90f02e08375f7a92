"""Equal trees whatever the grouping or, in float64, the backend (docs/concepts/sameness.md)."""

import pytest

from beamwright.checks.machine import run_selftest
from beamwright.engine.selftest import batches_are_exact
from beamwright.models.decoder import padded_rows
from engines import PROBLEM, exact_dtype, grow
from fakes import Grouping

BACKENDS = ["reference", "dense", "tree"]
GROUPINGS = [Grouping(1), Grouping(5), Grouping(3, reverse=True)]


def scores(tree):
    return [node.score for node in tree.nodes() if node.parent]


@pytest.mark.parametrize("attention", BACKENDS)
def test_trees_do_not_depend_on_grouping(make_solver, attention):
    solver = make_solver(attention=attention, dtype=exact_dtype(attention))
    solution, tree = grow(solver)
    assert solution.exact == solver.exact
    for schedule in GROUPINGS:
        solver.schedule = schedule
        other, other_tree = grow(solver)
        assert other.tree_hash == solution.tree_hash
        if solver.exact:
            assert scores(other_tree) == scores(tree), "bit for bit"
        assert other.kv.groups >= solution.kv.groups


def test_seeds_and_problem_ids_grow_different_trees(make_solver):
    solver = make_solver(seed=0)
    hashes = [grow(solver, problem_id=i)[0].tree_hash for i in (0, 1, "0")]
    hashes.append(grow(make_solver(seed=1))[0].tree_hash)
    assert len(set(hashes)) == 4
    assert grow(solver)[0].tree_hash == hashes[0]


def test_the_search_does_not_see_how_the_problem_before_it_went(make_solver):
    solver = make_solver()
    first = grow(solver)[0].tree_hash
    grow(solver, "Something else, longer than the problem before. " * 3, problem_id=9)
    assert grow(solver, PROBLEM)[0].tree_hash == first


def test_a_child_draws_the_same_whoever_its_siblings_are(make_solver):
    """n = 1 is the first path of n = 16."""
    many = grow(make_solver(search="best-of-n"))[1]
    one = grow(make_solver(search="best-of-n", n=1))[1]
    chain = [node for node in many.nodes() if node.lineage[1:2] == (0,)]
    assert [n.token_ids for n in one.nodes()][1:] == [n.token_ids for n in chain]


def test_the_self_test_covers_every_backend():
    """What it finds is this machine's; that trees keep what it promises is tested above."""
    assert [*run_selftest()][: len(BACKENDS)] == BACKENDS


@pytest.mark.parametrize("rows", [8, 24, 100])
def test_the_self_test_finds_a_kernel_for_many_rows(make_solver, monkeypatch, rows):
    """A library may change kernels, and a row's last bits, at any number of rows."""
    from beamwright.models.dense import DenseDecoder

    solver = make_solver(attention="reference", dtype="float64")
    real = DenseDecoder._after

    def after(self, *words):
        return [found * (1 + 1e-9 * (len(found) > rows)) for found in real(self, *words)]

    monkeypatch.setattr(DenseDecoder, "_after", after)
    assert not batches_are_exact(solver.generator.decoder, solver.generator.backend)


def test_the_self_test_fails_where_batches_matter(make_solver, monkeypatch):
    """A decoder whose rows depend on the batch must be found out."""
    from beamwright.models.dense import DenseDecoder

    solver = make_solver()
    real = DenseDecoder.logits

    def leaky(self, hidden):
        return real(self, hidden) + hidden.shape[0] * 1e-5

    monkeypatch.setattr(DenseDecoder, "logits", leaky)
    assert not batches_are_exact(solver.generator.decoder, solver.generator.backend)


def test_few_rows_are_padded_as_little_as_their_bits_allow(make_solver, monkeypatch):
    """A library that takes another kernel for fewer than 8 rows gets 8."""
    from beamwright.models.dense import DenseDecoder

    real = DenseDecoder._after

    def after(self, *words):
        return [found * (1 + 1e-9 * (len(found) < 8)) for found in real(self, *words)]

    few = make_solver(attention="reference", dtype="float64")
    monkeypatch.setattr(DenseDecoder, "_after", after)
    eight = make_solver(attention="reference", dtype="float64")
    assert eight.generator.decoder.least_rows == 8
    assert few.exact == eight.exact
    sizes = [[padded_rows(count, least) for count in (1, 2, 3, 5, 8, 9)] for least in (1, 2, 8)]
    assert sizes == [[1, 2, 4, 8, 8, 16], [2, 2, 4, 8, 8, 16], [8, 8, 8, 8, 8, 16]]
