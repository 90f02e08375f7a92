import csv
import io
import json
import sys
from types import SimpleNamespace

import pytest

from beamwright.errors import InputError, UnavailableError
from beamwright.evaluate.problems import load_problems
from beamwright.search.answer_keys import read_options
from tables import beside

TABLES = beside(__file__)


@pytest.fixture
def read(write_jsonl):
    """The problems of these lines of a JSONL file."""
    return lambda *lines, **options: load_problems(write_jsonl(*lines), **options).problems


@pytest.mark.parametrize(("fields", "answer"), TABLES["answers"])
def test_reads_every_answer_field_by_priority(read, fields, answer):
    assert read({"problem": "p", **fields})[0].answer == answer


@pytest.mark.parametrize(
    ("fields", "there"),
    [({"key": "2"}, "problem, key"), ({"solution": "a long\nproof"}, "problem, solution")],
)
def test_a_right_answer_that_nobody_reads_is_an_error(read, fields, there):
    words = rf"line 1: no answer \(looked for answer, .*{there}\).*--answer-field"
    with pytest.raises(InputError, match=words):
        read({"problem": "p", **fields})
    assert read({"problem": "p", **fields}, answer_field="none")[0].answer is None


def test_fields_can_be_named(read, write_jsonl):
    row = {"text": "1+1?", "problem": "not this", "target": 2, "answer": "nor this"}
    found = load_problems(write_jsonl(row), problem_field="text", answer_field="target")
    assert (found.problems[0].problem, found.problems[0].answer) == ("1+1?", "2")
    assert found.fingerprint.endswith("--problem-field text, --answer-field target")
    for option in ("problem_field", "answer_field"):
        with pytest.raises(InputError, match="looked for x; fields are problem, answer"):
            read({"problem": "p", "answer": "1"}, **{option: "x"})


@pytest.mark.parametrize(("fields", "expected"), TABLES["shapes"])
def test_public_shapes(read, fields, expected):
    (problem,) = read(fields)
    assert problem.problem == "p"
    assert [problem.answer, problem.unique_id, problem.level] == expected


def test_every_problem_has_an_id_of_its_own_equal_texts_too(read):
    lines = [{"problem": "p"}, *({"problem": "p", "id": each} for each in ("a", "a", 0, "a#2"))]
    assert [problem.unique_id for problem in read(*lines)] == ["0", "a", "a#2", "0#3", "a#2#4"]


def test_limit_keeps_the_first_and_the_fingerprint(write_jsonl):
    path = write_jsonl({"problem": "p"}, {"problem": "q"}, "", {"problem": "", "question": "r"})
    whole, two = load_problems(path), load_problems(path, limit=2)
    assert [problem.problem for problem in whole.problems] == ["p", "q", "r"]
    assert two.problems == whole.problems[:2]
    assert whole.fingerprint == two.fingerprint
    with pytest.raises(InputError, match="--limit"):
        load_problems(path, limit=0)


# --- formats ---------------------------------------------------------------------------------

ROWS = [{"problem": 'p, "q"\nr', "answer": "1"}, {"problem": "\u00e9", "answer": "2.5"}]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows):
    pyarrow = pytest.importorskip("pyarrow")
    content = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), content)
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("set.jsonl", as_lines),
        ("set", as_lines),
        ("lines.json", as_lines),
        ("list.json", lambda rows: json.dumps(rows, indent=1).encode()),
        ("data.json", lambda rows: json.dumps({"data": rows}).encode()),
        ("set.csv", as_csv),
        ("long.csv", lambda rows: as_csv([{**row, "solution": "x" * 200_000} for row in rows])),
        ("bom.csv", lambda rows: b"\xef\xbb\xbf" + as_csv(rows)),
        ("SET.PARQUET", as_parquet),
    ],
)
def test_every_format_holds_the_same_problems(tmp_path, name, write):
    (tmp_path / name).write_bytes(write(ROWS))
    problem_set = load_problems(str(tmp_path / name))
    found = [{"problem": each.problem, "answer": each.answer} for each in problem_set.problems]
    assert found == ROWS
    assert len(problem_set.fingerprint) == 64


GOOD_LINE = '{"problem": "p", "answer": "1"}\n'
BAD_FILES = [("a.jsonl", GOOD_LINE + line, message) for line, message in TABLES["bad_lines"]]
BAD_FILES += [*TABLES["bad_files"], ("a.json", "[" * 100_000, r"a\.json, line 1: not JSON")]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, name, content, message):
    source = name
    if content is not None:
        source = str(tmp_path / name)
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=message) as caught:
        load_problems(source, limit=1)
    assert "\n" not in str(caught.value)


@pytest.fixture
def write_columns(tmp_path):
    """Few bytes: equal values are written once."""

    def write(num_rows, problem):
        pyarrow = pytest.importorskip("pyarrow")
        places = pyarrow.array([0] * num_rows, pyarrow.int8())
        equal = pyarrow.DictionaryArray.from_arrays(places, [problem])
        table = pyarrow.table({"problem": equal, "answer": equal})
        path = tmp_path / "set.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(table, path, compression="zstd")
        assert path.stat().st_size < 200_000
        return str(path)

    return write


def test_a_small_parquet_file_of_very_many_rows_is_not_unpacked(write_columns):
    path = write_columns(3_000_000, "p")
    with pytest.raises(InputError, match=r"set.parquet: 3,000,000 rows with 6,000,000 cells"):
        load_problems(path)
    assert [each.index for each in load_problems(path, 2).problems] == [0, 1]
    with pytest.raises(InputError, match="exceed 5,000,000"):
        load_problems(path, 2_900_000)


def test_a_small_parquet_file_of_very_many_bytes_is_not_unpacked(write_columns):
    path = write_columns(1_000, "p" * 1_000_000)
    with pytest.raises(InputError, match=r"set.parquet, row 135: more than 268,435,456 char"):
        load_problems(path, 1)


def test_a_parquet_file_of_several_batches_is_read_whole(tmp_path):
    path = tmp_path / "set.parquet"
    path.write_bytes(as_parquet([{"problem": f"p{i}", "answer": str(i)} for i in range(2_500)]))
    found = load_problems(str(path)).problems
    assert [each.problem for each in found] == [f"p{i}" for i in range(2_500)]
    assert load_problems(str(path), 3).problems == found[:3]


# --- folders and the hub ---------------------------------------------------------------------


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    with pytest.raises(InputError, match="holds no problem files"):
        load_problems(str(tmp_path))
    for name, content in {
        "b/2.jsonl": as_lines([{"problem": "b2"}]),
        "b/1.json": as_lines([{"problem": "b1"}]),
        "a.csv": as_csv([{"problem": "a"}]),
        ".hidden/c.jsonl": as_lines([{"problem": "c"}]),
        "README.md": b"about",
        "dataset_infos.json": b"{}",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    first = load_problems(str(tmp_path))
    assert [problem.problem for problem in first.problems] == ["a", "b1", "b2"]
    assert [problem.unique_id for problem in first.problems] == ["0", "1", "2"]
    (tmp_path / "b" / "2.jsonl").write_bytes(as_lines([{"problem": "other"}]))
    assert load_problems(str(tmp_path)).fingerprint != first.fingerprint


def test_a_folder_with_splits_wants_one_of_them(tmp_path):
    for split in ("test", "train"):
        (tmp_path / f"{split}-00000.jsonl").write_bytes(as_lines([{"problem": split}]))
    with pytest.raises(InputError, match=r"several splits \(test, train\); write .*@SPLIT"):
        load_problems(str(tmp_path))
    (problem,) = load_problems(f"{tmp_path}@test").problems
    assert problem.problem == "test"
    with pytest.raises(InputError, match="no such split"):
        load_problems(f"{tmp_path}@dev")


class NotFoundError(FileNotFoundError):
    pass


@pytest.fixture
def hub(monkeypatch):
    """The package `datasets` with three sets; every other name is out of reach."""
    tables = {
        ("org/one", None): {"train": [{"problem": "p", "answer": 1}]},
        ("org/two", "main"): {"test": [{"problem": "t"}], "train": [{"problem": "u"}]},
        ("org/three", None): {"a": [], "b": []},
    }
    errors = {
        "org/missing": NotFoundError("Dataset 'org/missing' doesn't exist on the Hub.\nmore"),
        "org/odd": ValueError("BuilderConfig 'x' not found."),
        "org/far": ConnectionError("Couldn't reach the Hub\nmore"),
    }

    def load_dataset(name, config, split):
        if name in errors:
            raise errors[name]
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
    seen = []

    def load_dataset(name, config, split, trust_remote_code=None):
        seen.append(trust_remote_code)
        return {"test": [{"problem": "p"}]}

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    load_problems("hf:org/one")
    assert seen == [False]


@pytest.mark.parametrize("package", ["datasets", "pyarrow"])
def test_what_is_not_installed_names_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "set.parquet").write_bytes(b"PAR1")
    source = "hf:org/one" if package == "datasets" else str(tmp_path / "set.parquet")
    with pytest.raises(UnavailableError, match=rf": needs {package}.*beamwright\[hub\]"):
        load_problems(source)


def test_multiple_choice_lists_the_options_and_answers_with_a_letter(write_jsonl):
    path = write_jsonl(*(TABLES["gpqa"] | {"Record ID": f"rec{i}"} for i in range(40)))
    problems = load_problems(path).problems
    for problem in problems:
        question, _, rest = problem.problem.partition("\n\n")
        lines = rest.splitlines()[:4]
        assert question == "Which is even?"
        assert [line[:3] for line in lines] == ["A) ", "B) ", "C) ", "D) "]
        assert sorted(line[3:] for line in lines) == ["1", "2", "3", "5"]
        assert f"{problem.answer}) 2" in lines
    assert {problem.answer for problem in problems} == set("ABCD")
    later = load_problems(
        write_jsonl({"problem": "p", "answer": "1"}, TABLES["gpqa"] | {"Record ID": "rec0"})
    )
    first, second = problems[0], later.problems[1]
    assert (first.problem, first.answer) == (second.problem, second.answer), "the row alone decides"


LOOK_LIKE = ("endings", "distractor1", "opa", "option_a", "answerA", "sol1", "mc_choices")


@pytest.mark.parametrize("fields", TABLES["options"])
def test_options_of_public_shapes_are_shown_and_graded_by_letter(read, fields):
    (problem,) = read({"question": "6 * 7?", **fields})
    assert [*read_options(problem.problem)] == ["A", "B"]
    assert problem.problem.startswith("6 * 7?\n\nA) ")
    assert problem.answer == "B"
    assert read({"question": "6 * 7?", **fields}, answer_field="none")[0].problem == problem.problem


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {**TABLES["gpqa"], "Incorrect Answer 2": ""},
            "field 'Incorrect Answer 2' is missing or empty",
        ),
        *TABLES["bad_options"],
        *(({name: "a"}, f"field '{name}' looks like an answer option") for name in LOOK_LIKE),
    ],
)
def test_options_that_cannot_be_read_are_named_in_one_line(read, fields, message):
    with pytest.raises(InputError, match=f"line 1: .*{message}") as caught:
        read({"question": "6 * 7?", **({"answer": "1"} if len(fields) == 1 else {}), **fields})
    assert "\n" not in str(caught.value)


def test_options_that_the_text_holds_already_are_not_shown_twice(read):
    text = "6 * 7?\n(A) 40\n(B) 42"
    asked = [read({"question": text, "choices": ["40", "42"], "answer": 1})]
    for fields in ({"opa": "40", "answer": "B"}, {"choices": ["40", "42"], "answer": 1}):
        asked.append(read({"text": text, **fields}, problem_field="text"))
    assert [(each.problem, each.answer) for (each,) in asked] == [(text, "B")] * 3
