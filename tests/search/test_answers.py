from fractions import Fraction
from itertools import combinations, product
from pathlib import Path

import pytest
import yaml

from beamwright.search.answer_keys import normalise_answer, option_letter, read_options
from beamwright.search.answers import extract_answer
from beamwright.search.quantity import counted_number, normalise_layout, read_number, read_quantity

KNOWN = yaml.safe_load((Path(__file__).parents[1] / "data/answers.yaml").read_text("utf-8"))


@pytest.mark.parametrize(("text", "answer"), KNOWN["stated"])
def test_extracts_the_last_stated_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("raw", "normal"), KNOWN["layouts"])
def test_normalises_layout(raw, normal):
    assert normalise_layout(raw) == normal
    for write in (normalise_layout, normalise_answer):
        assert write(write(raw)) == write(raw), "normalising twice changes nothing"


@pytest.mark.parametrize(("text", "value"), [*KNOWN["numbers"], ("9" * 401, None)])
def test_reads_numbers_exactly(text, value):
    assert read_number(text) == (value and Fraction(value))


@pytest.mark.parametrize(("text", "value", "dimension", "factor"), KNOWN["units"])
def test_splits_a_known_unit_off(text, value, dimension, factor):
    found = read_quantity(text)
    powers = tuple(dimension.items())
    assert (found.value, *found.unit) == (value, powers, Fraction(factor))


@pytest.mark.parametrize("text", ["5m", "x in", r"x_\text{min}", "m", "$5$ x", "5 x"])
def test_what_is_not_a_unit_stays(text):
    assert read_quantity(text) == (text, None, frozenset(), False, False)


def test_boxes_that_never_close_are_read_in_one_pass():
    assert extract_answer(r"\boxed{" * 20_000 + "5") is None
    assert extract_answer(r"\boxed{" * 20_000 + "5}") == "5"
    assert extract_answer(r"} \boxed{a \} b} {") == r"a \} b"


@pytest.mark.parametrize(("answer", "number"), KNOWN["counted"])
def test_what_is_counted_leaves_the_number(answer, number):
    assert counted_number(answer) == number


def test_one_key_for_equal_answers_and_another_one_for_others():
    keys = [{normalise_answer(each) for each in same} for same in KNOWN["alike"]]
    assert [{normalise_answer(each) for each in same} for same in keys] == keys
    assert [len(each) for each in keys] == [1] * len(keys)
    assert not [pair for pair in combinations(keys, 2) if pair[0] & pair[1]]


ENDINGS = ("{}", "{} eggs", "{} eggs in total", "${} in all")


@pytest.mark.parametrize(
    "form", [*KNOWN["sentences"], *(a.format(b) for a, b in product(KNOWN["phrases"], ENDINGS))]
)
def test_a_number_is_read_out_of_any_sentence(form):
    for number in ("42", "1,200", "12.5", "-3"):
        answer = extract_answer(form.replace("{}", number))
        assert normalise_answer(answer) == normalise_answer(number)


@pytest.mark.parametrize("form", KNOWN["chosen"])
def test_a_letter_is_read_wherever_it_stands(form):
    assert option_letter(extract_answer(form.format("C"))) == "C"


def test_options_are_what_a_problem_lists():
    wrapped = r"$\textbf{(A)}\ 1\qquad\textbf{(B)}\ 2$"
    for text in ("A) 1\nB) 2", "**A.** 1\n**B.** 2", "(A) 1 (B) 2", wrapped):
        assert read_options(f"Which one?\n{text}") == {"A": "1", "B": "2"}
    assert read_options("Let A. B be points. A) only") == {}
    assert extract_answer("So it is B", {"A": "1", "B": "2"}) == "B"
    assert extract_answer("So it is C", {"A": "1", "B": "2"}) is None


HOSTILE = [
    *("1" * 3000 + "cm", "1" * 800 + "x" + "1" * 790, "9eggs A" + "km/h" * 90),
    *("B)" * 90 + "*" + "10" * 90, "\n" * 9000 + "a", "</think>" * 9000, " the]" + "*\n\n" * 9000),
    *("\\boxed{" + "\\ " * 9000 + "}", "$" * 5000, "x" * 9000, '"' * 9000, "eggs~" * 3000),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_model_writes_without_end_is_read_in_time(text):
    """It takes ages where an expression tries every way to cut a text."""
    for each in (text, f"{text} The answer is {text}"):
        answer = extract_answer(each)
        assert normalise_answer(each) is not None
        counted_number(answer or each)
