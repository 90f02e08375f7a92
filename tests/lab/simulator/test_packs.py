"""Layer packs against AsyncSpade's Table 2, and against a clock that ticks."""

import random

import pytest

from beamwright_lab.simulator.sparse import in_packs, simulate_packs
from beamwright_lab.studies.sparse import RankSeconds

TABLE_2 = [  # layers, layers of a pack, milliseconds of inference and of the cache rank in each
    (36, 6, 7.13, 6.42), (36, 12, 14.26, 12.75), (36, 6, 5.47, 3.92), (36, 12, 10.94, 7.85),
    (36, 6, 7.30, 7.02), (36, 12, 14.60, 14.43), (36, 6, 5.91, 5.18), (36, 12, 11.82, 11.14),
    (64, 4, 6.30, 5.16), (64, 8, 12.60, 8.32), (64, 4, 4.39, 3.74), (64, 8, 8.78, 7.48),
    (64, 4, 7.77, 7.02), (64, 8, 15.54, 14.01), (64, 4, 4.37, 3.72), (64, 8, 8.74, 7.48),
]  # fmt: skip


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


@pytest.mark.parametrize(("layers", "pack_layers", "inference", "cache"), TABLE_2)
def test_table_two_s_cache_rank_is_hidden(layers, pack_layers, inference, cache):
    packs = [RankSeconds(inference, cache, 0.0, 0.0)] * (layers // pack_layers)
    found = simulate_packs(packs)
    assert found.token_s == pytest.approx(inference * layers / pack_layers)
    assert found.waited_s == 0
    assert packs[0].hidden
    assert found.margin_s >= inference - cache


def test_too_few_packs_hide_nothing_however_fast_the_cache_rank_is():
    """A pack's selection has the time of the other packs; one pack has none."""
    whole = RankSeconds(36.0, 30.0, 1.0, 3.0)
    for pack_layers, expected in ((36, 70.0), (18, 36.0), (12, 36.0)):
        packs = in_packs(whole, 36, pack_layers)
        assert simulate_packs(packs).token_s == pytest.approx(expected)
