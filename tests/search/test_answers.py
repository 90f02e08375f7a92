import pytest

from beamwright.search.answers import extract_answer, normalise_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So the answer is \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"The answer is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{7} but then \boxed{8", "7"),
        (r"\boxed{7} and an empty \boxed{}", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed{$1{,}000$.}", "1{,}000"),
        ("The answer is 12.", "12"),
        ("The answer is 3.5. Done", "3.5"),
        ("the final answer is: $x+1$.\nMore", "x+1"),
        ("The answer is 3. No, the answer is 4", "4"),
        ("nothing here", None),
        ("The answer is", None),
        ("", None),
    ],
)
def test_extracts_the_last_stated_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("27.0", "27"),
        ("27.", "27"),
        ("27.50", "27.5"),
        (".5", "0.5"),
        ("-0.0", "0"),
        ("+7", "7"),
        ("007", "7"),
        ("\u22123", "-3"),
        ("1,000", "1000"),
        ("12,345,678.90", "12345678.9"),
        ("1{,}000", "1000"),
        ("1,2,3", "1,2,3"),
        ("(1,234)", "(1,234)"),
        ("$5$", "5"),
        (r"\$1,000", "1000"),
        ("$18", "18"),
        (r"\( x \)", "x"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"x \leftarrow y", r"x\leftarrowy"),
        (r"\text{two   apples}", "two apples"),
        ("(C)", "C"),
        ("", ""),
        (".", ""),
    ],
)
def test_normalises_layout(raw, normal):
    assert normalise_answer(raw) == normal


def test_normalising_twice_changes_nothing():
    for raw in ["27.0", "$1,000$", r"\text{a b}", "(C)", "- 3", r"\frac{1}{2}", "..."]:
        once = normalise_answer(raw)
        assert normalise_answer(once) == once


def test_digits_of_long_numbers_are_kept():
    digits = "123456789" * 12
    assert normalise_answer(digits) == digits
    assert normalise_answer(digits) != normalise_answer(digits + "0")
