import io
import re
import sys

import pytest

from beamwright.cli.solve import accounting


def test_json_is_one_object_and_nothing_else(cli, fake):
    outcome = cli("solve", "6*7?", "--json")
    assert outcome.code == 0
    assert outcome.json == fake.solution
    assert fake.calls == ["6*7?"]


def test_without_a_terminal_only_the_answer(cli, fake):
    outcome = cli("solve", "6*7?")
    assert outcome.out == "42\n"
    assert outcome.err.splitlines()[-1] == (
        "2 rounds | 9 nodes | 6 pruned | 1,234 tokens generated | 1.2 s | "
        "goodput 16.0 tok/s | KV peak 3.0 MiB"
    )


def test_figures_that_do_not_apply_are_left_out(fake):
    solution = {**fake.solution, "goodput_tok_s": None, "kv": {"device_peak_bytes": None}}
    assert accounting(solution).endswith("| 1.2 s")


def test_no_answer_prints_the_text(cli, fake):
    fake.solution["answer"] = None
    outcome = cli("solve", "6*7?")
    assert outcome.code == 0
    assert outcome.out.startswith("6*7=42.")
    assert "no candidate states an answer" in outcome.err


def test_progress_is_one_line_per_round(cli, fake):
    lines = cli("solve", "6*7?", "--progress").err.splitlines()
    assert "round 1 | 4 candidates | 1 kept | 3 pruned | 0.5 s" in lines
    assert "round 2 | 4 candidates | 0 kept | 3 pruned | 1 finished | 1.0 s" in lines


def test_a_terminal_sees_the_tree(cli, fake, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", cli("solve", "6*7?").out)
    for text in ("Problem", "6*7?", "step 1.0", "Answer  42", "2 rounds | 9 nodes"):
        assert text in out


def test_problem_from_a_file_and_from_standard_input(cli, fake, tmp_path, monkeypatch):
    file = tmp_path / "problem.txt"
    file.write_text("from a file")
    assert cli("solve", "--problem-file", file).code == 0
    for words in (["-"], ["--problem-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
        assert cli("solve", *words).code == 0
    assert fake.calls == ["from a file", "from stdin", "from stdin"]


def test_a_synthetic_prompt(cli, fake):
    assert cli("solve", "--prompt-tokens", "128", "--json").code == 0
    assert fake.calls == [128]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of"),
        (["p", "--prompt-tokens", "8"], "give one of"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["  \n"], "the problem is empty"),
        (["--problem-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_problems(cli, fake, words, message):
    outcome = cli("solve", *words)
    assert outcome.code == 2
    assert message in outcome.complaint
    assert fake.calls == []


def test_a_problem_file_that_is_not_text(cli, fake, tmp_path):
    file = tmp_path / "problem.txt"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in cli("solve", "--problem-file", file).complaint
