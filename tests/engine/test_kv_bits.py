"""`--kv-dtype`: trees that are other than in full precision, and the same whatever the schedule."""

import pytest

from beamwright.errors import InputError
from engines import PROBLEM, exact_dtype

KINDS = ["int8", "fp8"]
TIGHT = {"schedule": "locality", "host_memory": "16MiB"}


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


@pytest.mark.parametrize(
    "unknown",
    [{"schedule": "layerwise"}, {"sparse": "exact", "select": 16, "sparse_home": "host"}],
)
def test_what_streams_layers_or_tokens_says_no(make_solver, unknown):
    with pytest.raises(InputError, match="--kv-dtype int8: not with --"):
        make_solver(kv_dtype="int8", **unknown)
