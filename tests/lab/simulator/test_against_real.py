"""The simulator moves exactly the bytes that the real engine moves for the same tree."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

import engines
import fakes
from beamwright import Solver
from beamwright.io import read_toml_beside
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.tree.recording import write_tree_record
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.recorded import read_recorded
from beamwright_lab.simulator.run import simulate

MODEL = "random:llama,layers=2,hidden=64,heads=4,kv_heads=4,intermediate=128,vocab=128,context=1024"
BLOCK = 16 * 2 * 2 * 64 * 4  # bytes of 16 tokens, float32
LAYOUT = {"dense": Layout.DENSE, "tree": Layout.TREE}
# No delay on the link: nothing is under way when a node is pruned, so nothing is cancelled.
MACHINE = replace(
    find_profile("epyc-2core"), h2d_bandwidth=1e30, d2h_bandwidth=1e30, copy_launch_s=1e-30
)
SAME = (
    *("h2d_bytes", "d2h_bytes", "groups", "device_peak_bytes", "host_peak_bytes"),
    *("dm_lower_bound_bytes", "recomputed_tokens"),
)
SEARCH = {
    **{"model": MODEL, "verifier": "logprob", "ignore_eos": True, "n": 8, "width": 2, "seed": 3},
    **{"max_rounds": 10, "step_tokens": 24, "max_tokens": 96, "schedule": "locality"},
}
# Layers come and go: fewer of them fit as paths grow, more once the round is pruned.
LAYERS = {
    "schedule": "layerwise",
    "model": MODEL.replace("layers=2,hidden=64", "layers=8,hidden=32"),
}
# Steps turn out longer than the first guess of 32 tokens.
LONGER = {"step_tokens": None, "max_step_tokens": 60, "max_tokens": 130, "batching": "continuous"}


def both(solver, solve, file):
    """What the real engine moved, and what the simulator moves for the tree that it grew."""
    trees = {}
    # Pruning cancels what happens to be under way; waiting for it makes the bytes repeatable.
    link = solver._machinery.tiers[0].link
    link.cancel = link.wait
    with solver:
        solution = solve(lambda report: trees.update(last=report.tree))
    write_tree_record(trees["last"], file)
    shape = solver.generator.decoder.shape
    model = ModelCosts.of(shape, 4)
    case = Simulation(
        tree=read_recorded(file),
        model=model,
        costs=RooflineCosts.of(model, MACHINE, LAYOUT[solution.attention]),
        kv_budget_bytes=solution.kv.device_budget_bytes,
        schedule=solver.settings.schedule,
        step=solver.settings.step,
        context=shape.context,
    )
    simulated = simulate(case)
    assert simulated.generator_cache == solution.cache.generator
    found = [{name: getattr(each, name) for name in SAME} for each in (solution.kv, simulated)]
    if solver.settings.schedule.schedule == "layerwise":  # the host has no limit
        found[0]["host_peak_bytes"] = 0
    assert found[1] == found[0]
    return solution.kv


@pytest.mark.parametrize(
    ("attention", "blocks", "options"),
    [
        *read_toml_beside(__file__)["cases"],
        ("tree", 28, LAYERS),
        ("dense", 50, LAYERS),
        ("tree", 18, LONGER),
        ("tree", 14, LONGER),
        ("dense", 26, LONGER),
    ],
    ids=str,
)
def test_equal_bytes_under_every_budget_and_whatever_is_switched_off(
    tmp_path, parked, attention, blocks, options
):
    memory = str(blocks * BLOCK)
    solver = Solver(**{**SEARCH, "attention": attention, "kv_memory": memory, **options})
    real = both(solver, lambda seen: solver.synthetic(40, on_round=seen), tmp_path / "tree.json")
    assert (real.h2d_bytes + real.recomputed_tokens > 0) == (blocks < 400)
    assert parked or options != LONGER, "beams leave in the middle of a step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose steps end at EOS and at limits; always the same one."""
    folder = tmp_path_factory.mktemp("model")
    fakes.write_tokenizer(folder)
    config = LlamaConfig(**{**fakes.SMALL, "eos_token_id": [2, 30, 40]}, num_key_value_heads=2)
    fakes.write_checkpoint(folder, config, seed=3, noise=0.15)
    return folder


@pytest.mark.parametrize(("attention", "blocks"), [("tree", 6), ("dense", 7)])
def test_equal_bytes_with_steps_that_end_anywhere(folder, tmp_path, attention, blocks):
    options = {"max_step_tokens": 20, "max_tokens": 70, "n": 16, "width": 2}
    options |= {"kv_memory": str(blocks * 16 * 2 * 2 * 2 * 8 * 4), "delimiter": "no such text"}
    solver = engines.tiny_solver(folder, schedule="locality", attention=attention, **options)
    file = tmp_path / "tree.json"
    assert both(solver, lambda seen: solver.solve("6*7?", on_round=seen), file).h2d_bytes > 0
    nodes = json.loads(file.read_text())["nodes"]
    assert len({node["tokens"] for node in nodes}) > 5
    assert len({node["stop"] for node in nodes}) > 1
