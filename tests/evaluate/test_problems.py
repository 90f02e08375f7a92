import csv
import json
import sys
from types import SimpleNamespace

import pytest

from beamwright.errors import InputError, UnavailableError
from beamwright.evaluate.problems import load_problems


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
        ({"answer": 27.5}, "27.5"),
        ({"answer": float("nan"), "solution": "3"}, "3"),
        ({"reference_answer": "2"}, "2"),
        ({"extracted_groundtruth": "2"}, "2"),
        ({"canonical_solution": "2"}, "2"),
        ({"solution": "so\n\n$\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
        ({"solution": "so \\boxed{3}", "answer": "2"}, "2"),
        ({"solution": "so \\boxed{3}", "answer": None}, "3"),
        ({"solution": "so \\boxed{3}", "answer": ""}, "3"),
        ({"answer": ["60"]}, "60"),
        ({"answer": "[5, 6]"}, "[5, 6]"),
        ({"answer": "[5]"}, "[5]"),
        ({"expected_answer": "2"}, "2"),
        ({"final_answer": [2]}, "2"),
        ({"ground_truth": "2"}, "2"),
        ({"gold": "2"}, "2"),
        ({"solution": "so \\boxed{3}", "gold": "2"}, "2"),
        ({"answer": "5 * 2 = 10\n#### 10"}, "10"),
        ({}, None),
    ],
)
def test_reads_every_answer_field_by_priority(write_jsonl, fields, answer):
    (problem,) = load_problems(write_jsonl({"problem": "p", **fields})).problems
    assert problem.answer == answer


@pytest.mark.parametrize(
    ("fields", "there"),
    [({"key": "2"}, "problem, key"), ({"solution": "a long\nproof"}, "problem, solution")],
)
def test_a_right_answer_that_nobody_reads_is_an_error(write_jsonl, fields, there):
    path = write_jsonl({"problem": "p", **fields})
    with pytest.raises(
        InputError, match=rf"line 1: no answer \(looked for answer, .*{there}\)"
    ) as e:
        load_problems(path)
    assert "--answer-field" in str(e.value)
    assert load_problems(path, answer_field="none").problems[0].answer is None


def test_fields_can_be_named(write_jsonl):
    row = {"text": "1+1?", "problem": "not this", "target": 2, "answer": "nor this"}
    found = load_problems(write_jsonl(row), problem_field="text", answer_field="target")
    assert (found.problems[0].problem, found.problems[0].answer) == ("1+1?", "2")
    assert found.fingerprint.endswith("--problem-field text, --answer-field target")


def test_a_named_field_that_is_not_there_is_an_error(write_jsonl):
    path = write_jsonl({"problem": "p", "answer": "1"})
    with pytest.raises(InputError, match="looked for text; there are problem, answer"):
        load_problems(path, problem_field="text")
    with pytest.raises(InputError, match="looked for target; there are problem, answer"):
        load_problems(path, answer_field="target")


def test_math500_fields(write_jsonl):
    fields = {"problem": "p", "answer": "1", "unique_id": "a/1", "level": 5, "subject": "Algebra"}
    (problem,) = load_problems(write_jsonl(fields)).problems
    assert (problem.unique_id, problem.level) == ("a/1", 5)


def test_equal_texts_stay_two_problems(write_jsonl):
    problems = load_problems(write_jsonl({"problem": "p"}, {"problem": "p"})).problems
    assert [problem.unique_id for problem in problems] == ["0", "1"]


def test_ids_are_made_unique(write_jsonl):
    lines = [
        {"problem": "p"},
        {"problem": "p", "unique_id": "a"},
        {"problem": "p", "unique_id": "a"},
        {"problem": "p", "unique_id": 0},
        {"problem": "p", "unique_id": "a#2"},
    ]
    ids = [problem.unique_id for problem in load_problems(write_jsonl(*lines)).problems]
    assert ids == ["0", "a", "a#2", "0#3", "a#2#4"]


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
        ('{"problem": "p', r"line 2: not JSON \(Unterminated string, column 13\)"),
        ("[1]", "line 2: not a JSON object"),
        ('{"text": "p"}', "line 2: no problem field"),
        ('{"problem": "  "}', "line 2: the problem is empty"),
        ('{"problem": [1]}', "line 2: field 'problem' is not text"),
        ('{"problem": "p", "answer": [1, 2]}', "line 2: field 'answer' is neither"),
    ],
)
def test_bad_lines_are_named_in_one_line(write_jsonl, line, message):
    path = write_jsonl({"problem": "p"}, line)
    with pytest.raises(InputError, match=message) as caught:
        load_problems(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hole_among_the_answers_is_named(write_jsonl):
    answered = {"problem": "p", "answer": "1"}
    path = write_jsonl(answered, {"problem": "p", "solution": "a long\nproof"}, {"problem": "p"})
    with pytest.raises(InputError, match="line 2: no answer, though others have one") as caught:
        load_problems(path, limit=1)
    assert path in str(caught.value)


def test_an_empty_field_gives_way_to_the_next(write_jsonl):
    (problem,) = load_problems(write_jsonl({"problem": "", "question": "q"})).problems
    assert problem.problem == "q"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("bundled:train", "no such bundled problem set"),
        ("nowhere@test", "nowhere@test: no such file"),
        ("a\0b", "cannot be read"),
        ("hf:MATH-500", "not of the form hf:ORG/NAME"),
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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (  # MATH-500
            {"problem": "p", "solution": "so \\boxed{1}", "answer": "1", "subject": "Algebra"}
            | {"level": 2, "unique_id": "test/algebra/1.json"},
            ("p", "1", "test/algebra/1.json"),
        ),
        (  # MATH, one file a problem
            {"problem": "p", "level": "Level 5", "type": "Algebra", "solution": "\\boxed{2}"},
            ("p", "2", "0"),
        ),
        (  # AIME 2024, three shapes
            {"id": 60, "problem": "p", "solution": "s", "answer": "204", "year": "2024"},
            ("p", "204", "60"),
        ),
        ({"problem": "p", "extracted_groundtruth": "033"}, ("p", "033", "0")),
        (
            {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204},
            ("p", "204", "2024-I-1"),
        ),
        ({"question": "p", "answer": "70"}, ("p", "70", "0")),  # AIME 2025
        ({"id": 0, "problem": "p", "answer": 27.0}, ("p", "27.0", "0")),  # AMC 2023
        ({"question": "p", "answer": "a\n#### 1,080"}, ("p", "1,080", "0")),  # GSM8K
    ],
)
def test_public_shapes(write_jsonl, fields, expected):
    (problem,) = load_problems(write_jsonl(fields)).problems
    assert (problem.problem, problem.answer, problem.unique_id) == expected


ROWS = [{"problem": 'p, "q"\nr', "answer": "1"}, {"problem": "\u00e9", "answer": "2.5"}]


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(rows), path)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("set.jsonl", write_lines),
        ("set", write_lines),
        ("lines.json", write_lines),
        ("list.json", lambda path, rows: path.write_text(json.dumps(rows, indent=1))),
        ("data.json", lambda path, rows: path.write_text(json.dumps({"data": rows}))),
        ("set.csv", write_csv),
        ("bom.csv", lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + csv_bytes(path, rows))),
        ("SET.PARQUET", write_parquet),
    ],
)
def test_every_format_holds_the_same_problems(tmp_path, name, write):
    write(tmp_path / name, ROWS)
    problem_set = load_problems(str(tmp_path / name))
    found = [(problem.problem, problem.answer) for problem in problem_set.problems]
    assert found == [(row["problem"], row["answer"]) for row in ROWS]
    assert len(problem_set.fingerprint) == 64


def csv_bytes(path, rows):
    write_csv(path, rows)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[\n{"problem": }]', r"a\.json, line 2: not JSON"),
        ("a.json", b'[{"problem": "p"}, 3]', r"a\.json, row 2: not a JSON object"),
        ("a.json", b'{"data": 3}', r"a\.json: neither a list"),
        ("a.json", b"3", r"a\.json: neither a list"),
        ("a.json", b"\xff", r"a\.json: not UTF-8"),
        ("a.json", b"[]", "holds no problems"),
        ("a.csv", b"problem,answer\n\np,1,2\n", r"a\.csv, line 3: 3 cells, the header names 2"),
        ("a.csv", b'problem,answer\n"p"q,1\n', r"a\.csv, line 2: not CSV"),
        ("a.csv", b"text,answer\np,1\n", r"a\.csv, line 2: no problem field"),
        ("a.csv", b"", "holds no problems"),
        ("a.csv", b"\xff", r"a\.csv: not UTF-8"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_problems(str(path))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_damaged_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "set.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(InputError, match=r"set\.parquet: not parquet"):
        load_problems(str(path))
    write_parquet(path, [{"problem": "p"}, {"problem": ""}])
    with pytest.raises(InputError, match=r"set.parquet, row 2: the problem is empty"):
        load_problems(str(path))


def write_columns(path, num_rows, problem):
    """Few bytes: equal values are written once."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    places = pyarrow.array([0] * num_rows, pyarrow.int8())
    equal = pyarrow.DictionaryArray.from_arrays(places, [problem])
    columns = {name: equal for name in ("problem", "answer")}
    parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    assert path.stat().st_size < 200_000


def test_a_small_parquet_file_of_very_many_rows_is_not_unpacked(tmp_path):
    path = tmp_path / "set.parquet"
    write_columns(path, 3_000_000, "p")
    with pytest.raises(InputError, match=r"set.parquet: 3,000,000 rows of 6,000,000 cells"):
        load_problems(str(path))
    assert [each.index for each in load_problems(str(path), 2).problems] == [0, 1]
    with pytest.raises(InputError, match="at most 5,000,000"):
        load_problems(str(path), 2_900_000)


def test_a_small_parquet_file_of_very_many_bytes_is_not_unpacked(tmp_path):
    path = tmp_path / "set.parquet"
    write_columns(path, 1_000, "p" * 1_000_000)
    with pytest.raises(InputError, match=r"set.parquet, row 135: beyond 268,435,456 char"):
        load_problems(str(path), 1)


def test_a_parquet_file_of_several_batches_is_read_whole(tmp_path):
    path = tmp_path / "set.parquet"
    write_parquet(path, [{"problem": f"p{i}", "answer": str(i)} for i in range(2_500)])
    found = load_problems(str(path)).problems
    assert [each.problem for each in found] == [f"p{i}" for i in range(2_500)]
    assert load_problems(str(path), 3).problems == found[:3]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "set.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UnavailableError, match=r"set.parquet: needs pyarrow.*beamwright\[hub\]"):
        load_problems(str(path))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    write_lines(tmp_path / "b" / "2.jsonl", [{"problem": "b2"}])
    write_lines(tmp_path / "b" / "1.json", [{"problem": "b1"}])
    write_csv(tmp_path / "a.csv", [{"problem": "a"}])
    write_lines(tmp_path / ".hidden" / "c.jsonl", [{"problem": "c"}])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    first = load_problems(str(tmp_path))
    assert [problem.problem for problem in first.problems] == ["a", "b1", "b2"]
    assert [problem.unique_id for problem in first.problems] == ["0", "1", "2"]
    write_lines(tmp_path / "b" / "2.jsonl", [{"problem": "other"}])
    assert load_problems(str(tmp_path)).fingerprint != first.fingerprint


def test_a_folder_with_splits_wants_one_of_them(tmp_path):
    write_lines(tmp_path / "test-00000.jsonl", [{"problem": "t"}])
    write_lines(tmp_path / "train-00000.jsonl", [{"problem": "u"}])
    with pytest.raises(InputError, match=r"several splits \(test, train\); write .*@SPLIT"):
        load_problems(str(tmp_path))
    (problem,) = load_problems(f"{tmp_path}@test").problems
    assert problem.problem == "t"
    with pytest.raises(InputError, match="no such split"):
        load_problems(f"{tmp_path}@dev")


def test_a_folder_without_problem_files(tmp_path):
    with pytest.raises(InputError, match="holds no problem files"):
        load_problems(str(tmp_path))


class NotFoundError(FileNotFoundError):
    pass


@pytest.fixture
def hub(monkeypatch):
    """The package `datasets` with two sets; every other name is out of reach."""
    tables = {
        ("org/one", None): {"train": [{"problem": "p", "answer": 1}]},
        ("org/two", "main"): {"test": [{"problem": "t"}], "train": [{"problem": "u"}]},
        ("org/three", None): {"a": [], "b": []},
    }

    def load_dataset(name, config, split):
        if name == "org/missing":
            raise NotFoundError("Dataset 'org/missing' doesn't exist on the Hub.\nmore")
        if name == "org/odd":
            raise ValueError("BuilderConfig 'x' not found.")
        if (name, config) not in tables:
            raise ConnectionError("Couldn't reach the Hub\nmore")
        table = tables[name, config]
        return table if split is None else table[split]

    exceptions = SimpleNamespace(DatasetNotFoundError=NotFoundError)
    package = SimpleNamespace(load_dataset=load_dataset, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", package)


@pytest.mark.parametrize(
    ("source", "problem"),
    [("hf:org/one", "p"), ("hf:org/two/main", "t"), ("hf:org/two/main@train", "u")],
)
def test_hub_names_configurations_and_splits(hub, source, problem):
    (found,) = load_problems(source).problems
    assert found.problem == problem


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("hf:org/three", InputError, "choose a split with @: a, b"),
        ("hf:org/missing", InputError, "doesn't exist on the Hub$"),
        ("hf:org/odd", InputError, "BuilderConfig 'x' not found$"),
        ("hf:org/far", UnavailableError, r"cannot be reached \(Couldn't reach the Hub\)"),
    ],
)
def test_what_the_hub_lacks_is_said_in_one_line(hub, source, error, message):
    with pytest.raises(error, match=message) as caught:
        load_problems(source)
    assert str(caught.value).startswith(f"{source}: ")
    assert "\n" not in str(caught.value)


def test_code_of_a_data_set_is_never_run(hub, monkeypatch):
    """By releases that could; to later ones the option is unknown."""
    seen = []

    def load_dataset(name, config, split, trust_remote_code=None):
        seen.append(trust_remote_code)
        return {"test": [{"problem": "p"}]}

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    load_problems("hf:org/one")
    assert seen == [False]


def test_a_hub_name_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnavailableError, match=r"hf:org/one: needs datasets.*beamwright\[hub\]"):
        load_problems("hf:org/one")
