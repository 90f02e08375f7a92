"""Equal trees whatever the grouping or, in float64, the backend (docs/concepts/sameness.md)."""

import pytest

from engines import exact_dtype, grow
from fakes import Grouping

BACKENDS = ["reference", "dense", "tree"]
GROUPINGS = [Grouping(1), Grouping(5), Grouping(3, reverse=True)]


def scores(tree):
    return [node.score for node in tree.nodes() if node.parent]


@pytest.mark.parametrize("attention", BACKENDS)
def test_trees_do_not_depend_on_grouping(make_solver, attention):
    solver = make_solver(attention=attention, dtype=exact_dtype(attention))
    options = {"n": 8, "max_rounds": 4}
    solution, tree = grow(solver, **options)
    assert solution.exact == solver.exact
    for schedule in GROUPINGS:
        solver.schedule = schedule
        other, other_tree = grow(solver, **options)
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


def test_a_child_draws_the_same_whoever_its_siblings_are(make_solver):
    """n = 1 is the first path of n = 16."""
    many = grow(make_solver(search="best-of-n"))[1]
    one = grow(make_solver(search="best-of-n", n=1))[1]
    chain = [node for node in many.nodes() if node.lineage[1:2] == (0,)]
    assert [n.token_ids for n in one.nodes()][1:] == [n.token_ids for n in chain]
