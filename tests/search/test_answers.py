from fractions import Fraction
from itertools import combinations, product

import pytest

from beamwright.search.alike import normalise_answer
from beamwright.search.answers import extract_answer
from beamwright.search.exact import read_number
from beamwright.search.letters import letter_of, options_of
from beamwright.search.quantity import counted_number, layout, read_quantity


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
        ("A sum: $\\boxed 9$.", "9"),
        (r"The roots are \boxed{1} and \boxed{7}.", "1, 7"),
        (r"\boxed{1} and \boxed{1}", "1"),
        ("Is it \\boxed{8}? No.\n\nThe answer is 7.", "7"),
        (r"\boxed{8}. The answer is right.", "8"),
        ("\\boxed{a < b}\n**Answer: D**", "D"),
        (r"<think>so \boxed{9}? no</think> The answer is 8.", "8"),
        (r"<think>\boxed{9}</think> Done.", "9"),
        ("#### 18\n\nQuestion: 3 + 4?\nAnswer: 7\n#### 7", "18"),
        ("The answer is 2 if n is even.", "2 if n is even"),
        ("The answer is 5!.", "5!"),
        ("The answer is $x$ = 5.", "$x$ = 5"),
        ("The answer is $3$ and $4$.", "3, 4"),
        ("The answer is red, green, and blue.", "red, green, and blue"),
        ("The answer is not 42.", "not 42"),
        ("<strong>Answer:</strong> 42<br>", "42"),
        ("The answer is A and C.", "A and C"),
        ("A) one\nB) two", None),
    ],
)
def test_extracts_the_last_stated_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("\u22123", "-3"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        ("1,2,3", "1,2,3"),
        ("10, 100", r"10,\ 100"),
        (r"10,\!200", "10200"),
        ("1,00,000", "100000"),
        ("\u20135", "-5"),
        ("2\u00bd", r"2\frac{1}{2}"),
        ("**73**", "73"),
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
    assert layout(raw) == normal


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
        "10, 100",
        r"2\sqrt3",
        "x=2, x=3",
        "(1, 0.5)",
    ]:
        for write in (layout, normalise_answer):
            assert write(write(raw)) == write(raw)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("27", "27"),
        ("-3/4", "-3/4"),
        (r"-\frac{3}{4}", "-3/4"),
        (r"2\frac{1}{2}", "5/2"),
        (r"-2\frac{1}{2}", "-5/2"),
        (r"1.5\times10^{-3}", "3/2000"),
        ("1e3", "1000"),
        (r"0.1\overline{6}", "1/6"),
        (r"-.\overline{3}", "-1/3"),
        ("1e999999999", None),
        ("9" * 401, None),
        (r"\frac{1}{0}", None),
        ("", None),
        ("1,2", None),
        (r"1\ 2", None),
        ("007", "7"),
        ("-0.0", "0"),
        (".5", "1/2"),
        (r"\sqrt{12}", None),
        (r"(\frac{2}{3})^{2}\cdot3!", "8/3"),
        (r"2^{4^{8^{16}}}", None),
        (r"\frac{5^{5^{5^{5}}}-5}{16}", None),
        ("3000!", None),
        (r"1+\sqrt{2}", None),
        ("x", None),
    ],
)
def test_reads_numbers_exactly(text, value):
    assert read_number(text) == (value and Fraction(value))


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
    found = read_quantity(text)
    assert (found.value, *found.unit) == (value, dimension, factor)


@pytest.mark.parametrize("text", ["5m", "x in", r"x_\text{min}", "m", "$5$ x", "5 x"])
def test_what_is_not_a_unit_stays(text):
    assert read_quantity(text) == (text, None, frozenset(), False, False)


def test_boxes_that_never_close_are_read_in_one_pass():
    assert extract_answer(r"\boxed{" * 20_000 + "5") is None
    assert extract_answer(r"\boxed{" * 20_000 + "5}") == "5"
    assert extract_answer(r"} \boxed{a \} b} {") == r"a \} b"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("60 eggs", "60"),
        ("60", "60"),
        ("$1,200 in all", "1,200"),
        ("72 (clips)", "72"),
        ("1 apple", "1"),
        ("2/3 of the cake", "2/3"),
        ("60 x", None),
        ("2 pi", None),
        ("5 more than Ann", None),
        ("3 and a half", None),
        ("two eggs", None),
        ("5 apple", None),
    ],
)
def test_what_is_counted_leaves_the_number(answer, number):
    assert counted_number(answer) == number


# --- kinds, in every spelling and place --------------------------------------------------------

ALIKE = (
    (r"\frac12", "0.5", "1/2", r"\dfrac{2}{4}", "\u00bd"),
    (r"2\sqrt{3}", r"2\sqrt3", "2\u221a3", "2sqrt(3)"),
    ("1, 2", "2, 1", r"\{1,2\}", "1 and 2", r"x=1 \text{ or } x=2", r"x=1,\ x=2"),
    (r"28\%", "28", "28 percent", r"28\text{ percent}"),
    ("1.6", "1.6 miles", "8/5", "+1.60"),
    ("180", '"180"', "180.", "**180**", r"\text{Area: } 180"),
    ("9 + 8 = 17", "9+8=17", "17", "x = 17"),
    ("7 x 6 = 42", "42", r"7 \times 6"),
    ("10, 100", r"\{100, 10\}"),
    ("10,100", "10100"),
    ("(1, 2)", r"\left(1,\frac{4}{2}\right)"),
    ("(2,1)",),
    ("[1,2]",),
    ("A=3, B=4", "B=4, A=3"),
    ("A=4, B=3",),
    (r"\pm 3", "3, -3"),
    ("Odd", "odd", r"\text{odd}"),
    ("B", "(B)", "B) 12", r"\textbf{(B)}", "Option B", "B - the blue one"),
    ("3:00 AM",),
    (r"3:00\text{ PM}",),
    (r"\frac{1}{2^{60}}",),
    (r"\frac{1}{2^{61}}",),
    ("5 squared",),
)


def test_one_key_for_equal_answers_and_another_one_for_others():
    keys = [{normalise_answer(each) for each in same} for same in ALIKE]
    assert [len(each) for each in keys] == [1] * len(ALIKE)
    assert not [pair for pair in combinations(keys, 2) if pair[0] & pair[1]]


PHRASES = (
    "The answer is {}.",
    "**Answer**: {}\n",
    "*Answer*: {}",
    "__Answer__: {}",
    "So x.\n#### {}",
)
ENDINGS = ("{}", "{} eggs", "{} eggs in total", "${} in all")
SENTENCES = (
    *(
        "The answer is {}, which is all.",
        "The answer is {} because 6 * 7 is so.",
        "The answer is {}!",
    ),
    *("**The answer is {}!** Great.", "The answer is therefore {}.", "The answer is {} (eggs)."),
    *(
        "The answer is exactly ${}$.",
        "Thus the answer is:\n\\[\n{}\n\\]\n",
        "The answer is $$\n{}\n$$",
    ),
    *("## Final Answer\n\n{}", "**Final Answer**\n\n{}", "The answer to this is \\({}\\) eggs."),
)


@pytest.mark.parametrize("form", [*SENTENCES, *(a.format(b) for a, b in product(PHRASES, ENDINGS))])
def test_a_number_is_read_out_of_any_sentence(form):
    for number in ("42", "1,200", "12.5", "-3"):
        answer = extract_answer(form.replace("{}", number))
        assert normalise_answer(answer) == normalise_answer(number)


CHOSEN = (
    *(
        "{}",
        "**{}**",
        "{}.",
        "({})",
        "First, think.\n\n{}",
        "{}) A blue coat.",
        "Option {} is correct.",
    ),
    *("The answer is {} because so.", "The answer is {}, since so.", "The answer is option {}."),
    *("The correct answer is Option ({}).", "The answer is choice {}.", "\\boxed{{{}}}"),
    *(
        "The correct option is {}. Not A.",
        "\\boxed{{\\text{{Option {}}}}}",
        "\\boxed{{{} - a risk score}}",
    ),
)


@pytest.mark.parametrize("form", CHOSEN)
def test_a_letter_is_read_wherever_it_stands(form):
    assert letter_of(extract_answer(form.format("C"))) == "C"


def test_options_are_what_a_problem_lists():
    listed = (
        "A) 1\nB) 2",
        "**A.** 1\n**B.** 2",
        "(A) 1 (B) 2",
        r"$\textbf{(A)}\ 1\qquad\textbf{(B)}\ 2$",
    )
    for text in listed:
        assert options_of(f"Which one?\n{text}") == {"A": "1", "B": "2"}
    assert options_of("Let A. B be points. A) only") == {}
    assert extract_answer("So it is B", {"A": "1", "B": "2"}) == "B"
    assert extract_answer("So it is C", {"A": "1", "B": "2"}) is None


HOSTILE = [
    *("1" * 3000 + "cm", "1" * 800 + "x" + "1" * 790, "9eggs A" + "km/h" * 90),
    *("B)" * 90 + "*" + "10" * 90, "\n" * 9000 + "a", "</think>" * 9000, " the]" + "*\n\n" * 9000),
    *("\\boxed{" + "\\ " * 9000 + "}", "$" * 9000, "x" * 9000, '"' * 9000, "eggs~" * 3000),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_model_writes_without_end_is_read_in_time(text):
    """It takes ages where an expression tries every way to cut a text."""
    for each in (text, f"{text} The answer is {text}"):
        answer = extract_answer(each)
        assert normalise_answer(each) is not None
        counted_number(answer or each)
