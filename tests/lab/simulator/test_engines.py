import pytest

from beamwright.errors import CapacityError
from beamwright.plan.costs import Layout
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.engines import ENGINES, FAIR, EngineCase, simulate_engine
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from simulated import CARD, GIB, MODEL, TREE

RAGGED = grow(SyntheticSearch(16, 2, 100, 256, 32, step_sigma=0.5))


def run(name, tree=TREE, budget=GIB // 2):
    """KV read row by row, and shared KV once."""
    return simulate_engine(EngineCase(tree, MODEL, CARD, budget), name)


@pytest.mark.parametrize("tree", [TREE, RAGGED], ids=["fixed steps", "ragged steps"])
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_ends_the_search_within_its_memory(name, tree):
    for found in run(name, tree):
        assert found.device_peak_bytes <= GIB // 2
        assert found.time_s == pytest.approx(found.compute_s + found.stall_s)
        lost = found.preemptions + found.recomputed_tokens + found.h2d_bytes
        assert lost > 0 or found.completed < 1, "it does not fit"
        assert found.completed == 1 or name == "step"
        assert (found.d2h_bytes > 0) == (found.host_peak_bytes > 0)
        assert found.h2d_bytes == 0 or found.d2h_bytes > 0


@pytest.mark.parametrize("name", FAIR)
def test_where_all_fits_nothing_is_loaded_or_preempted(name):
    _, found = run(name, budget=8 * GIB)
    assert found.h2d_bytes == found.preemptions == found.stall_s == 0


def test_where_all_fits_sglang_computes_every_token_once_but_for_siblings_last_ones():
    _, found = run("sglang", budget=8 * GIB)
    extended = len({step.lineage[:-1] for step in TREE.nodes if len(step.lineage) > 1})
    siblings = sum(len(step.lineage) > 1 for step in TREE.nodes) - extended
    assert found.recomputed_tokens == siblings + 15  # 16 prompts of the first round, one each


def test_where_all_fits_an_engine_takes_as_long_as_our_own_in_gpu_schedule():
    case = Simulation(
        TREE,
        MODEL,
        RooflineCosts.of(MODEL, CARD, Layout.TREE),
        8 * GIB,
        ScheduleSettings(schedule="in-gpu"),
        StepSettings(step_tokens=32, max_tokens=256),
    )
    _, found = run("sglang", budget=8 * GIB)
    assert found.time_s == pytest.approx(simulate(case).time_s, rel=0.02)


def test_step_computes_little_again_and_does_not_complete_the_tree():
    (_, step), (_, vllm) = run("step"), run("vllm")
    assert 0 < step.completed < vllm.completed == 1
    assert step.preemptions == 0
    assert step.recomputed_tokens < vllm.recomputed_tokens


def test_a_path_that_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match="the longest path needs"):
        run("vllm", budget=GIB // 8)
