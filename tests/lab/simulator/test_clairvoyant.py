"""Bounds of traffic: below what a known future needs, which is below what any schedule moves."""

import random
from math import inf

from beamwright.errors import CapacityError
from beamwright_lab.simulator.replay import Script
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.studies.clairvoyant import Life, traffic_bound
from simulated import MODEL, case, longest

BLOCK = 8
BLOCK_BYTES = BLOCK * MODEL.kv_bytes_per_token
NUM_TREES = 24
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
    given = case(budget=capacity * BLOCK_BYTES, tree=tree, step=longest(tree), **options)
    try:
        return simulate(given, moments=moments)
    except CapacityError:
        return None


def test_bound_below_the_known_future_below_every_schedule():
    rng, moved = random.Random(0), 0
    for _ in range(NUM_TREES):
        tree, capacity = small_tree(rng), rng.randint(3, 9)
        bound = traffic_bound(Script(tree).lives(BLOCK), capacity)
        for options in OPTIONS:
            moments = []
            found = simulated(tree, capacity, moments, **options)
            if found is not None:
                loads = known_future_loads(moments, capacity)
                assert bound.loads <= loads <= found.h2d_bytes // BLOCK_BYTES
                assert bound.stores <= bound.blind_stores <= found.d2h_bytes // BLOCK_BYTES
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
