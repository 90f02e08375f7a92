"""The cache study counts what it says, and memory is split as in the thesis."""

import pytest

from beamwright.plan.machines import find_profile
from beamwright_lab.decoupled import blocks
from beamwright_lab.decoupled.cache import (
    MOST_DEPTH,
    SPLITS,
    USABLE,
    Memory,
    batch_rows,
    hybrid_rows,
    run,
    searches,
    size_rows,
    split_row,
)

CARD = find_profile("rtx-4090")


@pytest.fixture(scope="module")
def trees():
    return searches(2)


def test_searches_are_of_problems_of_their_own(trees):
    assert len({tree.problem_id for tree in trees}) == 2
    assert max(tree.rounds for tree in trees) <= MOST_DEPTH


def test_memory_is_split_by_the_generators_part():
    sums = {sum(vars(Memory.of(CARD, split)).values()) // 16 for split in SPLITS["rtx-4090"]}
    assert max(sums) - min(sums) <= 1, "what one gains the other loses"
    assert max(sums) < USABLE * CARD.device_memory_bytes / 16
    for card, splits in SPLITS.items():
        found = [Memory.of(find_profile(card), split) for split in splits]
        assert all(min(each.generator, each.verifier) > 0 for each in found)


def test_where_all_fits_nothing_leaves_and_little_memory_is_seen(trees):
    ample = run(trees, CARD, Memory(2**31, 2**31), 2, victims="lru", evict="recompute")
    assert ample is not None
    assert ample.is_calm
    assert ample.generator.hit_rate > 0.9
    tight = run(trees, CARD, Memory(2**31, 2**28), 2, victims="lru", evict="recompute")
    assert tight is not None
    assert tight.verifier.hit_rate < ample.verifier.hit_rate
    assert tight.verifier.recomputed_blocks > 0
    assert tight.tok_s < ample.tok_s
    row = split_row("rtx-4090", 2, "lru", 0.2, Memory(2**31, 2**28), tight)
    assert row["verifier thrash"] > row["thrash"] == 0
    assert run(trees, CARD, Memory(2**31, 2**20), 2, victims="lru", evict="recompute") is None
    generator, verifier = batch_rows("rtx-4090", trees, ample)
    assert generator["requests of 1"] > 0.99
    assert verifier["requests of 1"] < 0.5
    assert generator["of 2,048"] < 0.1 < verifier["of 2,048"]
    assert generator["p10"] <= generator["p50"] <= generator["p90"]


def test_the_verifier_saturates_with_fewer_requests():
    for row in size_rows("rtx-4090"):
        if 4 <= row["requests"] <= 64:
            assert row["of its most"] < row["of the verifier's most"]


def test_a_prompt_in_a_pass_delays_every_row_of_it():
    for row in hybrid_rows("rtx-4090"):
        assert 1 < row["times, 200"] < row["times, 1000"]
        assert row["alone, ms"] < row["with 200"] < row["apart, 200"], "and saves a little"


def test_under_vllms_rules_blocks_are_counted_by_hash(trees):
    """Alg. 1: what has left and is computed again; Figure 5.3: blocks that requests hold."""
    ample, tight = (blocks.run(trees, CARD, Memory(2**31, size), 2)[1] for size in (2**31, 2**27))
    assert ample.facts()["thrash"] == 0 < tight.facts()["thrash"] < 1
    assert tight.facts()["held"] < ample.facts()["held"] <= ample.facts()["held, most"]
    assert tight.meter.now_s > ample.meter.now_s
    assert tight.run.completed == ample.run.completed
