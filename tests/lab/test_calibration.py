from dataclasses import replace

import numpy as np
import pytest

from beamwright.engine.timeline import Timeline
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright_lab.checks.calibration import (
    KINDS,
    FittedCosts,
    LinkCosts,
    Measured,
    count_work,
    fit_costs,
    iteration_seconds,
)
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow

MODEL = ModelCosts(4, 1000, 4000, 1024, 4, 16, 4)
LINK = LinkCosts(bandwidth=1e6, fixed_s=0.5)
TRUE = dict.fromkeys(KINDS, 0.0) | {
    "groups": 2e-2,
    "token_steps": 5e-3,
    "token_rows": 1e-4,
    "token_tokens_read": 2e-6,
    "prefills": 3e-2,
    "prefill_tokens": 4e-4,
}


def search(n, prompt, step_tokens, layout=Layout.TREE):
    tree = grow(SyntheticSearch(n, 2, prompt, 4 * step_tokens, step_tokens))
    return Simulation(
        tree=tree,
        model=MODEL,
        costs=RooflineCosts.of(MODEL, find_profile("epyc-2core"), layout),
        kv_budget_bytes=2**26,
        schedule=ScheduleSettings(schedule="in-gpu"),
        step=StepSettings(step_tokens=step_tokens),
    )


def measured(case, costs):
    clock = VirtualClock()
    timeline = Timeline(clock)
    simulate(replace(case, costs=costs), clock, timeline)
    return Measured(case, iteration_seconds(timeline))


def test_work_is_counted_per_iteration():
    """A step of 24 tokens: the first is drawn with the parents' last, then come 16 and 8."""
    found = count_work(search(8, 40, 24))
    assert len(found) == 8
    rounds = [found[i] + found[i + 1] for i in range(0, 8, 2)]
    first, last = (dict(zip(KINDS, each, strict=True)) for each in (rounds[0], rounds[-1]))
    assert found[1][KINDS.index("token_steps")] == 8
    assert (first["groups"], first["group_rows"], first["group_tokens_read"]) == (1, 8, 40)
    assert (first["prefills"], first["prefill_tokens"]) == (1, 40)
    assert (first["token_steps"], first["token_rows"]) == (24, 24 * 8)
    assert first["token_tokens_read"] == sum(40 + 8 * (token + 1) for token in range(24))
    assert (last["token_steps"], last["prefills"]) == (23, 0), "nobody goes on behind a path's end"


def test_the_costs_of_a_machine_are_found_again():
    true = FittedCosts(Layout.TREE, tuple(TRUE.values()), LINK)
    shapes = [(4, 60, 20), (12, 200, 30), (24, 120, 20), (40, 30, 16), (6, 300, 40)]
    fitted = fit_costs([measured(search(*shape), true) for shape in shapes], LINK)
    other = search(16, 90, 27)
    real, simulated = (simulate(replace(other, costs=costs)) for costs in (true, fitted))
    assert simulated.time_s == pytest.approx(real.time_s, rel=0.01)
    assert min(fitted.seconds) >= 0
    assert np.isfinite(fitted.seconds).all()
