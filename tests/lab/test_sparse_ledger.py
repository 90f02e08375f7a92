"""The ledger: its problem files are read, its checker tells a wrong look-up from a wrong sum."""

from __future__ import annotations

import json

import pytest
import torch

from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.search.answers import extract_answer
from beamwright.sparse.predict import predict_query, weigh
from beamwright_lab.sparse.ledger import load_maker
from beamwright_lab.sparse.locality import READINGS, guess_queries

maker = load_maker()


@pytest.mark.parametrize("announced", [False, True])
def test_a_file_of_ledgers_is_a_problem_set_whose_answers_are_judged(tmp_path, announced):
    file = tmp_path / "ledger.jsonl"
    rows = list(maker.rows(300, 3, announced, seed=1))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    problems = load_problems(str(file)).problems
    checker = AnswerChecker()
    for each, row in zip(problems, rows, strict=True):
        assert (each.problem, each.answer) == (row["problem"], row["answer"])
        assert checker.compare(each.answer, extract_answer(row["solution"]))
        wrong = str(row["answer"])[:-1] + str((int(str(row["answer"])[-1]) + 1) % 10)
        assert not checker.compare(each.answer, wrong)


def test_digits_said_again_and_again_are_no_look_ups():
    (ledger,) = maker.ledgers(128, 1, False, 0)
    found = maker.judge(ledger, ledger.statements[0].operand + "8" * 200)
    assert (found.recall, found.copied, found.added) == (0, 0, 0)


def test_the_checker_tells_look_ups_sums_and_copies_apart():
    (ledger,) = maker.ledgers(128, 1, False, 0)
    num = len(ledger.statements)
    text = maker.solution_text(ledger)
    first = ledger.statements[0]
    digit, result = (maker.re.findall(r"\d", text)[i] for i in (0, 2))
    head = f"{first.operand}{digit}+{first.add}{first.target}"
    assert text.startswith(head + result)
    wrong_sum = head + str((int(result) + 1) % 10) + text[len(head) + 1 :]
    found = maker.judge(ledger, wrong_sum)
    assert (found.copied, round(found.added * num)) == (1, num - 1)
    # Later statements that read the wrong result read what the text says: no look-up is wrong,
    # unless the right one has stayed where it is read.
    read = any(each.operand == first.target for each in ledger.statements)
    assert round(found.looked_up * num) == num - read
    skipped = maker.judge(ledger, text[len(head) + 1 :])
    assert skipped.copied == 0
    assert not skipped.answered or not skipped.complete


def test_what_is_guessed_of_a_query_is_what_asyncspade_predicts():
    query = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0)).cumsum(1)
    found = guess_queries(query, 20)
    for token in (20, 39):
        window = query[:, token - 17 : token]
        for reading, weigh_by in READINGS.items():
            own = found[f"predicted, {reading}"][:, token - 20]
            torch.testing.assert_close(own, predict_query(window, weigh_by))
        assert torch.equal(found["16 before"][:, token - 20], query[:, token - 16])
        shown = weigh(query[:, token - 16 : token + 1])[:, -1, None] @ window[:, 1:].flip(1)
        torch.testing.assert_close(found["not shifted, text"][:, token - 20], shown[:, 0])
