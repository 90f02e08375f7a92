import random

import pytest

from beamwright.schedule.forest import Forest, Overlap
from schedule.forests import paths_of, random_demand, slow_need


@pytest.mark.parametrize("copies", [False, True])
def test_need_of_ranges(copies):
    for seed in range(40):
        demand = random_demand(seed, num_beams=9, copies=copies)
        forest = Forest(demand)
        for start in range(9):
            for end in range(start + 1, 10):
                beams = list(range(start, end))
                assert forest.need(start, end) == slow_need(demand, beams)
        assert forest.need(4, 4) == 0


def test_what_beams_share_and_what_of_it_is_resident():
    for seed in range(40):
        demand = random_demand(seed, num_beams=9)
        forest, paths = Forest(demand), paths_of(demand)
        held = {s for s, copies in enumerate(demand.resident) if copies}
        for beam, path in enumerate(paths):
            before = paths[beam - 1] if beam else set()
            size = demand.segment_bytes.__getitem__
            assert forest.path_bytes[beam] == sum(map(size, path))
            assert forest.shared_bytes[beam] == sum(map(size, path & before))
            assert forest.resident_path_bytes[beam] == sum(map(size, path & held))
            assert forest.resident_shared_bytes[beam] == sum(map(size, path & before & held))


def test_overlap_with_a_growing_set():
    for seed in range(40):
        demand = random_demand(seed, num_beams=10)
        paths, overlap = paths_of(demand), Overlap(Forest(demand))
        union = set()
        for beam in random.Random(seed).sample(range(10), 6):
            before = list(overlap.overlap_bytes)
            grown = overlap.add(beam)
            union |= paths[beam]
            wanted = [sum(demand.segment_bytes[s] for s in path & union) for path in paths]
            assert overlap.overlap_bytes == wanted
            changed = {b for b in range(10) if before[b] != wanted[b]}
            assert changed <= set(grown)
