"""A verifier on the virtual clock: its seconds, its KV, and what it leaves as it is."""

from dataclasses import replace

import pytest

from beamwright.errors import CapacityError
from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.fits import Scorer
from beamwright.plan.machines import find_profile
from beamwright.plan.times import estimate
from beamwright.plan.workload import Workload
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.verifier import VerifierCase

GIB = 2**30
CARD = find_profile("rtx-4090")
MODEL = ModelCosts.of(NAMED_SHAPES["qwen2.5-1.5b"], 2)
PRM = ModelCosts.of(NAMED_SHAPES["skywork-prm-7b"], 2)
SEARCH = SyntheticSearch(16, 2, 128, 256, 32)
TREE = grow(SEARCH)


def case(schedule="locality", prm_budget=4 * GIB, layout=Layout.TREE, tree=TREE, **options):
    return Simulation(
        tree=tree,
        model=MODEL,
        costs=RooflineCosts.of(MODEL, CARD, layout),
        kv_budget_bytes=4 * GIB,
        schedule=ScheduleSettings(schedule=schedule, **options),
        step=StepSettings(step_tokens=32, max_tokens=256),
        verifier=VerifierCase(PRM, RooflineCosts.of(PRM, CARD, layout), prm_budget),
    )


def test_auto_is_not_put_off_by_what_is_scored_ahead():
    """What is scored ahead takes seconds, and is counted beside them: a call is no dearer."""
    uneven = SyntheticSearch(16, 4, 128, 800, 80, step_sigma=0.9, survival="score")
    plain = replace(
        case("in-gpu", tree=grow(uneven)), step=StepSettings(max_step_tokens=800, max_tokens=800)
    )

    def run(speculation, verify_ahead="never"):
        schedule = ScheduleSettings(schedule="in-gpu", verify_ahead=verify_ahead)
        return simulate(replace(plain, schedule=schedule, speculation=speculation))

    off, never, slack = run("off"), run("auto"), run("auto", "slack")
    assert slack.speculated_tokens == never.speculated_tokens > 0
    assert never.time_s < slack.time_s < 0.9 * off.time_s


@pytest.mark.parametrize("schedule", ["in-gpu", "layerwise", "locality"])
def test_the_generator_goes_as_it_does_alone(schedule):
    scored = simulate(case(schedule))
    alone = simulate(replace(case(schedule), verifier=None))
    assert alone.verify_s == alone.verifier_peak_bytes == 0
    assert scored.decode_s == pytest.approx(alone.decode_s)
    assert scored.time_s == pytest.approx(alone.time_s + scored.verify_s)
    assert scored.device_peak_bytes == alone.device_peak_bytes
    assert scored.stall_s == 0


def test_a_verifier_that_does_not_fit_is_written_back_or_says_so():
    roomy = simulate(case())
    budget = roomy.verifier_peak_bytes // 2
    with pytest.raises(CapacityError, match="of the verifier"):
        simulate(case("in-gpu", budget))
    for schedule in ("locality", "layerwise"):
        tight = simulate(case(schedule, budget))
        assert tight.verifier_peak_bytes <= budget
        assert tight.h2d_bytes > 0
        assert tight.stall_s > 0
        # Half batches where not all rows fit: the weights are read more often, never less.
        assert tight.verify_s >= roomy.verify_s - 1e-9


def test_evicted_scores_are_computed_again_where_nothing_is_written_back():
    roomy = simulate(case())
    tight = simulate(case(prm_budget=roomy.verifier_peak_bytes // 2, evict="recompute"))
    assert tight.h2d_bytes == tight.d2h_bytes == 0
    assert tight.verify_s > roomy.verify_s


@pytest.mark.parametrize(("num_beams", "step_tokens"), [(16, 32), (64, 32), (64, 300)])
def test_the_estimate_of_scoring_is_near(num_beams, step_tokens):
    """The expected tree against a sampled one: scoring reads few shared tokens."""
    work = Workload(num_beams, 2, 128, 600, step_tokens)
    tree = grow(SyntheticSearch(num_beams, 2, 128, 600, step_tokens))
    step = StepSettings(step_tokens=step_tokens, max_step_tokens=step_tokens, max_tokens=600)
    found = simulate(replace(case("in-gpu", tree=tree, prm_budget=20 * GIB), step=step))
    planned = estimate(work, MODEL, CARD, 4 * GIB, Scorer(PRM, 20 * GIB))["in-gpu/tree"]
    assert planned.verify_s == pytest.approx(found.verify_s, rel=0.03)
