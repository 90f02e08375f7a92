"""`report` over folders that `eval` wrote."""

import json
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def folder(cli, fake, tmp_path):
    """Four evaluated settings, one folder each."""
    dataset = tmp_path / "set.jsonl"
    lines = [{"problem": "p", "answer": x, "level": i} for i, x in enumerate(("42", "41", "42"))]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("grid: {search: [beam, dvts], n: [4, 16]}")
    out = tmp_path / "out"
    assert cli("eval", dataset, "--recipe", recipe, "--out", out).code == 0
    return out


def test_a_page_and_its_pngs(cli, folder):
    names = ["report.html", *(f"report-{x}.png" for x in ("n", "tokens", "seconds", "kv"))]
    assert cli("report", folder).out.split() == [str(folder / name) for name in names]
    assert all((folder / name).stat().st_size for name in names)


def test_json_holds_every_run(cli, folder):
    made = cli("report", folder, "--no-png", "--json").json
    assert made["png"] == []
    assert [each["name"] for each in made["runs"]] == ["beam-n16", "beam-n4", "dvts-n16", "dvts-n4"]
    assert made["runs"][0]["accuracy"] == 2 / 3
    assert made["runs"][0]["pass_at"]["1"]["value"] == pytest.approx(2 / 3 / 16)


def test_a_page_elsewhere_of_several_folders(cli, folder, tmp_path):
    page = tmp_path / "pages" / "all.html"
    page.parent.mkdir()
    (folder / "dvts-n4" / "trees").mkdir()
    (folder / "dvts-n4" / "trees" / "0000.html").write_text("a tree")
    words = ("report", folder / "beam-n4", folder / "dvts-n4", "--out", page, "--title", "Both")
    assert cli(*words, "--no-png").code == 0
    text = page.read_text()
    assert "<title>Both</title>" in text
    assert 'href="../out/dvts-n4/trees/0000.html"' in text


def test_without_matplotlib_the_page_is_made_and_one_line_says_so(cli, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = cli("report", folder)
    assert outcome.code == 0
    assert "pip install 'beamwright[plot]'" in outcome.complaint
    assert "pip install" in (folder / "report.html").read_text()


def test_an_unfinished_run_is_reported_as_far_as_it_is(cli, folder):
    results = folder / "beam-n4" / "results.jsonl"
    torn = results.read_bytes()[:-10]
    results.write_bytes(torn)
    made = cli("report", folder, "--no-png", "--json").json
    problems = {each["name"]: each["problems"] for each in made["runs"]}
    assert problems == {"beam-n16": 3, "beam-n4": 2, "dvts-n16": 3, "dvts-n4": 3}
    assert results.read_bytes() == torn
    assert "are unfinished" in (folder / "report.html").read_text()


def test_folders_without_results(cli, fake, tmp_path):
    outcome = cli("report", tmp_path)
    assert outcome.code == 2
    assert "holds no results" in outcome.complaint


def test_tampered_results_are_named(cli, folder):
    results = folder / "beam-n4" / "results.jsonl"
    first, *rest = results.read_text().splitlines(keepends=True)
    changes = Path(__file__).with_name("wrong_records.jsonl").read_text().splitlines()
    lines = [json.dumps({**json.loads(first), **json.loads(each)}) for each in changes]
    for line in [*lines, "{}", "[" * 100_000]:
        results.write_text(f"{line}\n" + "".join(rest))
        outcome = cli("report", folder)
        assert outcome.code == 2, line[:200]
        assert "results.jsonl, line 1: " in outcome.complaint
        assert not (folder / "report.html").exists()


def test_tampered_settings_are_named(cli, folder):
    file = folder / "beam-n4" / "settings.json"
    content = json.loads(file.read_text())
    searches = [{"n": number} for number in (10**9, 0, True, 4.0)]
    texts = ["{oops", "[]", '{"dataset": "x", "settings": {"search": {}}}']
    for search in searches:
        settings = content["settings"]
        changed = {**settings, "search": {**settings["search"], **search}}
        texts.append(json.dumps({**content, "settings": changed}))
    for text in texts:
        file.write_text(text)
        outcome = cli("report", folder)
        assert outcome.code == 2, text
        assert "settings.json: not the settings of a run" in outcome.complaint


def test_settings_that_are_missing_or_a_pipe(cli, folder):
    file = folder / "beam-n4" / "settings.json"
    file.unlink()
    assert "settings.json: cannot be read" in cli("report", folder).complaint
    os.mkfifo(file)
    outcome = cli("report", folder)
    assert outcome.code == 2
    assert "settings.json: cannot be read (not a regular file)" in outcome.complaint
