import pytest

from beamwright.search.choose import listwise, mean_shares, pairwise, seeded


def play(contest, judge):
    """The winner, and what was asked; judge: shares of candidates in an order."""
    asked = []
    try:
        shown = next(contest)
        while True:
            asked += shown
            shown = contest.send([judge(each) for each in shown])
    except StopIteration as ended:
        return ended.value, asked


def prefers(strengths, bias=0.0):
    """A judge who knows how strong each is, and likes the first place."""

    def judge(shown):
        weights = [strengths[each] + bias * (place == 0) for place, each in enumerate(shown)]
        return [weight / sum(weights) for weight in weights]

    return judge


def test_one_candidate_for_each_answer_the_majority_first():
    votes, scores = ["1", "2", "2", None, "3", "3"], [0.9, 0.1, 0.2, 0.9, 0.4, 0.3]
    assert seeded(votes, scores, [True] * 6) == [4, 2, 0]
    assert seeded(votes, scores, [True, True, True, True, False, False]) == [2, 0]
    assert seeded([None, "1"], [None, None], [True, False]) == []


@pytest.mark.parametrize("num", range(1, 10))
def test_the_strongest_wins_a_knockout_in_one_comparison_less_than_there_are(num):
    seeds = list(range(10, 10 + num))
    for strongest in seeds:
        strengths = {each: 1 + 5 * (each == strongest) for each in seeds}
        winner, asked = play(pairwise(seeds, None), prefers(strengths))
        assert winner == strongest
        assert len(asked) == 2 * (num - 1)


def test_every_pair_is_read_in_both_orders_so_that_a_place_wins_nothing():
    winner, asked = play(pairwise([3, 7], None), prefers({3: 1, 7: 1.1}, bias=10))
    assert winner == 7
    assert asked == [(3, 7), (7, 3)]


def test_most_votes_win_where_a_comparison_says_nothing():
    assert play(pairwise([2, 0, 1], None), lambda shown: [0.5, 0.5])[0] == 2
    assert play(pairwise([2, 0, 1], None), lambda shown: None)[0] == 2


def test_a_budget_leaves_out_answers_with_few_votes():
    seeds, judge = list(range(8)), prefers({each: 1 + each for each in range(8)})
    winner, asked = play(pairwise(seeds, 3), judge)
    assert winner == 3
    assert len(asked) == 6
    assert max(map(max, asked)) == 3
    assert play(pairwise(seeds, 100), judge)[0] == 7


def test_each_is_first_in_a_list_once():
    winner, asked = play(listwise([5, 6, 7], None), prefers({5: 1, 6: 1, 7: 1.1}, bias=3))
    assert winner == 7
    assert asked == [(5, 6, 7), (6, 7, 5), (7, 5, 6)]
    _, asked = play(listwise(list(range(8)), 2), prefers(dict.fromkeys(range(8), 1)))
    assert [each[0] for each in asked] == [0, 4]


def test_lists_that_are_too_long_lose_their_last():
    def judge(shown):
        return None if len(shown) > 2 else prefers({0: 1, 1: 2})(shown)

    assert play(listwise([0, 1, 2, 3], None), judge)[0] == 1
    assert play(listwise([4, 5], None), lambda shown: None)[0] == 4


def test_a_share_is_the_mean_over_what_was_told():
    told = [((0, 1), [0.25, 0.75]), ((1, 0), [0.25, 0.75]), ((0, 2), None)]
    assert mean_shares(told) == {0: 0.5, 1: 0.5}
