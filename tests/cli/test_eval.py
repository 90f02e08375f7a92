import json

import pytest

CONTRACT = {
    "dataset",
    "problems",
    "correct",
    "accuracy",
    "mean_rounds",
    "tokens",
    "time",
    "goodput_tok_s",
    "settings",
}


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "set.jsonl"
    golds = ["42", "41", "42"]
    path.write_text("".join(json.dumps({"problem": "p", "answer": x}) + "\n" for x in golds))
    return path


def test_json_holds_the_contract(cli, fake, dataset):
    report = cli("eval", dataset, "--json", "--n", "8").json
    assert set(report) >= CONTRACT
    assert (report["dataset"], report["problems"]) == (str(dataset), 3)
    assert (report["correct"], report["accuracy"]) == (2, 2 / 3)
    assert report["settings"]["search"]["n"] == 8


def test_a_table_without_json(cli, fake, dataset):
    outcome = cli("eval", dataset, "--limit", "2")
    assert outcome.code == 0
    assert "50.0%" in outcome.out
    assert "chosen by majority" in outcome.out


def test_out_resumes_and_a_complete_folder_needs_no_model(cli, fake, dataset, tmp_path):
    out = tmp_path / "out"
    assert cli("eval", dataset, "--out", out, "--limit", "1", "--json").json["problems"] == 1
    first = cli("eval", dataset, "--out", out, "--json").json
    assert len(fake.calls) == 3
    fake.error = RuntimeError("no model")
    assert cli("eval", dataset, "--out", out, "--json").json == first


def test_other_settings_in_the_same_folder(cli, fake, dataset, tmp_path):
    out = tmp_path / "out"
    assert cli("eval", dataset, "--out", out).code == 0
    outcome = cli("eval", dataset, "--out", out, "--seed", "1")
    assert outcome.code == 2
    assert "settings.search.seed was 0, is 1" in outcome.complaint


@pytest.mark.parametrize("words", [("--limit", "0"), ("--in-flight", "0")])
def test_bad_numbers(cli, fake, dataset, words):
    outcome = cli("eval", dataset, *words)
    assert outcome.code == 2
    assert words[0] in outcome.complaint


def test_a_bad_line_is_named(cli, fake, dataset):
    dataset.write_text('{"problem": "p"}\n{oops\n')
    outcome = cli("eval", dataset)
    assert outcome.code == 2
    assert "set.jsonl, line 2: not JSON" in outcome.complaint


def test_progress_in_a_terminal(cli, fake, dataset, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "accuracy 66.7%" in cli("eval", dataset).err
