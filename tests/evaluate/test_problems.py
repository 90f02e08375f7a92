import pytest

from beamwright.errors import InputError
from beamwright.evaluate import load_problems


@pytest.mark.parametrize("name", ["prompt", "problem", "question", "Problem"])
def test_reads_every_question_field(write_jsonl, name):
    (problem,) = load_problems(write_jsonl({name: "1+1?", "answer": "2"})).problems
    assert (problem.problem, problem.answer) == ("1+1?", "2")


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"answer": "2"}, "2"),
        ({"Answer": 2}, "2"),
        ({"answer": 27.0}, "27.0"),
        ({"reference_answer": "2"}, "2"),
        ({"extracted_groundtruth": "2"}, "2"),
        ({"canonical_solution": "2"}, "2"),
        ({"solution": "so\n\n$\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
        ({"solution": "so \\boxed{3}", "answer": "2"}, "2"),
        ({"solution": "so \\boxed{3}", "answer": None}, "3"),
        ({"solution": "so \\boxed{3}", "answer": ""}, "3"),
        ({"solution": "a long\nproof"}, None),
        ({"answer": "5 * 2 = 10\n#### 10"}, "10"),
        ({}, None),
    ],
)
def test_reads_every_answer_field_by_priority(write_jsonl, fields, answer):
    (problem,) = load_problems(write_jsonl({"problem": "p", **fields})).problems
    assert problem.answer == answer


def test_math500_fields(write_jsonl):
    fields = {"problem": "p", "answer": "1", "unique_id": "a/1", "level": 5, "subject": "Algebra"}
    (problem,) = load_problems(write_jsonl(fields)).problems
    assert (problem.unique_id, problem.level, problem.subject) == ("a/1", 5, "Algebra")


def test_equal_texts_stay_two_problems(write_jsonl):
    problems = load_problems(write_jsonl({"problem": "p"}, {"problem": "p"})).problems
    assert [problem.unique_id for problem in problems] == ["0", "1"]


def test_ids_are_made_unique_without_touching_those_in_the_file(write_jsonl):
    lines = [
        {"problem": "p"},
        {"problem": "p", "unique_id": "a"},
        {"problem": "p", "unique_id": "a"},
        {"problem": "p", "unique_id": 0},
        {"problem": "p", "unique_id": "a#2"},
    ]
    ids = [problem.unique_id for problem in load_problems(write_jsonl(*lines)).problems]
    assert ids == ["0'", "a", "a#2'", "0", "a#2"]


def test_limit_keeps_the_first_and_the_fingerprint(write_jsonl):
    path = write_jsonl({"problem": "p"}, {"problem": "q"}, "", {"problem": "r"})
    whole, two = load_problems(path), load_problems(path, limit=2)
    assert [problem.problem for problem in two.problems] == ["p", "q"]
    assert len(whole.problems) == 3
    assert whole.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"text": "p"}', "line 2: no problem field"),
        ('{"problem": "  "}', "line 2: the problem is empty"),
        ('{"problem": [1]}', "line 2: field 'problem' is not text"),
        ('{"problem": "p", "answer": [1]}', "line 2: field 'answer' is neither"),
    ],
)
def test_bad_lines_are_named_in_one_line(write_jsonl, line, message):
    path = write_jsonl({"problem": "p"}, line)
    with pytest.raises(InputError, match=message) as caught:
        load_problems(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_field_gives_way_to_the_next(write_jsonl):
    (problem,) = load_problems(write_jsonl({"problem": "", "question": "q"})).problems
    assert problem.problem == "q"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("bundled:train", "no such bundled problem set"),
        (".", "cannot be read"),
    ],
)
def test_missing_sources(source, message):
    with pytest.raises(InputError, match=message):
        load_problems(source)


def test_an_empty_file_and_a_binary_one(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\n\n")
    with pytest.raises(InputError, match="holds no problems"):
        load_problems(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="line 1: not UTF-8"):
        load_problems(str(path))


def test_a_limit_below_one_is_an_error(write_jsonl):
    with pytest.raises(InputError, match="--limit"):
        load_problems(write_jsonl({"problem": "p"}), limit=0)
