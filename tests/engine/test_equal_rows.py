"""Rows whose paths are equal are computed once: fewer rows, and the same tree, bit for bit."""

import math
import threading

import pytest

from beamwright.engine import passes
from beamwright.engine.passes import EqualTexts
from beamwright.errors import Cancelled
from beamwright.tree import SearchTree, StopReason
from engines import (
    PROBLEM,
    WAYS,
    assert_nothing_allocated,
    exact_dtype,
    facts,
    grow,
    tiny_checkpoint,
)

# Surer than these models are by themselves, so that rows repeat each other.
SURE = {
    **{"n": 8, "width": 2, "max_rounds": 5, "max_step_tokens": 24, "max_tokens": 60},
    **{"temperature": 0.1},
}


@pytest.fixture
def always(monkeypatch):
    """Whether equal rows are computed once, whatever that costs."""

    def set_to(value):
        monkeypatch.setattr(passes, "_PAYS", math.inf if value else 0.0)

    return set_to


def same(make, always, **options):
    """Grow a tree with every row computed, and with equal ones once."""
    always(False)
    plain, tree = grow(make(**{**options, "drafts": "off"}))
    assert plain.batch.equal_tokens == 0
    always(True)
    found, merged = grow(make(**options))
    assert facts(merged) == facts(tree)
    assert found.tree_hash == plain.tree_hash
    return plain, found


@pytest.mark.parametrize("attention", ["tree", "reference"])
def test_trees_are_equal_and_fewer_rows_are_computed(make_solver, always, attention):
    options = {**SURE, "attention": attention, "dtype": exact_dtype(attention), "n": 16, "width": 4}
    plain, found = same(make_solver, always, **options)
    assert found.batch.equal_tokens > 0.25 * found.tokens.generated
    assert found.batch.passes <= plain.batch.passes

    def computed(solution):
        tokens = solution.batch.rows_mean * solution.batch.passes - solution.batch.equal_tokens
        return tokens / solution.batch.occupancy

    assert computed(found) < 0.9 * computed(plain), "0.87 where one path takes eight rows"


@pytest.mark.parametrize(
    "options",
    [
        *WAYS,
        {"executor": "overlapped", "speculation": "exact"},
        {"max_step_tokens": 300, "max_tokens": 320, "delimiter": "Zq", "n": 4},
        {"kv_dtype": "int8"},
        {"drafts": 3},
        {"drafts": 3, "temperature": 0, "kv_dtype": "int8"},
    ],
    ids=str,
)
def test_trees_are_equal_however_rows_are_drawn_and_end(make_solver, always, options):
    same(make_solver, always, **{**SURE, "dtype": exact_dtype(), **options})


@pytest.mark.parametrize(
    "how",
    [{}, {"batching": "grouped"}, {"batching": "continuous", "max_batch": 5}, {"drafts": 4}],
    ids=str,
)
def test_trees_are_equal_where_memory_is_short(make_solver, always, how):
    scarce = {"schedule": "locality", "kv_memory": 20 * 8192, "host_memory": "2MiB"}
    always(False)
    plain, _ = grow(make_solver(**SURE, dtype=exact_dtype()))
    _, found = same(make_solver, always, **SURE, dtype=exact_dtype(), **scarce, **how)
    assert found.tree_hash == plain.tree_hash
    assert found.batch.equal_tokens > 0


@pytest.mark.parametrize(
    "kind", ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.nightly)]
)
def test_trees_are_equal_with_windows_and_sinks(tmp_path, always, kind):
    make = tiny_checkpoint(tmp_path, kind)
    options = {**SURE, "dtype": "float64", "max_step_tokens": 40, "max_tokens": 120}
    _, found = same(make, always, **options, attention="tree")
    assert found.batch.equal_tokens > 0
    same(make, always, **options, attention="tree", drafts=3)


def test_a_copy_of_its_path_for_each_row_is_computed_for_each(make_solver, always):
    """The LBS paper's layout is what it is."""
    _, found = same(make_solver, always, **SURE, attention="dense", dtype=exact_dtype("dense"))
    assert found.batch.equal_tokens == 0


def test_a_search_is_resumed(make_solver, always, tmp_path):
    always(True)
    options, file = {**SURE, "dtype": "float64"}, tmp_path / "search.json"
    plain, _ = grow(make_solver(**options))
    solver = make_solver(**options)

    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solver.solve(PROBLEM, on_round=stop, checkpoint=file)
    assert_nothing_allocated(solver)
    assert solver.resume(file).tree_hash == plain.tree_hash


@pytest.mark.parametrize("drafts", ["off", 3])
def test_one_that_is_cancelled_leaves_nothing_and_the_next_is_the_same(make_solver, always, drafts):
    always(True)
    solver, submitted = make_solver(**SURE, dtype=exact_dtype(), drafts=drafts), threading.Event()
    expected = solver.solve(PROBLEM).tree_hash

    def cancel(report):
        assert submitted.wait(600)
        handle.cancel()

    handle = solver.submit(PROBLEM, on_round=cancel)
    submitted.set()
    with pytest.raises(Cancelled):
        handle.result(600)
    assert solver.solve(PROBLEM).tree_hash == expected
    solver.close()
    assert_nothing_allocated(solver)


# --- which paths are equal -----------------------------------------------------------------------


def add(tree, parent, *tokens):
    (node,) = tree.expand(parent, 1)
    tree.commit(node, tokens, (0.0,) * len(tokens), StopReason.DELIMITER, "")
    tree.keep(node)
    return node


def test_paths_are_equal_step_by_step():
    texts, tree, other = EqualTexts(), SearchTree("a", (1, 2), ""), SearchTree("b", (1, 2), "")
    left, right = add(tree, tree.root, 3, 4), add(tree, tree.root, 3, 4)
    assert texts.number(left) == texts.number(right) != texts.number(tree.root)
    assert texts.number(add(tree, left, 5)) == texts.number(add(tree, right, 5))
    assert texts.number(add(tree, left, 5)) != texts.number(add(tree, right, 6))
    apart = add(tree, add(tree, tree.root, 3), 4)
    assert texts.number(apart) != texts.number(left), "cut into steps otherwise"
    assert texts.number(add(other, other.root, 3, 4)) != texts.number(left), "another problem"
