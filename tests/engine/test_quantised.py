"""Quantised weights decide the tree; batches, schedules and resumption do not."""

import pytest

from beamwright.errors import InputError
from engines import exact_dtype, grow


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_tree_does_not_depend_on_the_batch(make_solver, weights):
    found = {}
    for name, changes in {
        "together": {},
        "in threes": {"max_batch": 3},
        "in groups": {"schedule": "locality", "kv_memory": "200KiB"},
    }.items():
        solution, _ = grow(make_solver(weights=weights, dtype=exact_dtype(), **changes))
        found[name] = solution.tree_hash
    assert len(set(found.values())) == 1
    plain, _ = grow(make_solver(dtype=exact_dtype()))
    assert plain.tree_hash not in found.values()


def test_a_search_goes_on_with_the_weights_it_began_with(make_solver, tmp_path):
    file = tmp_path / "search.json"
    solution, _ = grow(make_solver(weights="int4", dtype="float64"), checkpoint=file)
    for weights, shown in (("int8", "'int8'"), ("auto", "'auto'")):
        with pytest.raises(InputError, match=f"was saved with --weights 'int4', not {shown}"):
            make_solver(weights=weights, dtype="float64").resume(file)
    resumed = make_solver(weights="int4", dtype="float64").resume(file)
    assert resumed.tree_hash == solution.tree_hash
