"""The rules of FlashTTS's baseline, on searches small enough to count by hand."""

from dataclasses import fields, replace

import pytest

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts
from beamwright.plan.fits import MARK_TOKENS
from beamwright.plan.machines import find_profile
from beamwright_lab.flashtts.baseline import (
    SOURCES,
    Baseline,
    Rules,
    Workload,
    baseline_of,
    simulate_baseline,
)
from beamwright_lab.flashtts.split import PAIRS
from simulated import recorded

MODEL = ModelCosts.of(NAMED_SHAPES["qwen2.5-math-1.5b"], 2)
BLOCK = 16 * MODEL.kv_bytes_per_token
PROMPT = 32


# Both first steps are opened once; the paths end with the second round.
TREE = recorded(PROMPT, {(0,): 32, (1,): 32, (0, 0): 32, (1, 0): 32})


def case(blocks=2000, tree=None, **rules):
    card = find_profile("rtx-4090")
    return Baseline(tree or TREE, MODEL, MODEL, card, blocks * BLOCK, Rules(**rules))


def test_every_rule_has_a_source():
    assert {field.name for field in fields(Rules)} == set(SOURCES)


def test_the_verifier_computes_steps_and_what_fills_no_block():
    found = simulate_baseline(case())
    # Round 1: 65 tokens a path, of which the second finds the prompt's two blocks. Round 2: 98
    # tokens, of which four blocks are found.
    first, second = (65 + 33), 2 * (98 - 64)
    assert found.verified_tokens == first + second
    assert found.step_tokens == PROMPT + 4 * (32 + MARK_TOKENS)
    assert found.preemptions == 0


def test_without_its_prefix_cache_the_verifier_computes_whole_paths():
    found = simulate_baseline(case(verifier_prefix_cache=False))
    assert found.verified_tokens == 2 * 65 + 2 * 98


def test_the_generator_loses_only_what_fills_no_block():
    # Of 64 tokens 63 have KV: three full blocks are found, 16 tokens computed, one of them new.
    found = simulate_baseline(case())
    assert found.recomputed_tokens == 16 + 2 * 15  # the second prompt of round 1 has a hit, too


def test_what_was_evicted_is_computed_again():
    # Room for one path at a time and little else in each half.
    ample = simulate_baseline(case())
    tight = simulate_baseline(case(blocks=16))
    assert tight.verified_tokens > ample.verified_tokens
    assert tight.time_s > ample.time_s


def test_the_order_is_random_and_reproducible():
    tree = Workload(generate_tokens=256, step_tokens=64).tree(16)
    tight = case(tree=tree, blocks=160)
    assert simulate_baseline(tight) == simulate_baseline(tight)
    orders = {simulate_baseline(replace(tight, seed=seed)).time_s for seed in range(3)}
    assert len(orders) > 1
    siblings = replace(tight, rules=Rules(random_order=False))
    assert simulate_baseline(siblings) == simulate_baseline(replace(siblings, seed=1))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_paper_s_pairs_have_room_for_the_search(pair):
    assert simulate_baseline(baseline_of(pair, Workload().tree(8), 8)).goodput_tok_s > 0
