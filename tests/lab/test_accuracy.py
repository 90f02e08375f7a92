"""The accuracy table: what a run of best-of-n says of smaller n, and paired differences."""

import pytest

from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record
from beamwright_lab.accuracy import AccuracyRow, Evaluated, differences, rows_of

# Problem 0: the first sample is right, the vote is not. Problem 1: only the last sample is right.
ANSWERS = (("1", "2", "2", "3"), ("5", "5", "6", "7"))
SCORES = ((0.9, 0.5, 0.4, 0.1), (0.2, 0.1, 0.1, 0.8))
GOLD = ("1", "7")


@pytest.fixture(scope="module")
def checker():
    with AnswerChecker() as found:
        yield found


def record(index):
    candidates = [
        {"answer": answer, "score": score, "stop": "eos", "tokens": 10}
        for answer, score in zip(ANSWERS[index], SCORES[index], strict=True)
    ]
    return Record(str(index), index, "", GOLD[index], None, candidates=candidates)


def test_a_run_gives_the_rows_of_every_smaller_n(checker):
    config = Evaluated("weak", "best-of-n", 4, {})
    rows = list(rows_of(config, [record(0), record(1)], checker, [2, 4]))
    found = {(row.method, row.n): list(row.right) for row in rows}
    assert found["one sample", 1] == [0.25, 0.25]
    assert found["best-of-n", 2] == [1, 0]
    assert found["best-of-n", 4] == [1, 1]
    assert found["majority", 4] == [0, 0]
    assert found["any of n right", 2] == [1, 0]
    tokens = {(row.method, row.n): row.tokens for row in rows}
    assert tokens["one sample", 1] == 10
    assert tokens["best-of-n", 4] == 40


def test_a_search_gives_its_best_and_its_vote(checker):
    choices = {"best": {"correct": True}, "weighted": {"correct": False}}
    solved = Record("0", 0, "", "1", None, choices=choices, tokens={"generated": 30})
    config = Evaluated("strong", "beam", 4, {})
    found = {row.method: row for row in rows_of(config, [solved], checker, [4])}
    assert found["beam"].right == [1]
    assert found["beam, weighted vote"].right == [0]
    assert found["beam"].tokens == 30


def test_differences_are_paired_and_name_both_sides():
    beam = AccuracyRow("weak", "beam", 4, [1, 1, 0, 1], 0)
    vote = AccuracyRow("weak", "majority", 4, [1, 0, 0, 0], 0)
    strong = AccuracyRow("strong", "greedy", 1, [1, 1, 1, 1], 0)
    found = {(each["this"], each["less"]): each for each in differences([beam, vote, strong])}
    against_vote = found["weak, beam, n = 4", "weak, majority, n = 4"]
    assert against_vote["difference"] == "+0.500"
    assert against_vote["right, wrong"] == "2, 0"
    assert found["weak, beam, n = 4", "strong, greedy"]["difference"] == "-0.250"
    assert len(found) == 2
