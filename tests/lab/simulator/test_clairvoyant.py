"""Bounds of traffic: below the best of all orders on small trees, which is below any schedule."""

import random
from functools import lru_cache
from itertools import product
from math import inf

import pytest

from beamwright.errors import CapacityError
from beamwright.plan.costs import Layout
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.replay import Script
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.studies.clairvoyant import Life, traffic_bound
from simulated import CARD, MODEL

BLOCK = 8
BLOCK_BYTES = BLOCK * MODEL.kv_bytes_per_token
NUM_TREES = 200
OPTIONS = (
    {"write_back": "eager"},
    {"write_back": "lazy"},
    {"batching": "continuous"},
    {"max_batch": 1},
    {"prefetch": False},
)


def known_future_loads(moments, capacity):
    """Blocks that are loaded where exactly these things are held at one moment after the other,
    and what is used last is evicted first (Belady): the fewest that these batches allow.

    moments: per moment, the blocks of each key that are in use. A key's blocks are new where they
    are more than before, and are dropped after its last use.
    """
    uses = {}
    for number in range(len(moments) - 1, -1, -1):
        for key in moments[number]:
            uses.setdefault(key, []).append(number)
    held, known = {}, {}
    loads = 0
    for moment in moments:
        for key, blocks in moment.items():
            loads += max(0, known.get(key, 0) - held.get(key, 0))
            held[key] = known[key] = blocks
            uses[key].pop()
        held = {key: blocks for key, blocks in held.items() if uses[key] or key in moment}
        over = sum(held.values()) - capacity
        if over <= 0:
            continue
        idle = [key for key in held if key not in moment]
        for key in sorted(idle, key=lambda key: uses[key][-1] if uses[key] else inf, reverse=True):
            taken = min(over, held[key])
            held[key] -= taken
            over -= taken
            if over <= 0:
                break
    return loads


class Best:
    """The fewest blocks over all orders of a round's beams, and all choices of what to keep."""

    def __init__(self, tree, capacity):
        self.capacity = capacity
        sizes = {(): -(-tree.prompt_tokens // BLOCK)}
        for step in tree.nodes:
            kept = 0 if step.stop.ends_path else -(-(step.tokens - 1) // BLOCK)
            sizes[step.lineage] = kept
        self.names = sorted(sizes)
        self.sizes = sizes
        depth = max(map(len, sizes))
        self.rounds = [[n for n in self.names if len(n) == level] for level in range(1, depth + 1)]

    def used_later(self, name, number, left):
        """Does a beam that is still to come, in this round or a later one, read it?"""
        later = (beam for beams in self.rounds[number + 1 :] for beam in beams)
        return any(beam[: len(name)] == name for beam in (*left, *later) if beam != name)

    def steps(self, number, left):
        """Each beam that may come next, who is left then, and where time stands after it."""
        for beam in left:
            rest = tuple(other for other in left if other != beam)
            over = not rest
            after = tuple(self.rounds[number + 1]) if over and number + 1 < len(self.rounds) else ()
            yield beam, rest, (number + 1, after) if over else (number, rest)

    def loads(self):
        @lru_cache(None)
        def best(number, left, held):
            if not left:
                return 0
            found = []
            for beam, rest, then in self.steps(number, left):
                now = dict(held)
                path = [beam[:length] for length in range(len(beam))]
                cost = sum(self.sizes[n] - now.get(n, 0) for n in path) if number else 0
                now |= {name: self.sizes[name] for name in (*path, beam)}
                fixed = sum(self.sizes[name] for name in (*path, beam))
                if fixed > self.capacity:
                    return float("inf")
                now = {
                    n: b for n, b in now.items() if n in path or self.used_later(n, number, rest)
                }
                idle = [name for name in now if name not in path and name != beam]
                room = self.capacity - fixed
                total = min(room, sum(now[name] for name in idle))
                for kept in product(*(range(now[name] + 1) for name in idle)):
                    if sum(kept) != total:
                        continue
                    keep = {name: now[name] for name in now if name not in idle}
                    keep |= dict(zip(idle, kept, strict=True))
                    keep = {n: b for n, b in keep.items() if b and self.used_later(n, number, rest)}
                    found.append(cost + best(*then, tuple(sorted(keep.items()))))
            return min(found)

        return best(0, tuple(self.rounds[0]), ())

    def stores(self, *, blind):
        """Loads are free: what has been sent to the host need not be on the device."""

        @lru_cache(None)
        def best(number, left, alive, sent):
            if not left:
                return 0
            found = []
            for beam, rest, then in self.steps(number, left):
                fixed = {beam[:length] for length in range(len(beam) + 1)}
                kept = {
                    n: s
                    for n, s in zip(alive, sent, strict=True)
                    if n in fixed or self.needed(n, number, rest, blind=blind)
                } | {n: 0 for n in fixed if n not in alive}
                names = tuple(sorted(kept))
                outside = [name for name in names if name not in fixed]
                inside = sum(self.sizes[name] for name in fixed)
                if inside > self.capacity:
                    return float("inf")
                ranges = [
                    range(kept[n], self.sizes[n] + 1) if n in outside else [kept[n]] for n in names
                ]
                for after in product(*ranges):
                    there = dict(zip(names, after, strict=True))
                    if inside + sum(self.sizes[n] - there[n] for n in outside) > self.capacity:
                        continue
                    more = sum(after) - sum(kept.values())
                    found.append(more + best(*then, names, after))
            return min(found)

        return best(0, tuple(self.rounds[0]), (), ())

    def needed(self, name, number, left, *, blind):
        if self.used_later(name, number, left):
            return True
        # Until a round is scored, its candidates and all that they read may be needed again.
        return blind and any(b[: len(name)] == name for b in self.rounds[number])


def small_tree(rng):
    search = SyntheticSearch(
        num_beams=rng.choice([2, 4]),
        width=2,
        prompt_tokens=rng.randint(1, 10),
        generate_tokens=rng.randint(10, 30),
        step_tokens=rng.choice([6, 9, 12]),
        step_sigma=rng.choice([0.0, 0.5]),
        search=rng.choice(["beam", "dvts"]),
        seed=rng.getrandbits(20),
    )
    return grow(search)


def simulated(tree, capacity, moments=None, **options):
    costs = RooflineCosts.of(MODEL, CARD, Layout.TREE)
    budget = capacity * BLOCK_BYTES
    schedule = ScheduleSettings(schedule="locality", **options)
    step = StepSettings(max_step_tokens=max(node.tokens for node in tree.nodes))
    try:
        case = Simulation(tree, MODEL, costs, budget, schedule, step)
        return simulate(case, moments=moments)
    except CapacityError:
        return None


def test_bound_below_brute_force_below_every_schedule():
    rng, seen, moved = random.Random(0), 0, 0
    while seen < NUM_TREES:
        tree = small_tree(rng)
        if len(tree.nodes) > 10:
            continue
        capacity = rng.randint(3, 9)
        bound = traffic_bound(Script(tree).lives(BLOCK), capacity)
        best = Best(tree, capacity)
        loads = best.loads()
        if loads == float("inf"):
            continue
        seen += 1
        assert bound.loads <= loads
        stores = best.stores(blind=False), best.stores(blind=True)
        assert bound.stores <= stores[0] <= stores[1]
        assert bound.blind_stores <= stores[1]
        for options in OPTIONS:
            moments = []
            found = simulated(tree, capacity, moments, **options)
            if found is not None:
                assert loads <= found.h2d_bytes // BLOCK_BYTES
                assert stores[1] <= found.d2h_bytes // BLOCK_BYTES
                assert known_future_loads(moments, capacity) <= found.h2d_bytes // BLOCK_BYTES
                moved += found.h2d_bytes > 0
    assert moved > NUM_TREES // 4


def test_simulations_say_the_bounds_in_bytes():
    tree = grow(SyntheticSearch(8, 2, 16, 48, 12))
    found = simulated(tree, 20)
    bound = traffic_bound(Script(tree).lives(BLOCK), 20)
    assert found.load_bound_bytes == bound.loads * BLOCK_BYTES > 0
    assert found.store_bound_bytes == bound.stores * BLOCK_BYTES
    assert found.blind_store_bound_bytes == bound.blind_stores * BLOCK_BYTES
    assert found.load_bound_bytes >= found.dm_lower_bound_bytes


def test_by_hand():
    """A prompt of 3 blocks, two steps of 1, of which one goes on by another block."""
    lives = [Life(0, 2, 3), Life(1, 2, 1), Life(1, 1, 1), Life(2, 2, 1)]
    roomy, tight = traffic_bound(lives, 5), traffic_bound(lives, 4)
    assert (roomy.loads, roomy.stores, roomy.blind_stores) == (0, 0, 0)
    assert (tight.loads, tight.stores, tight.blind_stores) == (1, 0, 1)
    # 4 blocks are needed, the new one takes the fourth: one comes back from the host.


@pytest.mark.parametrize(
    ("moments", "capacity", "loads"),
    [
        ([{1: 1}, {2: 1}, {1: 1}], 2, 0),
        ([{1: 1}, {2: 1}, {1: 1}], 1, 1),
        ([{1: 2}, {2: 2}, {1: 2, 3: 1}], 3, 1),
        ([{1: 1}, {1: 3}], 3, 0),
        ([{1: 1}, {2: 1}, {3: 1}, {2: 1}, {1: 1}], 2, 1),
        ([{1: 1, 2: 1}, {3: 2}, {1: 1}], 2, 1),
    ],
)
def test_the_known_future_by_hand(moments, capacity, loads):
    assert known_future_loads(moments, capacity) == loads
