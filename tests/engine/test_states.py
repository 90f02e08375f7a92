"""Searches with recurrent layers: same trees on every schedule, and a state where one is needed.

The model looks at whose state it gets (`recurring`): that of another row or token fails.
"""

import shutil

import pytest

from beamwright.search import STRATEGIES
from checksums import check_transfers
from declared import real_options
from engines import PROBLEM, assert_nothing_allocated, exact_dtype
from recurring import check_states, load_recurring

PLENTY, SCARCE = {"schedule": "in-gpu"}, {"schedule": "locality", "host_memory": "8MiB"}
STRICT = {"dtype": "float64", "n": 8, "width": 2, "max_rounds": 5, "max_tokens": 60}


@pytest.fixture
def make_hybrid(make_solver, monkeypatch):
    """A solver whose states are looked at after every round, and whatever comes over the link."""
    monkeypatch.setattr("beamwright.solver.machinery.load_model", load_recurring)

    def make(**changes):
        solver = make_solver(**changes)
        if solver.generator.store.host is not None:
            solver.compared = check_transfers(solver.generator.store)
        return solver

    return make


def solved(solver, **options):
    """The solution, its tree, and how many states were on the device after each round."""
    counts, seen = [], {}

    def on_round(report):
        counts.append(check_states(solver, report.tree))
        solver.generator.store.check()
        seen["tree"] = report.tree

    solution = solver.solve(PROBLEM, on_round=on_round, **options)
    assert_nothing_allocated(solver)
    return solution, seen["tree"], counts


@pytest.mark.parametrize("batching", ["grouped", "continuous", "auto"])
def test_trees_do_not_depend_on_budget_or_batching(make_hybrid, parked, batching):
    options = {"dtype": exact_dtype(), "max_step_tokens": 24, "max_tokens": 60, "max_rounds": 4}
    solver = make_hybrid(**options, **PLENTY)
    expected, _, _ = solved(solver)
    need = solver.generator.store.device_peak_bytes
    for share in (1, 4):
        some = make_hybrid(**options, **SCARCE, kv_memory=need // share, batching=batching)
        found, _, _ = solved(some)
        assert found.tree_hash == expected.tree_hash
        assert found.kv.recomputed_tokens == 0
        assert bool(some.compared) == (found.kv.h2d_bytes > 0) >= (share > 1)
    assert parked or batching == "grouped"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_branches_where_a_state_is_kept(make_hybrid, name):
    options = {"dtype": exact_dtype(), "n": 8, "width": 2, **real_options(name, 30)}
    solver = make_hybrid(**options, **PLENTY)
    expected, _, _ = solved(solver)
    assert expected.kv.recomputed_tokens == 0
    scarce = {**SCARCE, "kv_memory": solver.generator.store.device_peak_bytes // 2}
    some = make_hybrid(**options, **scarce, max_batch=3, speculation="exact")
    found, _, _ = solved(some)
    assert found.tree_hash == expected.tree_hash
    assert found.kv.recomputed_tokens == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"search": "lookahead", "lookahead": 3},
        {"search": "best-of-n", "wave": 3},
        {"search": "mcts", "nodes": 40},
        {"executor": "overlapped", "speculation": "exact"},
    ],
    ids=str,
)
def test_what_reads_behind_other_nodes(make_hybrid, changes):
    options = {"dtype": exact_dtype(), "n": 8, "width": 2, **changes}
    solver = make_hybrid(**options, **PLENTY)
    expected, _, _ = solved(solver)
    scarce = {**SCARCE, "kv_memory": solver.generator.store.device_peak_bytes // 2}
    found, _, _ = solved(make_hybrid(**options, **scarce))
    assert found.tree_hash == expected.tree_hash
    assert found.kv.recomputed_tokens == expected.kv.recomputed_tokens == 0


def test_states_are_kept_where_paths_go_on_and_nowhere_else(make_hybrid):
    solver = make_hybrid(n=16, width=4, max_rounds=6, max_tokens=80, **PLENTY)

    def on_round(report):
        tree = report.tree
        if tree.done:
            return
        begun = {node.parent for node in tree.open_nodes()} | {tree.root}
        for node in tree.nodes():
            held = node.handles.get("generator")
            state = held and held.segment.group_segments[-1]
            assert bool(state and state.copies) == (node in begun)

    solver.solve(PROBLEM, on_round=on_round)


def test_what_was_evicted_is_computed_again(make_hybrid):
    solver = make_hybrid(**STRICT, **PLENTY)
    expected, _, _ = solved(solver)
    need = solver.generator.store.device_peak_bytes
    scarce = {"schedule": "locality", "evict": "recompute", "kv_memory": need // 2}
    found, _, _ = solved(make_hybrid(**STRICT, **scarce))
    assert found.tree_hash == expected.tree_hash
    assert found.kv.recomputed_tokens > 0


@pytest.mark.parametrize("where", [PLENTY, SCARCE], ids=lambda where: where["schedule"])
def test_a_search_may_be_resumed_after_any_round(make_hybrid, tmp_path, where):
    """In no more memory than it took."""
    file, files = tmp_path / "search.json", []
    solver = make_hybrid(**STRICT, **PLENTY)
    expected = solver.solve(
        PROBLEM,
        on_round=lambda report: files.append(shutil.copy(file, tmp_path / f"{report.round}.json")),
        checkpoint=file,
    )
    need = solver.generator.store.device_peak_bytes
    budget = need if where is PLENTY else need // 2
    again = make_hybrid(**STRICT, **where, kv_memory=budget)
    for saved in files:
        assert again.resume(saved).tree_hash == expected.tree_hash
        assert_nothing_allocated(again)
