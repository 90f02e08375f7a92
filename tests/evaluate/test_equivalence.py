import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from beamwright.errors import UnavailableError
from beamwright.evaluate.equivalence import AnswerChecker

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
# Two of these answer only while both are being asked; each names itself in the file it is given.
TOGETHER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.005)
    print(json.dumps({"equal": True}), flush=True)
"""
CANNOT_START = (sys.executable, "-c", "raise SystemExit(1)")


def check_many(checker, pairs):
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda pair: checker.compare(*pair), pairs))


@pytest.fixture
def no_worker():
    """A checker whose worker cannot start: shows what is decided without one."""
    with AnswerChecker(command=CANNOT_START) as checker:
        yield checker


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("27", "27.0", True),
        ("60", "60 eggs", True),
        ("1,000", "$1000$", True),
        ("123456789012345678901234567890", "123456789012345678901234567891", False),
        ("east", "\\text{East}", True),
        ("5", "", False),
        ("x", "9" * 5000, False),
        ("2\\frac{1}{2}", "5/2", True),
        ("0.\\overline{27}", "3/11", True),
        ("3\\text{ km}", "3000 meters", True),
        ("5\\text{ cm}", "5\\text{ m}", False),
        ("5\\text{ cm}", "5", True),
        ("B", "(B) 12 cm", True),
        ("101_2", "101_{3}", False),
        ("\\{1,2\\}", "(1,2)", False),
        ("1-\\frac{1}{2025!}", "1-\\frac{1}{2024!}", False),
        ("\\frac{2^{100}+1}{3 \\cdot 2^{101}}", "\\frac{1}{3 \\cdot 2^{101}}", False),
        ("0.333", "\\frac{1}{3}", False),
        ("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1", False),
        ("1, 2, \\ldots, n", "1,2,\\ldots,n", True),
        ("\\textbf{(B)}\\ 12", "B", True),
        ("\\textbf{(B)}\\ 12", "12", True),
        ("\\textbf{(B)}\\ 12", "C", False),
        ("\\textbf{(B) } \\frac{1}{2}", "0.5", True),
        ("A. Lincoln", "A. Einstein", False),
        ("(B) red", "B. red", True),
        ("5", "5 times", True),
        ("3", "3^{\\text{rd}}", True),
        ("12", "12th", True),
        ("no solution", "\\text{No solutions}", True),
        ("5", "5 times six", False),
        ("5 Meters", "5 m", True),
        ("12", "(B) 12", True),
        ("C", "\\text{Option C}", True),
        ("3:00\\text{ AM}", "3:00\\text{ PM}", False),
        ("7:30", "7:30 PM", True),
        ("28\\%", "0.28", True),
        ("0.28", "28", False),
        ("60", "60\\%", True),
        ("45", "\u00a345", True),
        ("45\u20ac", "$45", False),
        ("25^\\circ\\text{C}", "25^\\circ\\text{F}", False),
        ("5", "5 N", True),
        ("3", "3\\text{ million}", False),
    ],
)
def test_text_and_numbers_need_no_worker(no_worker, gold, answer, verdict):
    assert no_worker.compare(gold, answer) is verdict


def test_a_worker_that_cannot_start_is_an_error(no_worker):
    with pytest.raises(UnavailableError, match="does not start"):
        no_worker.compare("x+1", "1+x")


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("10, 100", "10100", False),
        ("3, 105", "105, 3", True),
        ("1331, 1728", "1331, 1729", False),
        ("12,345", "12 , 345", False),
        ("x=1, y=2", "(1, 2)", True),
        ("2, 1", "y=2, x=1", False),
        ("B=4, A=3", "A=3, B=4", True),
        ("3:2", "\\frac{3}{2}", True),
        ("3:2", "2/3", False),
        ("12", "12:00", False),
        ("\\frac{1}{2^{60}}", "-\\frac{1}{2^{60}}", False),
        ("\\frac{2}{3^{40}}", "\\frac{1}{3^{40}}", False),
        ("x+1", "1+x", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("x+1", "\\frac{1}{", False),
        ("3x\\text{ km}", "3000x\\text{ m}", True),
        ("i^2+x", "x-1", True),
        ("A=3, B=4", "A=4, B=3", False),
        ("(1,3)", "1 < x < 3", True),
        ("x+1", "\u00e9}\n\\boxed{x+1}", False),
        ("e^{-40}", "e^{-41}", False),
        ("\\frac{x}{2^{60}}", "\\frac{x}{2^{61}}", False),
        ("(1,\\frac{\\pi}{2^{60}})", "(1,\\frac{\\pi}{2^{61}})", False),
        ("(1,0.0000001)", "(1,0.0000002)", False),
        ("\\sqrt{2}", "1.414214", True),
        ("\\frac{1}{3}", "0.333333", True),
        ("\\frac{1}{12}", "0.0833333333333333", True),
        ("0", "0.000000123456", False),
        ("\\frac{1}{2}", "\\cos(60^\\circ)", True),
        ("\\frac{1}{2}", "\\sin 30^{\\circ}", True),
    ],
)
def test_mathematics(checker, gold, answer, verdict):
    assert checker.compare(gold, answer) is verdict


def test_verdicts_without_gold_or_answer_and_of_one_spelling(no_worker):
    assert no_worker.judge(None, ["5"]) == {"5": None, None: None}
    assert no_worker.judge("5", [None, "5", "5.0", "6"]) == {
        **{None: False, "5": True, "5.0": True, "6": False}
    }


def test_it_can_be_used_after_closing():
    checker = AnswerChecker(command=(sys.executable, "-c", MISBEHAVING))
    for answer in ("x+1", "x+2"):
        with checker:
            assert checker.compare("y", answer) is True


def test_workers_share_the_pairs_and_keep_their_order(tmp_path):
    command = (sys.executable, "-c", TOGETHER, str(tmp_path))
    pairs = [("y", f"x+{i}") for i in range(6)]
    with AnswerChecker(deadline_s=30, command=command, num_workers=2) as checker:
        assert check_many(checker, pairs) == [True] * 6
    assert len(list(tmp_path.iterdir())) == 2


def test_a_lost_worker_leaves_the_other_pairs_alone():
    answers = ["x+1", "x+hang", "x+2", "x+die", "x+3", "x+babble", "x+4"]
    command = (sys.executable, "-c", MISBEHAVING)
    with AnswerChecker(deadline_s=1, command=command, num_workers=3) as checker:
        verdicts = check_many(checker, [("y", answer) for answer in answers])
    assert verdicts == [True, None, True, None, True, None, True]


@pytest.mark.nightly
def test_a_real_tower_of_powers_costs_one_answer():
    before = set(threading.enumerate())
    with AnswerChecker(deadline_s=3) as checker:
        verdicts = check_many(checker, [("x", "9^{9^{9^{9}}}+x"), ("x+1", "1+x")])
    assert verdicts == [None, True]
    assert set(threading.enumerate()) <= before


# --- the conformance file ----------------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data"
# The pairs of the second file were judged unseen at first: 40 of 40 written before the rules and
# 66 of 70 written after them were right; three of the other four then got a rule.
NUM_RIGHT = {"answer_pairs": 200, "answer_pairs_more": 109}
# (gold, answer) of pairs marked different that are called equal, with the reason.
FALSE_EQUALS = {("AB", "BA"): "two letters are read as a product, which commutes"}


def read_pairs(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def test_a_sample_of_the_conformance_file(checker):
    pairs = read_pairs("answer_pairs")[::8]
    verdicts = check_many(checker, [(pair["gold"], pair["answer"]) for pair in pairs])
    assert verdicts == [pair["equal"] for pair in pairs]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NUM_RIGHT)
def test_conformance(checker, name):
    pairs = read_pairs(name)
    verdicts = check_many(checker, [(pair["gold"], pair["answer"]) for pair in pairs])
    judged = list(zip(pairs, verdicts, strict=True))
    false_equals = {
        (pair["gold"], pair["answer"])
        for pair, verdict in judged
        if verdict is True and not pair["equal"]
    }
    assert false_equals <= set(FALSE_EQUALS)
    num_right = sum(verdict is pair["equal"] for pair, verdict in judged)
    assert num_right >= NUM_RIGHT[name]


def test_each_answer_has_the_deadline_to_itself():
    """Those that hang are told from wrong ones, and those behind them are judged."""
    command = (sys.executable, "-c", MISBEHAVING.replace('== "x+hang"', '[:1] == "x"'))
    answers = ["y+1", *(f"x^{n}" for n in range(4)), "y+2"]
    with AnswerChecker(deadline_s=0.5, command=command) as checker:
        verdicts = checker.judge("z", answers)
    assert [verdicts[answer] for answer in answers] == [True, *[None] * 4, True]


# --- kinds: what stands behind a number, in every spelling -------------------------------------

SPELLINGS = ("5 {}", "5\\text{{ {}}}", "5\\ \\mathrm{{{}}}", "\\text{{5 {}}}")
LEFT_OUT = ("cm", "km/h", "square feet", "euros", "eggs", "people", "eggs in total", "years old")
OTHERS = (("cm", "mm"), ("kJ", "kN"), ("eggs", "apples"), ("km up", "km down"), ("cm", "eggs"))
CHANGED = (
    "million",
    "dozen",
    "squared",
    "thirds",
    "and a half",
    "if n is even",
    "or less",
    "score",
)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_unit_may_be_left_out_and_no_other_one_named(no_worker, spelling):
    for unit in LEFT_OUT:
        for pair in (("5", spelling.format(unit)), (spelling.format(unit), f"5 {unit}")):
            assert no_worker.compare(*pair) is no_worker.compare(*pair[::-1]) is True, pair
    wrong = [*OTHERS, *(("", word) for word in CHANGED)]
    for other, (first, second) in product(SPELLINGS, wrong):
        pair = (spelling.format(second), other.format(first) if first else "5")
        assert no_worker.compare(*pair) is no_worker.compare(*pair[::-1]) is False, pair


def test_a_letter_is_its_option_and_the_other_way_round(no_worker):
    options = {"A": "40", "B": "42 eggs", "C": "a chicken"}
    for gold, right in (
        ("B", ("42", "(B)", "42 eggs", "B) 42")),
        ("a chicken", ("C", "a chicken")),
    ):
        verdicts = no_worker.judge(gold, [*right, "A", "40"], options)
        assert [each for each, verdict in verdicts.items() if verdict] == [*right]
