import io
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from beamwright.engine.batch import RunningBatch


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
        "goodput 16.0 tok/s per path | KV peak 3.0 MiB"
    )


def test_a_model_of_ones_own_votes_and_one_line_says_how_to_score(cli, fake, generator_folder):
    outcome = cli("solve", "6*7?", "--model", generator_folder, "--json")
    assert outcome.json["answer"] == "42"
    assert (fake.settings.search.search, fake.settings.model.verifier) == ("majority", "none")
    (said,) = [line for line in outcome.err.splitlines() if "majority" in line]
    assert "runs without a verifier: the answer is a majority vote of 16 paths" in said
    assert "--verifier PATH" in said


def test_a_synthetic_prompt_is_a_measurement(cli, fake, generator_folder):
    assert cli("solve", "--prompt-tokens", 8, "--model", generator_folder).code == 0
    assert (fake.settings.search.search, fake.settings.model.verifier) == ("beam", "logprob")


def test_no_answer_prints_the_last_step_and_says_so(cli, fake):
    fake.solution |= {"answer": None, "last_step": "so 42", "warnings": ["no candidate states one"]}
    outcome = cli("solve", "6*7?")
    assert (outcome.code, outcome.out) == (0, "so 42\n")
    assert "warning: no candidate states one" in outcome.err
    assert cli("solve", "6*7?", "--json").json["warnings"] == fake.solution["warnings"]


def test_progress_is_one_line_per_round(cli, fake):
    lines = cli("solve", "6*7?", "--progress").err.splitlines()
    assert "round 1 | 4 candidates | 1 kept | 3 pruned | 0.5 s" in lines
    assert "round 2 | 4 candidates | 0 kept | 3 pruned | 1 finished | 1.0 s" in lines


def test_a_terminal_sees_the_tree(cli, fake, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    outcome = cli("solve", "6*7?")
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.out)
    for text in ("Problem", "6*7?", "step 1.0", "Answer  42"):
        assert text in out
    assert "2 rounds | 9 nodes" in outcome.err


def test_the_page_marks_the_chosen_candidate_among_equal_texts(cli, fake, tmp_path):
    fake.solution["lineage"] = [0, 0, 1]
    assert cli("solve", "6*7?", "--tree", tmp_path / "tree.html").code == 0
    data = re.search(
        r'<script[^>]*id="data"[^>]*>(.*?)</script>', (tmp_path / "tree.html").read_text()
    )
    assert json.loads(data[1])["events"][-1]["chosen"] == "0.1"


def test_a_picture_for_a_readme(cli, fake, tmp_path):
    assert cli("solve", "6*7?", "--picture", tmp_path / "tree.svg").code == 0
    drawn = ElementTree.fromstring((tmp_path / "tree.svg").read_text())
    lines = {}
    for each in drawn.iter("{http://www.w3.org/2000/svg}text"):
        lines[each.get("y")] = lines.get(each.get("y"), "") + each.text.replace("\xa0", " ")
    text = "\n".join(lines.values())
    for part in ("6*7?", "step 1.0", "\u2713", "Answers  no answer x1", "Answer   42", "9 nodes"):
        assert part in text
    assert len(lines) <= 36  # and the window's title
    outcome = cli("solve", "6*7?", "--picture", tmp_path / "nowhere" / "tree.svg")
    assert (outcome.code, outcome.out) == (2, "")


def test_problem_from_a_file_and_from_standard_input(cli, fake, tmp_path, monkeypatch):
    file = tmp_path / "problem.txt"
    file.write_text("from a file")
    assert cli("solve", "--problem-file", file).code == 0
    for words in (["-"], ["--problem-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
        assert cli("solve", *words).code == 0
    assert fake.calls == ["from a file", "from stdin", "from stdin"]


# --- checkpoints and stops, with a small real engine -----------------------------------------


@pytest.fixture
def tiny(generator_folder, verifier_folder):
    return (
        *("--model", generator_folder, "--verifier", verifier_folder, "--dtype", "float64"),
        *("--n", 8, "--delimiter", "e", "--max-step-tokens", 12, "--max-tokens", 40),
        *("--max-rounds", 5, "--temperature", 1, "--kv-memory", "64MiB"),
    )


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "--search varying --max-step-tokens 20",
        "--search dynamic --score-temperature 0.5 --filter-duplicates",
    ],
)
def test_a_resumed_search_needs_no_option_again(cli, tiny, tmp_path, extra):
    file, words = tmp_path / "search.json", (*tiny, *extra.split())
    whole = cli("solve", "6*7?", *words, "--json").json
    cli("solve", "6*7?", *words, "--checkpoint", file, "--token-budget", 20)
    found = cli("solve", "--resume", file, "--kv-memory", "64MiB", "--json").json
    assert found["tree_hash"] == whole["tree_hash"]
    assert (found["rounds"], found["answer"]) == (whole["rounds"], whole["answer"])
    again = cli("solve", *words, "--resume", file, "--json").json  # nor do they harm
    assert again["tree_hash"] == whole["tree_hash"]


def test_another_option_is_found_before_the_models_are_loaded(cli, tiny, tmp_path, fake_after):
    file = tmp_path / "search.json"
    cli("solve", "6*7?", *tiny, "--checkpoint", file, "--token-budget", 1)
    fake = fake_after()
    for words, said in (
        ("--seed 4", "--seed 0, not 4; use the saved value"),
        ("--search varying", "--search 'beam', not 'varying'"),
        ("--dtype auto", "--dtype 'float64', not 'float32'"),
    ):
        outcome = cli("solve", "--resume", file, *words.split())
        assert (outcome.code, outcome.out) == (2, "")
        assert f"{file}: was saved with {said}" in outcome.complaint
    assert fake.settings is None


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_prints_the_best_so_far_and_keeps_the_checkpoint(
    cli, tiny, tmp_path, monkeypatch, as_json
):
    """Interrupted in the decoding of the last round but one."""
    file, rounds, real = tmp_path / "search.json", [0], RunningBatch.iterate
    whole = cli("solve", "6*7?", *tiny, "--json").json
    assert whole["rounds"] >= 4

    def iterate(self):
        rounds[0] += not self.running  # the batch is empty where a round begins
        if rounds[0] == whole["rounds"]:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(RunningBatch, "iterate", iterate)
    words = ("--json",) if as_json else ()
    outcome = cli("solve", "6*7?", *tiny, "--checkpoint", file, *words)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "beamwright: interrupted"
    if as_json:
        assert outcome.json["reason_fewer"] == "interrupted"
        assert 0 < len(outcome.json["candidates"]) < 8
        assert outcome.json["text"] or outcome.json["candidates"][0]["tokens"]
    else:
        assert "rounds |" in outcome.err
    monkeypatch.undo()
    again = cli("solve", *tiny, "--resume", file, "--json").json
    assert again["tree_hash"] == whole["tree_hash"]
