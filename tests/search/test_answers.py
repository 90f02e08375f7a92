from fractions import Fraction

import pytest

from beamwright.search.answers import (
    counted_number,
    extract_answer,
    normalise_answer,
    read_number,
    split_unit,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So the answer is \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"The answer is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{7} but then \boxed{8", "7"),
        (r"\boxed{7} and an empty \boxed{}", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed{$1{,}000$.}", "1{,}000"),
        ("The answer is 12.", "12"),
        ("The answer is 3.5. Done", "3.5"),
        (r"\boxed{\frac{1}{\sqrt{2}}} or \fbox{\{1\}}", r"\{1\}"),
        ("The answer is (B) 12 cm, not (C).", "B"),
        ("the correct option is C) because", "C"),
        ("The answer is **C**.", "C"),
        ("**Answer:** D", "D"),
        ("The answer is (A + B)/2", "(A + B)/2"),
        ("Only one is left.\n\n**(B)**\n", "B"),
        ("Only one is left: (B) or (C)", None),
        ("48/2 = 24.\n48+24 = 72\n#### 72", "72"),
        ("#### $18", "$18"),
        (r"#### $\frac{1}{2}$", r"\frac{1}{2}"),
        ("#### 72\n\nThe answer is 73.", "73"),
        ("#### Step 1: add 2 and 3", None),
        ("#### 5 eggs a day", None),
        ("### 5", None),
        ("in a line #### 5", None),
        ("<think>maybe 7</think> <Answer> $60$. </Answer>", "60"),
        ("<answer>1</answer> or rather <answer>2</answer>", "2"),
        ("<answer>60</answer> The answer is 61.", "60"),
        ("<answer>(B) 12 cm</answer>", "B"),
        ("<answer>60", None),
        ("nothing here", None),
        ("", None),
    ],
)
def test_extracts_the_last_stated_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("27.0", "27"),
        (".5", "0.5"),
        ("-0.0", "0"),
        ("007", "7"),
        ("\u22123", "-3"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        ("1,2,3", "1,2,3"),
        (r"\$1,000", "1000"),
        ("$18", "18"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"x \leftarrow y", r"x\leftarrowy"),
        (r"\text{two   apples}", "two apples"),
        ("(C)", "C"),
        (r"2\,500", "2500"),
        ("12 345", "12345"),
        ("1 2", r"1\ 2"),
        ("1 1/2", r"1\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        ("30\u00b0", r"30^\circ"),
        (r"30^{\circ}", r"30^\circ"),
        (r"\lbrace 1 \rbrace", r"\{1\}"),
        (r"\begin{matrix}1 \\ 2\end{matrix}", r"\begin{matrix}1\\2\end{matrix}"),
        ("", ""),
        (".", ""),
    ],
)
def test_normalises_layout(raw, normal):
    assert normalise_answer(raw) == normal


def test_normalising_twice_changes_nothing():
    for raw in [
        "27.0",
        "$1,000$",
        r"\text{a b}",
        "(C)",
        "- 3",
        r"\frac{1}{2}",
        "...",
        "1 2",
        "1 1/2",
    ]:
        once = normalise_answer(raw)
        assert normalise_answer(once) == once


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("27", Fraction(27)),
        ("-3/4", Fraction(-3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        (r"-2\frac{1}{2}", Fraction(-5, 2)),
        (r"1.5\times10^{-3}", Fraction(3, 2000)),
        ("1e3", Fraction(1000)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"-.\overline{3}", Fraction(-1, 3)),
        ("1e999999999", None),
        ("9" * 401, None),
        (r"\frac{1}{0}", None),
        ("", None),
        ("1,2", None),
        (r"1\ 2", None),
    ],
)
def test_reads_numbers_exactly(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("text", "value", "dimension", "factor"),
    [
        (r"5\text{ cm}", "5", (("length", 1),), Fraction(1, 100)),
        (r"25\ \text{cm}^{2}", "25", (("length", 2),), Fraction(1, 10**4)),
        ("5 square feet.", "5", (("length", 2),), Fraction("0.3048") ** 2),
        (r"x\,\mathrm{m/s}^2", "x", (("length", 1), ("time", -2)), Fraction(1)),
        ("10 km per hour", "10", (("length", 1), ("time", -1)), Fraction(5, 18)),
        ("60 mph", "60", (("length", 1), ("time", -1)), Fraction("0.44704")),
        (r"\$5.00", "5.00", (("money", 1),), Fraction(1)),
        (r"-\$5", "-5", (("money", 1),), Fraction(1)),
        (r"90^{\circ}", "90", (("angle", 1),), Fraction(1)),
    ],
)
def test_splits_a_known_unit_off(text, value, dimension, factor):
    found, unit = split_unit(text)
    assert (found, unit.dimension, unit.factor) == (value, dimension, factor)


@pytest.mark.parametrize("text", ["5m", "x in", r"x_\text{min}", r"3\text{ apples}", "m", "$5$ x"])
def test_what_is_not_a_unit_stays(text):
    assert split_unit(text) == (text, None)


def test_boxes_that_never_close_are_read_in_one_pass():
    assert extract_answer(r"\boxed{" * 20_000 + "5") is None
    assert extract_answer(r"\boxed{" * 20_000 + "5}") == "5"
    assert extract_answer(r"} \boxed{a \} b} {") == r"a \} b"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("60 eggs", "60"),
        ("60", None),
        ("60 x", None),
        ("2 pi", None),
        ("60 percent", None),
        ("5 more than Ann", None),
        ("3 and a half", None),
        ("two eggs", None),
    ],
)
def test_what_is_counted_leaves_the_number(answer, number):
    assert counted_number(answer) == number
