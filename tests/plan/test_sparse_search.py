"""A search decoded sparsely with KV on the host: 64 paths of an 8B model on an RTX 4090."""

import math
from dataclasses import replace

import pytest

from beamwright.models.shape import NAMED_SHAPES
from beamwright.plan.compare import LEAST_GAIN, SparseCase, beside_full_attention, estimate
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright.plan.sparse import Host, Scored, SparseLoad, host_ranks
from beamwright.plan.workload import Workload
from beamwright.sparse.rule import SparseRule

CARD = find_profile("rtx-4090-x16")
SHAPE = NAMED_SHAPES["llama-3.1-8b"]
COSTS = ModelCosts.of(SHAPE, 2)
BUDGET = int(22.7e9) - COSTS.weight_bytes
WORK = Workload(num_beams=64, width=1, prompt_tokens=1024, generate_tokens=8192, step_tokens=256)
BOUNDS = SparseCase(SparseRule("ahead-pages", 512, 512), SHAPE, Scored.HOST_BOUNDS, True, True)
KEYS = replace(BOUNDS, rule=SparseRule("ahead", 512, 512), scored=Scored.HOST_KEYS)


def verdict(case, work=WORK, budget=BUDGET):
    return beside_full_attention(work, COSTS, CARD, budget, case)


def test_bounds_pay_where_locality_needs_groups_and_all_keys_on_the_host_do_not():
    bounds, keys = verdict(BOUNDS), verdict(KEYS)
    locality = estimate(WORK, COSTS, CARD, BUDGET)["locality/tree"]
    assert bounds.full_s == keys.full_s == locality.time_s
    assert bounds.gain >= LEAST_GAIN > keys.gain > 0
    assert (bounds.sparse.limited_by, keys.sparse.limited_by) == ("link", "host")
    assert bounds.sparse.peak_kv_bytes <= BUDGET


def test_nothing_pays_where_everything_fits():
    shared = replace(WORK, width=4, generate_tokens=2048)
    assert verdict(BOUNDS, shared).gain < LEAST_GAIN


def test_the_tokens_of_a_step_cost_what_the_middle_one_does():
    work = replace(WORK, generate_tokens=256)
    found = verdict(BOUNDS, work).sparse
    middle = 1024 + 128
    load = SparseLoad(64, middle, 512, shared=(1024 + 64 * 128) / (64 * middle))
    ranks = host_ranks(Roofline(COSTS, CARD), SHAPE, load, Scored.HOST_BOUNDS, Host())
    assert found.decode_s + found.stall_s == pytest.approx(256 * ranks.ideal_s)
    assert found.h2d_bytes == pytest.approx(
        256 * 64 * 512 * 0.4 * COSTS.kv_bytes_per_token, rel=1e-6
    )
    assert found.d2h_bytes == 256 * 64 * COSTS.kv_bytes_per_token


def test_what_is_not_foreseen_waits_for_every_part():
    work = replace(WORK, generate_tokens=256)
    late = replace(BOUNDS, foreseen=False, by_layers=False)
    assert verdict(late, work).sparse.time_s > verdict(BOUNDS, work).sparse.time_s


def test_fewer_rows_run_at_a_time_where_their_selections_do_not_fit():
    row_bytes = 512 * COSTS.kv_bytes_per_token
    found = verdict(BOUNDS, budget=20 * row_bytes).sparse
    assert found.groups == 4 * 32, "16 rows at a time, 32 steps"
    assert found.peak_kv_bytes == 16 * row_bytes
    assert verdict(BOUNDS, budget=row_bytes - 1).gain == 0.0


def test_rows_that_read_all_need_room_for_their_paths():
    reads_all = replace(BOUNDS, rule=SparseRule("ahead-pages", 512, 100_000))
    assert verdict(reads_all).sparse.time_s is None
    small = replace(WORK, num_beams=2)
    found = verdict(reads_all, small)
    assert found.sparse.h2d_bytes > 0, "whole paths, once a step"
    assert found.gain < 1
    assert math.isfinite(found.gain)
