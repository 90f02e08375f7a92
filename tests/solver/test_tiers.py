"""What tiers promise of bytes: nothing moves that need not, and the least budget is enough."""

import re
from functools import partial

import pytest
from transformers import LlamaConfig

import engines
import fakes
from beamwright.errors import CapacityError
from beamwright.kv.link import StreamLink
from beamwright.solver import machinery
from engines import assert_nothing_allocated, grow
from streams import LateStreams

STEP, ROUNDS = 20, 3


@pytest.mark.parametrize(
    ("schedule", "attention"), [("locality", "tree"), ("locality", "dense"), ("layerwise", "tree")]
)
def test_a_tree_that_fits_never_touches_the_link(make_solver, schedule, attention):
    options = {"attention": attention, "n": 8, "max_rounds": 3, "host_memory": "8MiB"}
    with make_solver(schedule=schedule, **options) as solver:
        solution, _ = grow(solver)
    assert (solution.kv.h2d_bytes, solution.kv.d2h_bytes) == (0, 0)


@pytest.mark.parametrize("attention", ["tree", "dense"])
def test_the_least_budget_works_and_less_is_an_error(make_solver, attention):
    """The path with its step; the block beside it is the margin of the promise."""
    fixed = {"step_tokens": STEP, "max_rounds": ROUNDS, "ignore_eos": True, "max_tokens": 200}
    build = partial(make_solver, attention=attention, n=8, host_memory="8MiB", **fixed)
    base = build(schedule="in-gpu")
    solution, tree = grow(base)
    ledger = base.generator.store.device
    prompt = ledger.blocks_for(len(tree.root.token_ids))
    least = (prompt + ROUNDS * ledger.blocks_for(STEP) + 1) * ledger.bytes_per_block
    with build(schedule="locality", kv_memory=least) as solver:
        found, _ = grow(solver)
        assert found.tree_hash == solution.tree_hash
        assert found.kv.device_peak_bytes <= least
    too_little = least - 2 * ledger.bytes_per_block
    with build(schedule="locality", kv_memory=too_little) as solver:
        with pytest.raises(CapacityError):
            solver.solve(engines.PROBLEM)
        assert_nothing_allocated(solver)


def test_advice_is_never_what_is_in_use_already(make_solver):
    for schedule in ("in-gpu", "layerwise"):
        with make_solver(schedule=schedule, kv_memory=3 * 4096, host_memory="1MiB") as solver:
            with pytest.raises(CapacityError, match="Use --schedule locality, raise") as caught:
                solver.solve(engines.PROBLEM)
            assert not re.search("[0-9] bytes", str(caught.value))


# --- layers over the link of a GPU, by streams that stand in for a card's ---------------------


@pytest.fixture
def build(tmp_path):
    """Makes solvers of a model of eight layers: two stream buffers are a quarter of them."""
    fakes.write_tokenizer(tmp_path)
    config = LlamaConfig(**{**fakes.SMALL, "num_hidden_layers": 8}, num_key_value_heads=2)
    fakes.write_checkpoint(tmp_path, config, noise=0.15)
    options = {"n": 6, "width": 3, "max_rounds": 3, "max_step_tokens": 40, "max_tokens": 70}
    return partial(engines.tiny_solver, tmp_path, **options, host_memory="8MiB")


@pytest.mark.parametrize(("attention", "share"), [("tree", 0.4), ("dense", 0.4), ("dense", 1.0)])
def test_layerwise_over_streams_grows_the_same_tree(build, monkeypatch, attention, share):
    expected = build(schedule="in-gpu", attention=attention).solve(engines.PROBLEM)
    options = {"schedule": "layerwise", "attention": attention}
    peak = build(**options).solve(engines.PROBLEM).kv.device_peak_bytes
    found = []
    for link in (machinery.StreamLink, lambda *_, **__: StreamLink(LateStreams())):
        monkeypatch.setattr(machinery, "StreamLink", link)
        with build(**options, kv_memory=int(share * peak)) as solver:
            found.append(grow(solver)[0])
            assert solver.generator.store.scratch.used_bytes == 0
    copied, streamed = found
    assert streamed.tree_hash == copied.tree_hash == expected.tree_hash
    assert (copied.kv.h2d_bytes > 0) is (share < 1.0)
    assert copied.kv.h2d_bytes == streamed.kv.h2d_bytes
    assert copied.kv.d2h_bytes == streamed.kv.d2h_bytes
    assert streamed.kv.device_peak_bytes == copied.kv.device_peak_bytes <= int(share * peak)
