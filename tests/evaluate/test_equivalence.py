import sys

import pytest

from beamwright.errors import UnavailableError
from beamwright.evaluate import AnswerChecker

# A worker that hangs on "hang", dies on "die" and calls everything else equal.
MISBEHAVING = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    answer = json.loads(line)["answer"]
    if answer == "x+hang":
        time.sleep(600)
    if answer == "x+die":
        os._exit(1)
    if answer == "x+babble":
        print("babble", flush=True)
    print(json.dumps({"equal": True}), flush=True)
"""
CANNOT_START = (sys.executable, "-c", "raise SystemExit(1)")


@pytest.fixture
def no_worker():
    """A checker whose worker cannot start: shows what is decided without one."""
    with AnswerChecker(command=CANNOT_START) as checker:
        yield checker


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("27", "27.0", "equal"),
        ("1,000", "$1000$", "equal"),
        ("1e3", "1000", "equal"),
        ("27", "28", "different"),
        ("123456789012345678901234567890", "123456789012345678901234567891", "different"),
        ("east", "\\text{East}", "equal"),
        ("east", "seat", "different"),
        ("5", "", "different"),
        ("x", "9" * 5000, "different"),
    ],
)
def test_text_and_numbers_need_no_worker(no_worker, gold, answer, verdict):
    assert no_worker.compare(gold, answer) == verdict


def test_a_worker_that_cannot_start_is_an_error(no_worker):
    with pytest.raises(UnavailableError, match="does not start"):
        no_worker.compare("x+1", "1+x")


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("\\frac{1}{2}", "0.5", "equal"),
        ("x+1", "1+x", "equal"),
        ("x+1", "x-1", "different"),
        ("\\{1,2\\}", "\\{2,1\\}", "equal"),
        ("(1, 2)", "(1,3)", "different"),
        ("x+1", "\\frac{1}{", "different"),
        ("x+1", "\u00e9}\n\\boxed{x+1}", "different"),
    ],
)
def test_mathematics(checker, gold, answer, verdict):
    assert checker.compare(gold, answer) == verdict


def test_correctness_without_gold_or_answer(no_worker):
    assert no_worker.is_correct(None, "5") is None
    assert no_worker.is_correct("5", None) is False
    assert no_worker.is_correct("5", "5") is True


@pytest.mark.parametrize(
    ("answer", "verdict"), [("x+hang", "timeout"), ("x+die", "crash"), ("x+babble", "crash")]
)
def test_a_lost_worker_marks_one_answer_and_is_replaced(answer, verdict):
    with AnswerChecker(deadline_s=2, command=(sys.executable, "-c", MISBEHAVING)) as checker:
        assert checker.compare("y", "x+1") == "equal"
        assert checker.compare("y", answer) == verdict
        assert checker.compare("y", "x+2") == "equal"
        assert checker.compare("y", answer) == verdict  # remembered, not asked again


def test_it_can_be_used_after_closing():
    checker = AnswerChecker(command=(sys.executable, "-c", MISBEHAVING))
    assert checker.compare("y", "x+1") == "equal"
    checker.close()
    assert checker.compare("y", "x+2") == "equal"
    checker.close()
