"""`--kv-dtype`: trees that are other than in full precision, and the same whatever the schedule."""

import pytest

from beamwright.errors import InputError
from engines import PROBLEM, exact_dtype, grow
from fakes import Grouping

KINDS = ["int8", "fp8"]
BACKENDS = ["reference", "dense", "tree"]
TIGHT = {"schedule": "locality", "host_memory": "16MiB"}


@pytest.mark.parametrize(
    ("attention", "kind"), [*((name, "int8") for name in BACKENDS), ("tree", "fp8")]
)
def test_trees_do_not_depend_on_grouping(make_solver, attention, kind):
    solver = make_solver(attention=attention, dtype=exact_dtype(attention), kv_dtype=kind)
    solution, tree = grow(solver)
    assert solution.exact
    for schedule in (Grouping(1), Grouping(3, reverse=True)):
        solver.schedule = schedule
        other, other_tree = grow(solver)
        assert other.tree_hash == solution.tree_hash
        pairs = zip(tree.nodes(), other_tree.nodes(), strict=True)
        assert all(a.score == b.score for a, b in pairs), "bit for bit"


@pytest.mark.parametrize("kind", KINDS)
def test_float64_trees_do_not_depend_on_the_backend_or_on_what_is_computed_again(make_solver, kind):
    options = {"dtype": "float64", "kv_dtype": kind}
    found = [grow(make_solver(attention=a, **options))[0].tree_hash for a in BACKENDS]
    peak = grow(make_solver(**options))[0].kv.device_peak_bytes
    again = make_solver(**options, **TIGHT, evict="recompute", kv_memory=peak // 2)
    assert {*found, grow(again)[0].tree_hash} == {found[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_budget_moves_fewer_bytes_to_the_same_tree(make_solver, verifier_folder, kind):
    options = {"dtype": exact_dtype(), "verifier": str(verifier_folder), "n": 16}
    full = make_solver(**options, schedule="in-gpu").solve(PROBLEM)
    kept = make_solver(**options, schedule="in-gpu", kv_dtype=kind).solve(PROBLEM)
    peak = full.kv.device_peak_bytes
    alike = make_solver(**options, **TIGHT, kv_memory=peak // 2).solve(PROBLEM)
    assert alike.tree_hash == full.tree_hash
    budget = kept.kv.device_peak_bytes // 2
    tight = make_solver(**options, **TIGHT, kv_memory=budget, kv_dtype=kind).solve(PROBLEM)
    assert tight.tree_hash == kept.tree_hash
    assert tight.kv.d2h_bytes
    assert kept.kv.device_peak_bytes < 0.45 * peak  # of float32's, whatever was written
    assert tight.kv.host_peak_bytes < 0.45 * alike.kv.host_peak_bytes


def test_a_search_goes_on_from_its_checkpoint(make_solver, tmp_path):
    options = {"dtype": "float64", "kv_dtype": "int8"}
    file, early = tmp_path / "now.json", tmp_path / "early.json"

    def keep(_):
        if not early.exists():
            early.write_bytes(file.read_bytes())

    solved = make_solver(**options).solve(PROBLEM, checkpoint=file, on_round=keep)
    assert make_solver(**options).resume(early).tree_hash == solved.tree_hash
    with pytest.raises(InputError, match=r"kv.dtype"):
        make_solver(dtype="float64").resume(early)


def test_sparse_decoding_reads_the_same_codes(make_solver):
    options = {"dtype": "float64", "kv_dtype": "int8", "sparse": "exact", "sparse_from": 0}
    solved = grow(make_solver(**options, select=16, sparse_layers=0))[0]
    peak = solved.kv.device_peak_bytes
    tight = grow(make_solver(**options, **TIGHT, select=16, kv_memory=peak // 2))[0]
    assert tight.tree_hash == solved.tree_hash
    ahead = {**options, "sparse": "ahead"}
    assert grow(make_solver(**ahead, select=16))[0].tree_hash


@pytest.mark.parametrize(
    "unknown",
    [{"schedule": "layerwise"}, {"sparse": "exact", "select": 16, "sparse_home": "host"}],
)
def test_what_streams_layers_or_tokens_says_no(make_solver, unknown):
    with pytest.raises(InputError, match="--kv-dtype int8: not with --"):
        make_solver(kv_dtype="int8", **unknown)
