"""Random and hand-made demands, and slow, obvious answers to compare with."""

import random
from itertools import combinations, pairwise, permutations

from beamwright.protocols import KVDemand
from beamwright.schedule.forest import Forest

# num_beams, capacity, balance, wanted: of the paper and the slides
GROUP_SIZES = [
    (16, 7, True, [5, 5, 6]),
    (16, 7, False, [7, 7, 2]),
    (14, 6, True, [4, 5, 5]),
    (14, 6, False, [6, 6, 2]),
]


def sizes(groups):
    return [len(group) for group in groups]


def demand_of(paths, *, growth=1, capacity=10**9, resident=(), copies=False, previous=None):
    """A demand from paths given as strings of one-letter steps; every segment has 10 bytes."""
    numbers = {}
    parent = []
    for path in paths:
        for end in range(1, len(path) + 1):
            if path[:end] not in numbers:
                numbers[path[:end]] = len(parent)
                parent.append(numbers.get(path[: end - 1]))
    return KVDemand(
        parent=parent,
        segment_bytes=[10] * len(parent),
        resident=[int(name in resident) for name in numbers],
        leaf=[numbers.get(path) for path in paths],
        growth_bytes=[growth] * len(paths),
        capacity_bytes=capacity,
        copy_per_beam=copies,
        previous_need_bytes=previous,
    )


def random_demand(seed, *, num_beams, sizes=10, copies=False, fraction=None, scattered=False):
    """A random forest with 1-2 roots in depth-first order, and what a round left behind.

    What is resident is a run of beams' paths, as an earlier group leaves it, or scattered. The
    capacity is a fraction of what all beams need, and holds what is resident.
    """
    rng = random.Random(seed)
    parent, size, leaf = [], [], []

    def grow(above, beams, depth):
        number = len(parent)
        parent.append(above)
        size.append(rng.randint(1, sizes))
        while beams:
            part = rng.randint(1, beams)
            if depth == 4 or (part == 1 and rng.random() < 0.5):
                leaf.extend([number] * part)
            else:
                grow(number, part, depth + 1)
            beams -= part

    split = rng.randint(0, num_beams) if rng.random() < 0.3 else 0
    for beams in (split, num_beams - split):
        if beams:
            grow(None, beams, 0)
    growth = [rng.randint(0, sizes // 2) for _ in leaf]
    plain = KVDemand(parent, size, [0] * len(parent), leaf, growth, 1, copies)
    forest = Forest(plain)
    capacity = max(1, int((fraction or rng.uniform(0.25, 0.9)) * forest.needed_bytes(0, num_beams)))
    resident = _left_behind(rng, plain, capacity, scattered)
    return KVDemand(parent, size, resident, leaf, growth, capacity, copies)


def _left_behind(rng, demand, capacity, scattered):
    resident = [0] * len(demand.parent)
    beams = list(range(len(demand.leaf)))
    if scattered:
        rng.shuffle(beams)
    else:
        first = rng.randint(0, len(beams))
        beams = beams[first:] + beams[:first]
        if rng.random() < 0.5:
            beams.reverse()
    held = 0
    for beam in beams[: rng.randint(0, len(beams))]:
        segment = demand.leaf[beam]
        path = []
        while segment is not None:
            path.append(segment)
            segment = demand.parent[segment]
        for segment in path[::-1]:
            if not resident[segment] and held + demand.segment_bytes[segment] <= capacity:
                resident[segment] = 1
                held += demand.segment_bytes[segment]
    return resident


# --- slow and obvious ------------------------------------------------------------------------


def paths_of(demand):
    """Per beam, the set of its segments."""
    found = []
    for leaf in demand.leaf:
        path, segment = set(), leaf
        while segment is not None:
            path.add(segment)
            segment = demand.parent[segment]
        found.append(path)
    return found


def slow_need(demand, beams):
    """What a group of beams needs, from its definition."""
    paths = paths_of(demand)
    if demand.copy_per_beam:
        segments = [segment for beam in beams for segment in paths[beam]]
    else:
        segments = set().union(*(paths[beam] for beam in beams))
    growth = sum(demand.growth_bytes[beam] for beam in beams)
    return sum(demand.segment_bytes[segment] for segment in segments) + growth


def allowed(demand, group, max_batch=None):
    """Whether these beams may be a group."""
    fits = slow_need(demand, group) <= demand.capacity_bytes
    return len(group) == 1 or (fits and len(group) <= (max_batch or len(group)))


def contiguous(demand, max_batch=None):
    """All allowed cuts into contiguous ranges that have the fewest groups."""
    num_beams = len(demand.leaf)
    for num_groups in range(1, num_beams + 1):
        found = []
        for cuts in combinations(range(1, num_beams), num_groups - 1):
            edges = [0, *cuts, num_beams]
            groups = [list(range(a, b)) for a, b in pairwise(edges)]
            if all(allowed(demand, group, max_batch) for group in groups):
                found.append(groups)
        if found:
            return found
    return []


def least_loaded(demand, partitions):
    """The fewest bytes over all orders of all these partitions."""
    return min(
        loaded_bytes(demand, order) for groups in partitions for order in permutations(groups)
    )


def loaded_bytes(demand, groups):
    """Loads of groups in this order: keep what is used again, the nearest use first, while it fits.

    Of equal next use, what was used last is kept; of equal age, what was listed last.
    """
    size = demand.segment_bytes
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
    return loaded


def reading_order(demand, group):
    found = []
    for beam in group:
        segment = demand.leaf[beam]
        while segment is not None and segment not in found:
            found.append(segment)
            segment = demand.parent[segment]
    return found
