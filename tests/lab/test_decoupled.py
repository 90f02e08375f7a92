"""The decoupled studies: ceilings, the work of trees, the cache, memory split as in the thesis."""

from itertools import pairwise

import pytest

from beamwright.plan.machines import find_profile
from beamwright_lab.decoupled import cache, throughput
from beamwright_lab.decoupled.throughput import Machine, PassCeiling, Setting, volumes
from beamwright_lab.simulator.many import simulate_many

CARD = find_profile("rtx-4090")


@pytest.fixture(scope="module")
def searched():
    return cache.searches(2)


def test_searches_are_of_problems_of_their_own(searched):
    assert len({tree.problem_id for tree in searched}) == 2
    assert max(tree.rounds for tree in searched) <= cache.MOST_DEPTH


def test_memory_is_split_by_the_generators_part():
    sums = {
        sum(vars(cache.Memory.of(CARD, split)).values()) // 16 for split in cache.SPLITS["rtx-4090"]
    }
    assert max(sums) - min(sums) <= 1, "what one gains the other loses"
    assert max(sums) < cache.USABLE * CARD.device_memory_bytes / 16
    for card, splits in cache.SPLITS.items():
        found = [cache.Memory.of(find_profile(card), split) for split in splits]
        assert all(min(each.generator, each.verifier) > 0 for each in found)


def test_where_all_fits_nothing_leaves_and_little_memory_is_seen(searched):
    ample = cache.run(
        searched, CARD, cache.Memory(2**31, 2**31), 2, victims="lru", evict="recompute"
    )
    assert ample is not None
    assert ample.is_calm
    assert ample.generator.hit_rate > 0.9
    tight = cache.run(
        searched, CARD, cache.Memory(2**31, 2**28), 2, victims="lru", evict="recompute"
    )
    assert tight is not None
    assert tight.verifier.hit_rate < ample.verifier.hit_rate
    assert tight.verifier.recomputed_blocks > 0
    assert tight.tok_s < ample.tok_s
    row = cache.split_row("rtx-4090", 2, "lru", 0.2, cache.Memory(2**31, 2**28), tight)
    assert row["verifier thrash"] > row["thrash"] == 0
    assert (
        cache.run(searched, CARD, cache.Memory(2**31, 2**20), 2, victims="lru", evict="recompute")
        is None
    )
    generator, verifier = cache.batch_rows("rtx-4090", searched, ample)
    assert generator["requests of 1"] > 0.99
    assert verifier["requests of 1"] < 0.5
    assert generator["of 2,048"] < 0.1 < verifier["of 2,048"]


def test_the_verifier_saturates_with_fewer_requests():
    for row in cache.size_rows("rtx-4090"):
        if 4 <= row["requests"] <= 64:
            assert row["of its most"] < row["of the verifier's most"]


def test_a_prompt_in_a_pass_delays_every_row_of_it():
    for row in cache.hybrid_rows("rtx-4090"):
        assert 1 < row["times, 200"] < row["times, 1000"]
        assert row["alone, ms"] < row["with 200"] < row["apart, 200"], "and saves a little"


# --- throughput ---------------------------------------------------------------------------------

TREES = throughput.trees(3, beams=4, max_rounds=6)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_run_passes_the_ceiling(overlap):
    machine = Machine.of("rtx-4090")
    setting = Setting(explore="decoupled", overlap=overlap)
    found = simulate_many(machine.cases(TREES, setting))
    ceiling = PassCeiling.of(machine, TREES)
    assert 0 < ceiling.both_s < ceiling.turns_s
    assert found.time_s > (ceiling.both_s if overlap else ceiling.turns_s)
    assert throughput.most_in_flight(found) == 3
    assert max(tree.rounds for tree in TREES) <= 6


def test_the_work_of_a_tree():
    decoded, scored = volumes(TREES[:1])
    steps = [node.tokens for node in TREES[0].nodes]
    assert decoded.tokens == sum(steps)
    assert scored.tokens == sum(steps) + len(steps) + TREES[0].prompt_tokens
    assert decoded.reads < decoded.sees


def test_more_rows_are_faster_by_less_than_their_number():
    rows = throughput.utilisation("rtx-4090")
    for one, other in pairwise(rows):
        assert one["times"] < other["times"] <= 2 * one["times"]


def test_the_more_is_kept_of_what_is_ahead_the_fewer_passes():
    rows = [row for row in throughput.invocations("rtx-4090", TREES) if row["in flight"] == 1]
    rows.sort(key=lambda row: row["kept"])
    passes = [row["passes"] for row in rows]
    assert passes == sorted(passes, reverse=True)
    assert 0 < rows[0]["kept"] < rows[-1]["kept"] == 1
    assert 0.5 < passes[-1] < 1
