"""Searches of models with recurrent layers: a state of every row beside KV, as segments are."""

from dataclasses import replace
from itertools import product

import pytest

from beamwright.errors import CapacityError
from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts, Storage
from beamwright.sections import StepSettings
from beamwright_lab.simulator.bench import state_blocks
from beamwright_lab.simulator.run import simulate, simulate_if_fits
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.studies.clairvoyant import Life, traffic_bound
from simulated import CARD, GIB, case

HYBRID = ModelCosts.of(NAMED_SHAPES["qwen3.5-9b"], 2, Storage.INT4)
SEARCH = SyntheticSearch(16, 4, 128, 128, 32)
BLOCK_BYTES = 8 * HYBRID.kv_bytes_per_token
STATE_BYTES = BLOCK_BYTES * state_blocks(HYBRID)
LIMITS = StepSettings(step_tokens=32, max_tokens=128)


def case_of(budget, search=SEARCH, model=HYBRID, step=LIMITS, **options):
    return case(budget=budget, tree=grow(search), model=model, step=step, **options)


def test_where_all_fits_nothing_moves():
    found, plain = (
        simulate(case_of(8 * GIB, model=model))
        for model in (HYBRID, replace(HYBRID, state_bytes=0))
    )
    assert found.h2d_bytes == found.d2h_bytes == 0
    rows = (found.device_peak_bytes - plain.device_peak_bytes) / STATE_BYTES
    assert rows == pytest.approx(16 + 4, abs=1), "theirs, and of those that they began from"
    passes_s = 4 * 32 * 16 * 2 * HYBRID.state_bytes / CARD.device_bandwidth / CARD.bandwidth_share
    assert found.time_s - plain.time_s == pytest.approx(passes_s, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"batching": "grouped"}, {"write_back": "lazy"}])
def test_states_move_once_a_step_and_bounds_hold(options):
    found = simulate(case_of(GIB // 2, **options))
    assert found.device_peak_bytes <= GIB // 2
    assert 0 < found.d2h_state_bytes <= found.d2h_bytes
    assert found.d2h_state_bytes <= 4 * 20 * STATE_BYTES, "each is written once"
    assert found.h2d_state_bytes <= 3 * 16 * STATE_BYTES
    assert found.load_bound_bytes <= found.h2d_bytes
    assert found.store_bound_bytes <= found.blind_store_bound_bytes <= found.d2h_bytes
    assert found.dm_lower_bound_bytes <= found.h2d_bytes
    assert found.blind_store_bound_bytes > 8 * STATE_BYTES


def test_bounds_hold_for_any_search_and_budget():
    for seed, width, slots in product(range(3), (1, 2, 4), (3, 6, 11)):
        search = SyntheticSearch(8, width, 40, 96, 24, step_sigma=0.6, seed=seed)
        step = StepSettings(max_step_tokens=96, max_tokens=96)
        found = simulate_if_fits(case_of(slots * STATE_BYTES, search, step=step))
        if found is not None:
            assert found.load_bound_bytes <= found.h2d_bytes
            assert found.blind_store_bound_bytes <= found.d2h_bytes


def test_a_state_is_needed_where_steps_begin():
    """Two parents' states and a row's own in a device of two: one of them comes later."""
    lives = [Life(1, 2, 10, is_state=True), Life(1, 2, 10, is_state=True)]
    lives += [Life(2, 2, 10, is_state=True)] * 4
    assert traffic_bound(lives, 20).loads == 10
    assert traffic_bound(lives, 30).loads == 0


def test_a_path_that_does_not_fit_with_its_state_says_so():
    with pytest.raises(CapacityError):
        simulate(case_of(2 * STATE_BYTES))


def test_states_are_computed_again_from_those_before_them():
    found = simulate(case_of(GIB // 2, evict="recompute"))
    assert found.recomputed_tokens > 0
    assert found.h2d_bytes == found.d2h_bytes == 0
    assert found.device_peak_bytes <= GIB // 2
