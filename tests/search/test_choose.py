import math

import pytest

from beamwright.search.choose import CHOICES, choose


def all_complete(answers):
    return [True] * len(answers)


def test_best_breaks_near_ties_by_order():
    answers = ["1", "2"]
    assert choose(answers, [0.5, 0.5 + 5e-7], all_complete(answers), "best") == 0


def test_majority_counts_equal_votes_and_returns_the_best_of_them():
    answers = ["9", "27", "27", "9.5"]
    assert choose(answers, [0.9, 0.2, 0.3, 0.8], all_complete(answers), "majority") == 2


def test_majority_tie_goes_to_the_larger_summed_score_then_to_order():
    answers = ["1", "2", "2", "1"]
    assert choose(answers, [0.1, 0.3, 0.3, 0.1], all_complete(answers), "majority") == 1
    assert choose(answers, [0.2, 0.2, 0.2, 0.2], all_complete(answers), "majority") == 0


def test_weighted_differs_from_both():
    answers = ["1", "2", "2", "3", "3", "3"]
    scores = [0.9, 0.8, 0.7, 0.1, 0.1, 0.1]
    chosen = {how: answers[choose(answers, scores, all_complete(answers), how)] for how in CHOICES}
    assert chosen == {"best": "1", "majority": "3", "weighted": "2"}


def test_log_probabilities_vote_as_probabilities():
    # Summed as they are, two votes of -1 would lose against a single -1.5.
    answers = ["1", "1", "2"]
    assert choose(answers, [-1.0, -1.0, -1.5], all_complete(answers), "weighted") == 0
    assert choose(answers, [-2000.0, -2000.0, -1999.0], all_complete(answers), "weighted") == 2


@pytest.mark.parametrize("how", CHOICES)
def test_a_truncated_path_never_beats_a_complete_one(how):
    assert choose(["5", "5", "6"], [0.9, 0.9, 0.1], [False, False, True], how) == 2


@pytest.mark.parametrize("how", CHOICES)
def test_without_any_complete_answer_the_best_score_is_taken(how):
    assert choose([None, None], [0.1, 0.2], [True, True], how) == 1
    assert choose(["1", None], [0.1, 0.2], [False, False], how) == 1
    assert choose(["1", None], [0.9, 0.2], [False, True], how) == 1


def test_without_scores_votes_are_equal():
    answers = ["1", "2", "2"]
    assert choose(answers, [None] * 3, all_complete(answers), "weighted") == 1
    assert choose(answers, [None] * 3, all_complete(answers), "best") == 0


def test_missing_and_nan_scores_rank_last():
    answers = ["1", "2", "3"]
    assert choose(answers, [None, math.nan, 0.0], all_complete(answers), "best") == 2
