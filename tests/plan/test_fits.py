"""What searches need on the device, how many paths fit, and the seconds that follow."""

from dataclasses import replace
from itertools import pairwise

import pytest

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts, Roofline, Storage
from beamwright.plan.fits import VerifierCosts, max_beams_in_gpu, resident_kv_need, with_mark_tokens
from beamwright.plan.times import Totals, add_verifier_costs, estimate
from beamwright.plan.workload import tree_steps

GIB = 2**30
NAMES = ["in-gpu/tree", "locality/tree"]


@pytest.fixture
def plan(opt, gpu, paper):
    def make(budget_gib=7, hardware=gpu, scorer=None, **workload):
        return estimate(paper(**workload), opt, hardware, int(budget_gib * GIB), scorer)

    return make


# --- what fits -----------------------------------------------------------------------------------


def test_max_beams_is_the_last_number_that_nearly_always_fits(opt, paper):
    def need(num_beams):
        return resident_kv_need(paper(num_beams=num_beams, width=4), opt).generator

    most = max_beams_in_gpu(paper(width=4), opt, 7 * GIB)
    assert most % 4 == 0
    assert need(most).mean < 7 * GIB
    assert need(most).worst == pytest.approx(7 * GIB, rel=0.1)
    assert max_beams_in_gpu(paper(), opt, GIB // 2) == 0


def test_a_verifier_takes_its_place_among_the_beams(opt, paper):
    alone = max_beams_in_gpu(paper(), opt, 7 * GIB)
    assert 0 < max_beams_in_gpu(paper(), opt, 7 * GIB, VerifierCosts(opt, 2 * GIB)) < alone
    assert max_beams_in_gpu(paper(), opt, 7 * GIB, VerifierCosts(opt, 100 * GIB)) == alone


@pytest.mark.parametrize(
    ("budget_gib", "fits", "borderline"), [(9, True, False), (7, False, True), (5, False, False)]
)
def test_what_only_some_searches_need_is_borderline(plan, budget_gib, fits, borderline):
    found = plan(budget_gib)["in-gpu/tree"]
    assert (found.fits, found.borderline) == (fits, borderline)
    assert (found.time_s is None) == (not fits and not borderline)


def test_states_are_held_beside_kv(gpu, paper):
    """Of 64 rows and of the 32 nodes that they began from; weights are read for each group."""
    hybrid = ModelCosts.of(NAMED_SHAPES["qwen3.5-27b"], 2, Storage.INT4)
    needs = [
        resident_kv_need(paper(), model).generator
        for model in (hybrid, replace(hybrid, state_bytes=0))
    ]
    least = needs[0].worst
    assert least - needs[1].worst == needs[0].least - needs[1].least == 96 * hybrid.state_bytes
    for budget, fits in ((least, True), (least - 1, False)):
        assert estimate(paper(), hybrid, gpu, budget)["in-gpu/tree"].fits == fits
    assert 62 <= max_beams_in_gpu(paper(), hybrid, least) <= 66
    whole, tight = (estimate(paper(), hybrid, gpu, b)["locality/tree"] for b in (least, least // 3))
    step_s = 32 * (hybrid.weight_bytes / (gpu.device_bandwidth * gpu.bandwidth_share))
    step_s += 32 * 64 * gpu.decode_ops_per_layer * gpu.launch_s
    more = (tight.groups - whole.groups) * step_s
    assert tight.decode_s - whole.decode_s == pytest.approx(more, rel=0.05)
    assert tight.d2h_bytes >= 60 * 64 * hybrid.state_bytes, "of every row, once a step"
    assert whole.h2d_bytes == whole.d2h_bytes == 0


# --- seconds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_beams", "least_gib", "most_gib"), [(64, 0, 0), (256, 77, 170), (512, 315, 554)]
)
def test_sharing_on_the_device_against_simulated_trees(plan, num_beams, least_gib, most_gib):
    """Ranges of simulated searches; the estimate keeps one group a step and may be 15 % above."""
    moved = plan(num_beams=num_beams, width=4)["locality/tree"].h2d_bytes / GIB
    assert least_gib <= moved <= 1.15 * most_gib


@pytest.mark.parametrize("budget_gib", [0.5, 2.25, 7, 100])
@pytest.mark.parametrize("num_beams", [2, 64])
def test_every_estimate_adds_up_and_keeps_its_budget(opt, plan, budget_gib, num_beams):
    alone = plan(budget_gib, num_beams=num_beams)
    scored = plan(budget_gib, scorer=VerifierCosts(opt, 200 * GIB), num_beams=num_beams)
    assert [*alone] == NAMES
    for name, each in alone.items():
        if each.time_s is None:
            assert {v for k, v in vars(each).items() if k not in ("fits", "borderline")} == {None}
            continue
        assert each.time_s == pytest.approx(each.prefill_s + each.decode_s + each.stall_s)
        assert each.io_share == pytest.approx(each.stall_s / each.time_s)
        assert 0 < each.peak_kv_bytes <= budget_gib * GIB
        assert (each.h2d_bytes > 0) == (each.d2h_bytes > 0)
        assert scored[name].verify_s > each.verify_s == 0
        assert scored[name].time_s == pytest.approx(each.time_s + scored[name].verify_s)


@pytest.mark.parametrize("name", NAMES)
def test_a_larger_budget_is_never_slower(plan, name):
    each = [plan(gib)[name] for gib in (1, 3, 5, 7, 10, 20)]
    assert [one.fits for one in each] == sorted(one.fits for one in each)
    fitting = [one for one in each if one.fits]
    assert fitting
    for smaller, larger in pairwise(fitting):
        assert larger.time_s <= smaller.time_s + 1e-9
        assert larger.h2d_bytes <= smaller.h2d_bytes


def test_a_slower_link_costs_only_those_who_use_it(gpu, plan):
    slow = replace(gpu, h2d_bandwidth=gpu.h2d_bandwidth / 4, d2h_bandwidth=gpu.d2h_bandwidth / 4)
    fast, late = plan(2), plan(2, slow)
    assert late["in-gpu/tree"] == fast["in-gpu/tree"]
    assert late["locality/tree"].stall_s > fast["locality/tree"].stall_s > 0
    assert late["locality/tree"].decode_s == fast["locality/tree"].decode_s


# --- a verifier ----------------------------------------------------------------------------------


@pytest.fixture
def scored(opt, gpu, paper):
    """What is counted of the scoring of a search."""

    def make(hardware=gpu, budget_gib=100, **workload):
        totals = Totals()
        add_verifier_costs(
            totals, paper(**workload), VerifierCosts(opt, int(budget_gib * GIB)), hardware
        )
        return totals

    return make


def test_every_step_has_a_mark_more(paper):
    work = with_mark_tokens(paper(generate_tokens=70))
    assert [step.num_tokens for step in tree_steps(work)] == [33, 33, 7]


def test_a_step_is_one_prefill_of_all_beams(scored, opt, gpu):
    """64 rows of 33 tokens are one batch: weights are read once, shared parts once."""
    both, first = scored(generate_tokens=64), scored(generate_tokens=32)
    num_tokens, before = 64 * 33, 128 + 33
    union = 128 + 32 * 33
    seen = 64 * 33 * (before + 17)
    expected = Roofline(opt, gpu).decode_step_s(num_tokens, union + num_tokens, seen)
    assert both.verify_s - first.verify_s == pytest.approx(expected)
    assert both.h2d_bytes == both.d2h_bytes == both.stall_s == 0


@pytest.mark.parametrize(
    ("num_beams", "step_tokens", "forwards"),
    [(64, 32, 1), (64, 640, 4 + 4 + 3), (256, 32, 3)],  # chunks of 256, 256, 129; 102 rows of 40
)
def test_long_steps_go_in_chunks_and_wide_searches_in_batches(
    scored, gpu, num_beams, step_tokens, forwards
):
    launches_s = 32 * gpu.decode_ops_per_layer * gpu.launch_s
    one = {"num_beams": num_beams, "step_tokens": step_tokens, "generate_tokens": step_tokens}
    free = scored(replace(gpu, launch_s=1e-30), **one).verify_s
    num_forwards = (scored(**one).verify_s - free) / launches_s
    assert num_forwards == pytest.approx(1 + forwards), "the problem is one, too"
