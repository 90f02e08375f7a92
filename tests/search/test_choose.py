import math

import pytest

from beamwright.search.choose import CHOICES, choose
from tables import beside

CASES = beside(__file__)

NAN = math.nan


@pytest.mark.parametrize(("votes", "scores", "how", "place"), CASES["choices"])
def test_who_is_chosen_of_complete_paths(votes, scores, how, place):
    assert choose(list(votes), scores, [True] * len(votes), how) == place


@pytest.mark.parametrize("how", CHOICES)
def test_a_truncated_path_never_beats_a_complete_one(how):
    assert choose(["5", "5", "6"], [0.9, 0.9, 0.1], [False, False, True], how) == 2
    assert choose([None, None], [0.1, 0.2], [True, True], how) == 1
    assert choose(["1", None], [0.1, 0.2], [False, False], how) == 1
    assert choose(["1", None], [0.9, 0.2], [False, True], how) == 1
