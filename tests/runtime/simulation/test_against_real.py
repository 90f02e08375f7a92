"""The simulator moves exactly the bytes that the real engine moves for the same tree."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from beamwright import Solver
from beamwright.cost import Layout, ModelCosts
from beamwright.hardware import find_profile
from beamwright.report.recorded import _parse_tree, record_tree
from beamwright.runtime.simulation import RooflineCosts, Simulation, simulate

MODEL = "random:llama,layers=2,hidden=64,heads=4,kv_heads=4,intermediate=128,vocab=128,context=1024"
KV_BYTES = 2 * 2 * 64 * 4  # of one token, float32
BLOCK = 16 * KV_BYTES

LAYOUT = {"dense": Layout.DENSE, "tree": Layout.TREE}
FIXED = {"step_tokens": 24, "max_tokens": 96}
FREE = {"max_step_tokens": 40, "max_tokens": 120, "delimiter": "\n\n"}


def run_both(prompt_tokens=40, **options):
    """The real engine's facts, and the simulator's for the tree that it grew."""
    settings = {
        "model": MODEL,
        "verifier": "logprob",
        "ignore_eos": True,
        "n": 8,
        "width": 2,
        "max_rounds": 10,
        "schedule": "locality",
        "seed": 3,
        **FIXED,
        **options,
    }
    seen = {}
    cancelled = 0
    with Solver(**settings) as solver:
        solution = solver.synthetic(prompt_tokens, on_round=lambda r: seen.update(tree=r.tree))
        cancelled = solver.generator.store.counts.cancelled
        kv_budget = solver.generator.budget.total_bytes
        context = solver.generator.decoder.shape.context
        model = ModelCosts.of(solver.generator.decoder.shape, 4)
    # A link without delay: pruning finds nothing to cancel, so what is stored is comparable too.
    machine = replace(
        find_profile("epyc-2core"), h2d_bandwidth=1e30, d2h_bandwidth=1e30, copy_launch_s=1e-30
    )
    costs = RooflineCosts.of(model, machine, LAYOUT[solution.attention])
    case = Simulation(
        tree=_parse_tree(record_tree(seen["tree"])),
        model=model,
        costs=costs,
        kv_budget_bytes=kv_budget,
        schedule=solver.settings.schedule,
        step=solver.settings.step,
        context=context,
    )
    real = SimpleNamespace(**vars(solution.kv), cancelled=cancelled)
    return real, simulate(case)


def assert_equal(real, simulated):
    assert simulated.h2d_bytes == real.h2d_bytes
    assert simulated.groups == real.groups
    assert simulated.device_peak_bytes == real.device_peak_bytes
    assert simulated.dm_lower_bound_bytes == real.dm_lower_bound_bytes
    assert simulated.recomputed_tokens == real.recomputed_tokens
    if real.cancelled == simulated.cancelled == 0:
        assert simulated.d2h_bytes == real.d2h_bytes


@pytest.mark.parametrize("attention", ["tree", "dense"])
@pytest.mark.parametrize("blocks", [400, 60, 36])
def test_budgets(attention, blocks):
    real, simulated = run_both(attention=attention, kv_memory=str(blocks * BLOCK))
    assert (real.h2d_bytes > 0) == (blocks < 400)
    assert_equal(real, simulated)


@pytest.mark.parametrize("attention", ["tree", "dense"])
@pytest.mark.parametrize(
    "options",
    [
        {"planner": "greedy"},
        {"prefetch": False},
        {"balance": False},
        {"inter_beam": False},
        {"reuse": False},
        {"evict": "recompute"},
        {"max_batch": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parts_of_the_schedule(attention, options):
    real, simulated = run_both(attention=attention, kv_memory=str(44 * BLOCK), **options)
    assert real.h2d_bytes > 0 or real.recomputed_tokens > 0
    assert_equal(real, simulated)
