"""Our schedules on the virtual clock, with a verifier and without: bytes, seconds, capacity."""

from dataclasses import replace

import pytest

from beamwright.errors import CapacityError
from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.fits import VerifierCosts
from beamwright.plan.times import estimate
from beamwright.plan.workload import Workload
from beamwright.sections import StepSettings
from beamwright_lab.simulator.run import simulate, simulate_if_fits
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.victims import cheapest_order, least_recent_order
from beamwright_lab.studies.lbs import LbsCase, layerwise_bytes
from simulated import CARD, GIB, MODEL, SEARCH, case

KV = 512 * 1024


def test_when_everything_fits_locality_is_in_gpu():
    everything = simulate(case())
    assert everything.h2d_bytes == everything.d2h_bytes == everything.stall_s == 0
    assert everything.groups == 8
    assert everything.time_s == simulate(case("in-gpu")).time_s


def test_decoding_takes_what_the_roofline_says():
    """Best-of-n: nothing is shared but the prompt, so the tokens read can be written down."""
    tree = grow(replace(SEARCH, search="best-of-n", generate_tokens=64))
    simulated = simulate(case("in-gpu", budget=64 * GIB, tree=tree))
    roofline = Roofline(MODEL, CARD)
    expected = roofline.prefill_s(128)
    for token in range(1, 64):
        read, seen = 128 + 16 * token, 16 * (128 + token)
        expected += roofline.decode_step_s(16, read, seen)
    assert simulated.time_s == pytest.approx(expected)


def test_what_does_not_fit():
    with pytest.raises(CapacityError):
        simulate(case("in-gpu", budget=GIB // 2))
    assert simulate_if_fits(case("in-gpu", budget=GIB // 2)) is None
    assert simulate_if_fits(case(budget=GIB // 2)) is not None
    assert simulate_if_fits(case(budget=GIB // 8)) is None
    assert simulate_if_fits(case("layerwise", layout=Layout.DENSE, budget=GIB // 8)) is None


@pytest.mark.parametrize("layout", list(Layout))
def test_the_budget_is_kept_and_the_lower_bound_is_one(layout):
    simulated = simulate(case(layout=layout, budget=GIB // 2))
    assert simulated.device_peak_bytes <= GIB // 2
    assert simulated.h2d_bytes >= simulated.dm_lower_bound_bytes
    assert simulated.groups > 8
    assert simulated.time_s == pytest.approx(simulated.decode_s + simulated.stall_s)
    assert simulated.io_share == pytest.approx(simulated.stall_s / simulated.time_s)


def test_prefetch_hides_transfers():
    options = {"layout": Layout.DENSE, "budget": GIB}
    ahead, behind = simulate(case(**options)), simulate(case(**options, prefetch=False))
    assert ahead.stall_s < behind.stall_s


def test_layer_wise_moves_what_the_equations_say():
    """Eq. 1-3 count all layers that do not fit; two stream buffers displace two layers more."""
    simulated = simulate(case("layerwise", layout=Layout.DENSE, budget=GIB))
    equations = LbsCase(32, KV, 16, 128, 256, 32, GIB)
    buffers = 2 * 256 * 16 * (128 + 128) * KV // 32
    assert simulated.h2d_bytes == pytest.approx(layerwise_bytes(equations) + buffers, rel=0.05)
    assert simulated.io_share > 0.5


# --- a verifier: its seconds, its KV, and what it leaves as it is ------------------------------

SMALL = ModelCosts.of(NAMED_SHAPES["qwen2.5-1.5b"], 2)
PRM = ModelCosts.of(NAMED_SHAPES["skywork-prm-7b"], 2)


def scored_case(schedule="locality", prm_budget=4 * GIB, **options):
    given = {"model": SMALL, "scorer": (PRM, prm_budget, {}), **options}
    return case(schedule, 4 * GIB, **given)


def test_auto_is_not_put_off_by_what_is_scored_ahead():
    """What is scored ahead takes seconds, and is counted beside them: a call is no dearer."""
    uneven = SyntheticSearch(16, 4, 128, 800, 80, step_sigma=0.9, survival="score")
    given = {"tree": grow(uneven), "step": StepSettings(max_step_tokens=800, max_tokens=800)}

    def run(speculation, verify_ahead="never"):
        options = {"speculation": speculation, "verify_ahead": verify_ahead}
        return simulate(scored_case("in-gpu", **given, **options))

    off, never, slack = run("off"), run("auto"), run("auto", "slack")
    assert slack.speculated_tokens == never.speculated_tokens > 0
    assert never.time_s < slack.time_s < 0.9 * off.time_s


@pytest.mark.parametrize("schedule", ["in-gpu", "layerwise", "locality"])
def test_the_generator_goes_as_it_does_alone(schedule):
    scored = simulate(scored_case(schedule))
    alone = simulate(replace(scored_case(schedule), verifier=None))
    assert alone.verify_s == alone.verifier_peak_bytes == 0
    assert scored.decode_s == pytest.approx(alone.decode_s)
    assert scored.time_s == pytest.approx(alone.time_s + scored.verify_s)
    assert scored.device_peak_bytes == alone.device_peak_bytes
    assert scored.stall_s == 0


def test_a_verifier_that_does_not_fit_is_written_back_or_says_so():
    roomy = simulate(scored_case())
    budget = roomy.verifier_peak_bytes // 2
    with pytest.raises(CapacityError, match="of the verifier"):
        simulate(scored_case("in-gpu", budget))
    for schedule in ("locality", "layerwise"):
        tight = simulate(scored_case(schedule, budget))
        assert tight.verifier_peak_bytes <= budget
        assert tight.h2d_bytes > 0
        assert tight.stall_s > 0
        # Half batches where not all rows fit: the weights are read more often, never less.
        assert tight.verify_s >= roomy.verify_s - 1e-9


def test_evicted_scores_are_computed_again_where_nothing_is_written_back():
    roomy = simulate(scored_case())
    tight = simulate(scored_case(prm_budget=roomy.verifier_peak_bytes // 2, evict="recompute"))
    assert tight.h2d_bytes == tight.d2h_bytes == 0
    assert tight.verify_s > roomy.verify_s


@pytest.mark.parametrize(("num_beams", "step_tokens"), [(16, 32), (64, 32), (64, 300)])
def test_the_estimate_of_scoring_is_near(num_beams, step_tokens):
    """The expected tree against a sampled one: scoring reads few shared tokens."""
    work = Workload(num_beams, 2, 128, 600, step_tokens)
    tree = grow(SyntheticSearch(num_beams, 2, 128, 600, step_tokens))
    step = StepSettings(step_tokens=step_tokens, max_step_tokens=step_tokens, max_tokens=600)
    found = simulate(replace(scored_case("in-gpu", tree=tree, prm_budget=20 * GIB), step=step))
    planned = estimate(work, SMALL, CARD, 4 * GIB, VerifierCosts(PRM, 20 * GIB))["in-gpu/tree"]
    assert planned.verify_s == pytest.approx(found.verify_s, rel=0.03)


# --- whose KV leaves first, in the orders that the engine does not have -------------------------


def test_least_recent_first_then_the_deepest():
    touch = {"prompt": 3, "step": 3, "leaf": 3, "old": 1}
    start = {"prompt": 0, "step": 10, "leaf": 30, "old": 0}
    assert least_recent_order([*touch], touch, start) == ["old", "leaf", "step", "prompt"]


def test_what_is_not_used_then_what_is_cheapest_to_have_again():
    cost = {"a": 2.0, "b": 1.0, "c": 1.5, "d": 1.5, "e": 0.5}
    assert cheapest_order([*"abdc"], {}, cost) == [*"bdca"]
    assert cheapest_order([*"abcde"], {"e": 1}, cost) == [*"bcdae"]
