"""Outputs that cannot be written, failures half way, and text that would act on a terminal."""

import errno
import json
import os
from types import SimpleNamespace

import pytest
import typer

from beamwright.errors import CapacityError

ESCAPES = "\x1b]0;PWN\x07\x1b[2J\x9b1m\u202e\ud800"


@pytest.fixture
def dataset(tmp_path):
    """Three problems in a file."""
    file = tmp_path / "set.jsonl"
    file.write_text((json.dumps({"problem": "p", "answer": "42"}) + "\n") * 3)
    return file


# --- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--tree", "--trace", "--record-tree"])
def test_the_answer_comes_before_a_file_that_cannot_be_written(cli, fake, option):
    found = cli("solve", "6*7?", option, "/dev/full")
    assert (found.code, found.out) == (2, "42\n")
    assert "/dev/full: cannot be written (No space left on device)" in found.err


def test_a_checkpoint_is_never_a_device(cli, fake, tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    for file in ("/dev/null", tmp_path / "link", tmp_path / "pipe"):
        found = cli("solve", "6*7?", "--checkpoint", file)
        assert found.code == 2
        assert "not a regular file" in found.complaint
    assert not fake.calls


def test_a_disk_that_fills_up_during_an_eval_keeps_what_is_there(
    cli, fake, dataset, tmp_path, monkeypatch
):
    out, real, calls = tmp_path / "out", os.fsync, []

    def fsync(handle):
        calls.append(handle)
        if len(calls) > 4:  # settings.json and its folder, then two problems
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    found = cli("eval", dataset, "--out", out)
    assert found.code == 2
    assert "results.jsonl: cannot be written (No space left on device)" in found.err
    assert "2 problems are saved; run again with --out" in found.err
    monkeypatch.setattr(os, "fsync", real)
    assert cli("eval", dataset, "--out", out, "--json").json["correct"] == 3


def test_pages_that_cannot_be_written_do_not_end_an_eval(cli, fake, dataset, tmp_path):
    out, real = tmp_path / "out", fake.solve_many
    out.mkdir()
    (out / "trees").write_text("in the way")

    def solve_many(problems, **options):
        for problem_id, solution in real(problems, **options):
            solution.problem_id, solution.tree = problem_id, None
            yield problem_id, solution

    fake.solve_many = solve_many
    found = cli("eval", dataset, "--out", out, "--trees", "2")
    assert "100.0%" in found.out
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
    assert found.code == 2
    assert "trees: cannot create the folder" in found.err


def test_results_that_are_no_file(cli, fake, dataset, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "results.jsonl")
    found = cli("eval", dataset, "--out", out)
    assert found.code == 2
    assert "not a regular file" in found.complaint


def test_a_full_standard_output_is_one_line(cli, fake, monkeypatch):
    def full(*words, **options):
        if not options.get("err"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(typer, "echo", full)
    assert cli("solve", "6*7?").code == 1


# --- failures half way -----------------------------------------------------------------------


@pytest.fixture
def failing(fake):
    """A search that fails with two candidates finished."""
    fake.error = CapacityError("a step", 10, 0, 5)
    alike = {"score": 0.5, "stop": "eos", "tokens": 9}
    candidates = [{"answer": a, "vote": a, **alike} for a in ("111", "\x1b7")]
    content = {**fake.solution, "answer": "111", "candidates": candidates}
    fake.error.partial = SimpleNamespace(to_json=lambda: content, **content)
    return fake


def test_a_search_that_failed_prints_no_answer_but_what_was_finished(cli, failing):
    found = cli("solve", "6*7?")
    assert (found.code, found.out) == (1, "")
    assert "failed after 2 candidates had finished; their answers: 111 (1), 7 (1)" in found.err
    assert "KV budget too small" in found.err
    found = cli("solve", "6*7?", "--json")
    assert (found.code, found.json["partial"]) == (1, True)
    assert "KV budget too small" in found.json["error"]
    assert len(found.json["candidates"]) == 2


@pytest.mark.parametrize("kind", [StopIteration, RuntimeError, ValueError, RecursionError])
def test_whatever_is_raised_ends_as_one_line(cli, fake, kind):
    fake.error = kind("two\nlines")
    outcome = cli("solve", "p")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines()[-1] == (
        f"beamwright: internal error: {kind.__name__}: two lines. Use --debug for the traceback"
    )
    assert "Traceback" not in outcome.err
    assert "Traceback" in cli("solve", "p", "--debug").err


# --- text ------------------------------------------------------------------------------------


def test_names_in_data_are_neither_markup_nor_escapes(cli, fake, tmp_path):
    dataset = tmp_path / "set.jsonl"
    rows = [{"problem": "p", "answer": "42", "level": level} for level in ("[/x]", ESCAPES, ":x:")]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = cli("eval", dataset)
    assert found.code == 0
    assert "level [/x]" in found.out
    assert "level :x:" in found.out
    assert all(c.isprintable() or c == "\n" for c in found.out)


# --- inputs that never end, or never begin ---------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "solve --problem-file",
        "solve 6*7? --recipe",
        "solve --resume",
        "eval",
        "simulate --recorded-tree",
    ],
)
@pytest.mark.parametrize("device", [False, True])
def test_a_pipe_or_a_device_is_refused_at_once(cli, fake, tmp_path, words, device):
    pipe = tmp_path / "pipe"
    if device:
        pipe.symlink_to("/dev/zero")
    else:
        os.mkfifo(pipe)
    found = cli(*words.split(), pipe)
    assert found.code == 2
    assert f"{pipe}" in found.complaint
    assert "not a regular file" in found.complaint
    assert not fake.calls
