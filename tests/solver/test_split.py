"""Memory that generator and verifier share: who has it changes the traffic, never the tree."""

import pytest

from beamwright.errors import InputError
from engines import assert_nothing_allocated, exact_dtype, grow

SPLITS = (0.1, 0.3, 0.5, 0.7, 0.9, "auto")
LONG = {"n": 8, "max_rounds": 4, "max_step_tokens": 40, "max_tokens": 70, "host_memory": "8MiB"}


@pytest.fixture
def scored(make_solver, verifier_folder):
    """Solvers with a verifier that has KV of its own."""

    def make(**changes):
        options = {"verifier": str(verifier_folder), "dtype": exact_dtype(), **LONG, **changes}
        return make_solver(**options)

    return make


@pytest.fixture
def expected(scored):
    """The tree and the bytes of both models where everything fits."""
    solver = scored(schedule="in-gpu")
    solution, tree = grow(solver)
    peaks = [model.store.device_peak_bytes for model in solver._machinery.tree_models]
    return solution, [node.score for node in tree.nodes()], peaks


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("share", [1.2, 0.85])
def test_the_tree_is_the_same_for_any_split(scored, expected, conserved, split, share):
    solution, scores, peaks = expected
    total = int(share * sum(peaks))
    if not isinstance(split, str):  # a part has to hold a path
        total = int(share * max(peaks[0] / split, peaks[1] / (1 - split)))
    with scored(split=split, kv_memory=total) as solver:
        found, tree = grow(solver)
        assert_nothing_allocated(solver)
    assert found.tree_hash == solution.tree_hash
    assert [node.score for node in tree.nodes()] == pytest.approx(scores, abs=1e-6)
    assert found.memory.split == split
    assert found.memory.generator_kv_bytes + found.memory.verifier_kv_bytes == total
    assert found.kv.device_peak_bytes <= total
    if not isinstance(split, str):
        assert not conserved
        assert (found.memory.moves, found.memory.moved_bytes) == (0, 0)
        assert found.memory.generator_kv_bytes == pytest.approx(split * total, abs=1)


def test_memory_moves_while_a_search_runs(scored, expected, conserved):
    solution, _, peaks = expected
    with scored(kv_memory=int(0.6 * sum(peaks))) as solver:
        found, _ = grow(solver)
        first = solver._machinery.plan.generator_kv_bytes
        again, _ = grow(solver)
    assert len(set(conserved)) > 1
    assert min(conserved) < first < max(conserved)
    assert found.memory.moves == again.memory.moves > 2
    assert found.memory.moved_bytes == again.memory.moved_bytes > 0
    assert found.tree_hash == again.tree_hash == solution.tree_hash


def test_beside_a_lane_nothing_moves(scored, expected, conserved):
    solution, _, peaks = expected
    with scored(executor="overlapped", kv_memory=int(1.2 * sum(peaks))) as solver:
        found = solver.solve("Ann has 12 apples. She eats 3.")
    assert found.tree_hash == solution.tree_hash
    assert not conserved
    assert found.memory.moves == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "half"}, "'half' is no split: write auto or a share such as 0.7"),
        ({"split": 1.0}, "1.0 is no split"),
        ({"split": True}, "True is no split"),
        (
            {"split": 0.5, "verifier": "logprob"},
            "--split 0.5: does nothing with --ver",
        ),
    ],
    ids=str,
)
def test_a_split_that_cannot_be_is_said(scored, options, message):
    with pytest.raises(InputError) as caught:
        scored(**options)
    assert message in str(caught.value)
