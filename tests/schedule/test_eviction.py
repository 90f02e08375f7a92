import random

from beamwright.schedule.forest import eviction_order


def test_unused_go_first_by_age_then_the_farthest_use():
    last_use = {"old": 1, "fresh": 5, "next": 2, "far": 4}
    order = eviction_order(["next", "fresh", "far", "old"], {"next": 1, "far": 3}, last_use)
    assert order == ["old", "fresh", "far", "next"]


def test_ties_go_to_the_older_then_to_the_order_given():
    assert eviction_order("abc", {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 1, "c": 3}) == [*"bac"]
    assert eviction_order("cab", {}, {}) == [*"cab"]
    assert eviction_order("cab", {"a": 1, "b": 1}, {}) == [*"cab"]


def test_against_one_sort_by_the_whole_rule():
    rng = random.Random(0)
    for _ in range(200):
        keys = rng.sample(range(30), rng.randint(1, 20))
        next_use = {key: rng.randint(1, 4) for key in range(30) if rng.random() < 0.5}
        last_use = {key: rng.randint(0, 5) for key in range(30)}
        stored = {key for key in range(30) if rng.random() < 0.5}
        slow = sorted(keys, key=lambda k: (k in next_use, -next_use.get(k, 0), last_use[k]))
        assert eviction_order(keys, next_use, last_use) == slow
        slow.sort(key=lambda k: (k in next_use, k not in next_use and k not in stored))
        assert eviction_order(keys, next_use, last_use, stored) == slow
