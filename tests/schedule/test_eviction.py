import random

from beamwright.schedule.forest import eviction_order


def test_against_one_sort_by_the_whole_rule():
    rng = random.Random(0)
    for _ in range(200):
        keys = rng.sample(range(30), rng.randint(1, 20))
        next_use = {key: rng.randint(1, 4) for key in range(30) if rng.random() < 0.5}
        last_use = {key: rng.randint(0, 5) for key in range(30) if rng.random() < 0.9}
        stored = {key for key in range(30) if rng.random() < 0.5}
        slow = sorted(keys, key=lambda k: (k in next_use, -next_use.get(k, 0), last_use.get(k, -1)))
        assert eviction_order(keys, next_use, last_use) == slow
        slow.sort(key=lambda k: (k in next_use, k not in next_use and k not in stored))
        assert eviction_order(keys, next_use, last_use, stored) == slow
