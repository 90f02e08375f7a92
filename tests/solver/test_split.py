"""Memory that generator and verifier share: who has it changes the traffic, never the tree."""

import pytest
import torch

from beamwright.errors import InputError
from beamwright.kv.cache import CacheManager
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


@pytest.mark.parametrize(
    ("split", "share"), [("auto", 1.2), (0.3, 1.2), *((split, 0.85) for split in SPLITS)]
)
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


@pytest.fixture
def moved_while_held(monkeypatch):
    """How many segments somebody was reading when they were moved."""
    found, real = [], CacheManager.resize

    def spy(self, total_bytes):
        before = {s: list(s.blocks) for s in self._live.present() if s.pins}
        given = real(self, total_bytes)
        found.append(sum(s.blocks != blocks for s, blocks in before.items()))
        return given

    monkeypatch.setattr(CacheManager, "resize", spy)
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"graphs": "on"},
        {"attention": "dense"},
        {"sparse": "quest", "select": 16},
    ],
    ids=str,
)
def test_rows_go_on_when_memory_moves_under_them(scored, conserved, moved_while_held, how):
    """Scores come while others are decoded: their blocks change places in the middle of a step."""
    method = {name: how[name] for name in how.keys() & {"sparse", "select"}}
    with scored(schedule="in-gpu", **method) as solver:
        solution, _ = grow(solver)
        peaks = [model.store.device_peak_bytes for model in solver._machinery.tree_models]
    with scored(speculation="exact", kv_memory=int(0.6 * sum(peaks)), **how) as solver:
        found, _ = grow(solver)
    assert found.tree_hash == solution.tree_hash
    assert found.memory.moves > 2
    assert sum(moved_while_held) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize("speculation", ["off", "exact"])
def test_memory_moves_on_a_card(scored, conserved, speculation):
    """Between captured steps of one model and captured passes of the other, in one memory."""
    card = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "graphs": "on"}
    with scored(**card, schedule="in-gpu", split=0.5) as solver:
        solution, _ = grow(solver)
        peaks = [model.store.device_peak_bytes for model in solver._machinery.tree_models]
    tight = {**card, "kv_memory": int(0.6 * sum(peaks)), "speculation": speculation}
    with scored(**tight) as solver:
        found, _ = grow(solver)
        again, _ = grow(solver)
    assert found.tree_hash == again.tree_hash == solution.tree_hash
    assert found.memory.moves == again.memory.moves > 2
    assert found.kv.device_peak_bytes <= tight["kv_memory"]


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
