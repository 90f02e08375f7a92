import pytest

from beamwright.schedule.forest import Forest
from schedule.forests import random_demand, slow_need


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
