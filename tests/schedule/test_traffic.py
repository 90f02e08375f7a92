import random

from beamwright.schedule.forest import loaded_bytes, replay
from schedule.forests import demand_of, paths_of, random_demand, slow_need

PATHS = ["pa", "pa", "pb", "pb"]  # one prompt, two survivors, width 2


def test_a_segment_crosses_once_while_it_stays():
    demand = demand_of(PATHS, capacity=32)
    assert loaded_bytes(demand, [[0, 1], [2, 3]]) == 30
    assert loaded_bytes(demand, [[0], [2], [1], [3]]) == 30
    tight = demand_of(PATHS, capacity=22)
    assert loaded_bytes(tight, [[0, 1], [2, 3]]) == 30
    assert loaded_bytes(tight, [[0], [2], [1], [3]]) == 50


def test_what_is_resident_is_not_loaded():
    demand = demand_of(PATHS, capacity=31, resident=("p", "pb"))
    outcome = replay(demand, [[2, 3], [0, 1]])
    assert outcome.loaded_bytes == 10
    assert outcome.resident == (True, True, False)  # p, pa; pb is the oldest, so it made room


def test_resident_segments_may_be_lost_before_their_use():
    demand = demand_of(PATHS, capacity=22, resident=("p", "pb"))
    assert loaded_bytes(demand, [[0, 1], [2, 3]]) == 20
    assert loaded_bytes(demand, [[2, 3], [0, 1]]) == 10


def test_of_equal_age_growth_leaves_before_segments():
    demand = demand_of(["a", "b"], growth=10, capacity=35)
    outcome = replay(demand, [[0], [1]])
    assert outcome.resident == (True, True)
    assert outcome.grown_resident == (False, True)


def test_copies_need_room_but_cross_once():
    shared = demand_of(PATHS, growth=0, capacity=40)
    copied = demand_of(PATHS, growth=0, capacity=40, copies=True)
    assert slow_need(copied, [0, 1]) == 40
    assert loaded_bytes(shared, [[0, 1], [2, 3]]) == 30
    assert loaded_bytes(copied, [[0, 1], [2, 3]]) == 30
    again = [[0, 1], [2, 3], [0]]
    assert loaded_bytes(shared, again) == 30
    assert loaded_bytes(copied, again) == 40


def test_a_group_over_capacity_drops_everything_else():
    demand = demand_of(["abc", "d"], growth=1, capacity=15, resident=("d",))
    assert loaded_bytes(demand, [[0], [1]]) == 40


def test_against_a_plain_simulation():
    for seed in range(200):
        copies = seed % 2 == 1
        demand = random_demand(seed, num_beams=8, copies=copies, scattered=seed % 3 == 0)
        beams = random.Random(seed).sample(range(8), 8)
        groups = [beams[:3], beams[3:5], beams[5:]]
        assert loaded_bytes(demand, groups) == plain(demand, groups)


def plain(demand, groups):
    """Loads by the rule: keep what is used again, the nearest use first, while it fits.

    Of equal next use, what was used last is kept; of equal age, what was listed last.
    """
    paths, size = paths_of(demand), demand.segment_bytes
    reads = [reading_order(demand, group) for group in groups]
    held = [s for s, copies in enumerate(demand.resident) if copies]
    loaded = 0
    for number, group in enumerate(groups):
        loaded += sum(size[s] for s in reads[number] if s not in held)
        waiting = {}
        for segment in held:
            later = [n for n in range(number + 1, len(groups)) if segment in reads[n]]
            if later and segment not in reads[number]:
                waiting[segment] = later[0]
        room = max(0, demand.capacity_bytes - slow_need(demand, group))
        order = sorted(waiting, key=lambda s: (waiting[s], -held.index(s)))
        kept = []
        for segment in order:
            if size[segment] > room:
                break
            room -= size[segment]
            kept.append(segment)
        held = [s for s in held if s in kept] + reads[number]
    assert all(paths)
    return loaded


def reading_order(demand, group):
    found = []
    for beam in group:
        segment = demand.leaf[beam]
        while segment is not None and segment not in found:
            found.append(segment)
            segment = demand.parent[segment]
    return found
