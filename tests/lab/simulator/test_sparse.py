"""Selected KV in layer packs: AsyncSpade's Table 2, a clock that ticks, a tree by hand."""

import math
import random
from dataclasses import replace

import pytest

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright.sparse.rule import SparseRule
from beamwright_lab.simulator.sparse import (
    SparseCase,
    make_packs,
    simulate_packs,
    simulate_sparse,
)
from beamwright_lab.studies.sparse import RankSeconds, SparseLoad
from simulated import recorded


def ticked(packs, num_tokens, distance, selection):
    """The ends of packs, where every resource looks each tick whether it is free for its next."""
    count = len(packs)
    kinds = ("inference_s", "up_s", "cache_s", "down_s")
    queues = [[*range(num_tokens * count)] for _ in kinds]
    busy_until, done = [0] * 4, [dict() for _ in kinds]  # when each job ends
    tick = 0
    while any(queues):
        for kind, name in enumerate(kinds):
            while queues[kind] and busy_until[kind] <= tick:
                job = queues[kind][0]
                if kind == 0:
                    pack, before = packs[job % count], job - distance
                    needs = done[3].get(before, tick + 1) if before >= 0 else 0
                else:
                    pack = packs[(job + distance) % count]
                    needs = done[kind - 1].get(job, tick + 1)
                if needs > tick:
                    break
                queues[kind].pop(0)
                took = getattr(pack, name) + (selection if kind == 0 else 0)
                busy_until[kind] = done[kind][job] = tick + took
        tick += 1
    return [done[0][job] for job in range(num_tokens * count)]


@pytest.mark.parametrize("seed", range(40))
def test_a_clock_that_ticks_agrees(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 5)
    packs = [RankSeconds(*(draw.randint(1, 6) for _ in range(4))) for _ in range(count)]
    distance = draw.choice([count, 2 * count, draw.randint(1, count + 1)])
    selection = draw.choice([0, 1])
    ends = ticked(packs, 12, distance, selection)
    found = simulate_packs(packs, 12, distance=distance, selection_s=selection * count)
    assert found.token_s == (ends[-1] - ends[6 * count - 1]) / 6
    work = sum(pack.inference_s + selection for pack in packs)
    assert found.waited_s == pytest.approx(found.token_s - work)
    assert (found.margin_s < 0) == (found.waited_s > 0)


def test_too_few_packs_hide_nothing_however_fast_the_cache_rank_is():
    """A pack's selection has the time of the other packs; one pack has none."""
    whole = RankSeconds(36.0, 30.0, 1.0, 3.0)
    for pack_layers, expected in ((36, 70.0), (18, 36.0), (12, 36.0)):
        packs = make_packs(whole, 36, pack_layers)
        assert simulate_packs(packs).token_s == pytest.approx(expected)


# --- a recorded search with KV at home on the host -------------------------------------------

SHAPE = NAMED_SHAPES["llama-3.1-8b"]
ROOFLINE = Roofline(ModelCosts.of(SHAPE, 2), find_profile("rtx-4090-x16"))
KV = ROOFLINE.model.kv_bytes_per_token
CASE = SparseCase(SparseRule("ahead-pages", 64, 64), SHAPE)


TREE = recorded(1000, {(0,): 30, (1,): 50, (0, 0): 20, (0, 1): 20})


def by_hand(rows, visible, distinct):
    load = SparseLoad(rows, visible, 64, shared=min(1.0, distinct / (rows * visible)))
    packs = make_packs(CASE.ranks(ROOFLINE, load), SHAPE.layers, 1)
    return simulate_packs(packs, 8, distance=2)


def test_the_rounds_of_a_tree_one_after_the_other():
    found = simulate_sparse(TREE, ROOFLINE, CASE, 10**9)
    both = by_hand(2, round(1015.5), 1000 + 2 * 15.5)
    longer = by_hand(1, round(1040.5), 1040.5)
    children = by_hand(2, round(1040.5), 1030 + 2 * 10.5)
    expected = 30 * both.token_s + 20 * longer.token_s + 20 * children.token_s
    assert found.decode_s == pytest.approx(expected, rel=1e-9)
    assert found.selecting_tokens == 2 * 30 + 20 + 2 * 20
    assert found.rows == 2
    by_rows = 64 * KV * CASE.host.anew * found.selecting_tokens
    assert 0.6 * by_rows < found.h2d_bytes < 0.9 * by_rows, "what both select is brought once"


def test_one_row_at_a_time_where_there_is_no_room_for_two():
    found = simulate_sparse(TREE, ROOFLINE, CASE, int(1.5 * 64 * KV))
    assert found.rows == 1
    assert found.decode_s > simulate_sparse(TREE, ROOFLINE, CASE, 10**9).decode_s
    assert simulate_sparse(TREE, ROOFLINE, CASE, 63 * KV) is None


def test_rows_that_read_all_bring_their_paths_once_a_step():
    full = SparseCase(SparseRule("ahead", 64, 2000), SHAPE)
    found = simulate_sparse(TREE, ROOFLINE, full, 10**9)
    assert found.h2d_bytes == (1000 + 1030) * KV
    assert found.waited_s == pytest.approx(found.h2d_bytes / (31.5e9 * 0.82), rel=0.01)
    assert (found.selecting_tokens, found.hidden_share) == (0, None)
    assert simulate_sparse(TREE, ROOFLINE, full, 500 * KV) is None


def test_a_fast_host_hides_everything_and_a_true_query_nothing():
    fast = replace(CASE, host=replace(CASE.host, bandwidth=1e15, flops=1e18, anew=1e-6))
    found = simulate_sparse(TREE, ROOFLINE, fast, 10**9)
    assert (found.hidden_share, found.waited_s) == (1.0, pytest.approx(0.0, abs=1e-9))
    late = simulate_sparse(TREE, ROOFLINE, replace(fast, rule=SparseRule("pages", 64, 64)), 10**9)
    assert late.hidden_share == 0.0
    assert math.isclose(late.decode_s - late.waited_s, found.decode_s, rel_tol=1e-3)
