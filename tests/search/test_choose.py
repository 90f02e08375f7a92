import math

import pytest

from beamwright.search.choose import CHOICES, choose

NAN = math.nan


@pytest.mark.parametrize(
    ("votes", "scores", "how", "place"),
    [
        ("12", [0.5, 0.5 + 5e-7], "best", 0),  # a near tie goes to the first
        ("9227", [0.9, 0.2, 0.3, 0.8], "majority", 2),  # the best of equal votes
        ("1221", [0.1, 0.3, 0.3, 0.1], "majority", 1),  # a tie to the larger sum of scores
        ("122333", [0.9, 0.8, 0.7, 0.1, 0.1, 0.1], "best", 0),
        ("122333", [0.9, 0.8, 0.7, 0.1, 0.1, 0.1], "majority", 3),
        ("122333", [0.9, 0.8, 0.7, 0.1, 0.1, 0.1], "weighted", 1),
        # Log-probabilities, summed as they are: two votes of -1 would lose against one of -1.5.
        ("112", [-1.0, -1.0, -1.5], "weighted", 0),
        ("112", [-2000.0, -2000.0, -1999.0], "weighted", 2),
        ("122", [None] * 3, "weighted", 1),
        ("123", [None, NAN, 0.0], "best", 2),  # what is missing ranks last
    ],
)
def test_who_is_chosen_of_complete_paths(votes, scores, how, place):
    assert choose(list(votes), scores, [True] * len(votes), how) == place


@pytest.mark.parametrize("how", CHOICES)
def test_a_truncated_path_never_beats_a_complete_one(how):
    assert choose(["5", "5", "6"], [0.9, 0.9, 0.1], [False, False, True], how) == 2
    assert choose([None, None], [0.1, 0.2], [True, True], how) == 1
    assert choose(["1", None], [0.1, 0.2], [False, False], how) == 1
    assert choose(["1", None], [0.9, 0.2], [False, True], how) == 1
