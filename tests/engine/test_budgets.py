"""What a search holds: the least budget, a full host, KV in few bits, windows."""

import pytest
from transformers import MistralConfig

import fakes
from beamwright.errors import CapacityError, InputError
from engines import (
    PROBLEM,
    WINDOWS,
    assert_nothing_allocated,
    assert_same,
    exact_dtype,
    grow,
    tiny_solver,
)


def test_a_full_host_hangs_nobody(make_solver):
    """What it cannot take early stays where it is; it is an error where its room is needed."""
    small = {"search": "best-of-n", "n": 8, "max_rounds": 5, "step_limits": "3,20"}
    small |= {"max_tokens": 12, "dtype": exact_dtype()}
    with make_solver(**small) as solver:
        roomy, size = solver.solve(PROBLEM), solver.generator.store.pool.bytes_per_block
    with make_solver(**small, kv_memory=16 * size, host_memory=4 * size) as solver:
        assert_same(solver.solve(PROBLEM), roomy)
        assert_nothing_allocated(solver)
    for blocks in (2, 8):
        with make_solver(**small, kv_memory=8 * size, host_memory=blocks * size) as solver:
            (found,) = solver.solve_many([PROBLEM])
            assert isinstance(found, CapacityError), found
            assert "host KV budget" in str(found)
            assert_nothing_allocated(solver)


# --- KV in fewer bits, layers that see windows ---------------------------------------------------


TIGHT = {"schedule": "locality", "host_memory": "16MiB"}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_small_budget_moves_fewer_bytes_to_the_same_tree(make_solver, verifier_folder, kind):
    options = {"dtype": exact_dtype(), "verifier": str(verifier_folder), "n": 16}
    full, kept = (
        make_solver(**options, schedule="in-gpu", **bits).solve(PROBLEM)
        for bits in ({}, {"kv_dtype": kind})
    )
    budget = kept.kv.device_peak_bytes // 2
    tight = make_solver(**options, **TIGHT, kv_memory=budget, kv_dtype=kind).solve(PROBLEM)
    assert tight.tree_hash == kept.tree_hash
    assert tight.kv.d2h_bytes
    assert kept.kv.device_peak_bytes < 0.45 * full.kv.device_peak_bytes  # whatever was written


LONG = {"search": "dvts", "n": 6, "width": 2, "max_rounds": 8, "max_tokens": 160}
LONG |= {"max_step_tokens": 20, "ignore_eos": True, "schedule": "in-gpu"}


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint whose layers all see so many tokens; None: all of them."""

    def checkpoint(window):
        folder = tmp_path / str(window)
        config = MistralConfig(**{**WINDOWS, "sliding_window": window, "num_hidden_layers": 2})
        fakes.write_tokenizer(folder)
        fakes.write_checkpoint(folder, config)
        return folder

    return checkpoint


def test_windows_save_memory(write):
    """Without, the same model holds all of every path in all layers."""
    peaks = [grow(tiny_solver(write(size), **LONG))[0].kv.device_peak_bytes for size in (16, None)]
    assert peaks[0] < 0.5 * peaks[1]


@pytest.mark.parametrize("changes", [{"schedule": "layerwise"}, {"sparse": "quest"}])
def test_what_does_not_know_windows_says_so(write, changes):
    with pytest.raises(InputError, match="windows"):
        tiny_solver(write(16), host_memory="8MiB", **changes)
