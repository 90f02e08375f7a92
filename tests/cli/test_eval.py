import json

import pytest

from beamwright.errors import CapacityError


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "set.jsonl"
    golds = ["42", "41", "42"]
    path.write_text("".join(json.dumps({"problem": "p", "answer": x}) + "\n" for x in golds))
    return path


def test_out_resumes_and_a_complete_folder_needs_no_model(cli, fake, dataset, tmp_path):
    out = tmp_path / "out"
    assert cli("eval", dataset, "--out", out, "--limit", "1", "--json").json["problems"] == 1
    first = cli("eval", dataset, "--out", out, "--json").json
    assert len(fake.calls) == 3
    assert {file.stat().st_mode & 0o077 for file in out.iterdir()} == {0}, "its user's alone"
    fake.error = RuntimeError("no model")
    relative = dataset.parent / "." / dataset.name
    assert cli("eval", relative, "--out", out, "--json").json == first


def test_progress_in_a_terminal(cli, fake, dataset, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "accuracy 66.7%" in cli("eval", dataset).err


# --- several settings ------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("base: {search: {width: 2}}\ngrid: {search: [beam, dvts], n: [4, 8]}\n")
    return path


def test_several_settings_have_a_folder_each_and_resume(cli, fake, dataset, recipe, tmp_path):
    out = tmp_path / "out"
    first = cli("eval", dataset, "--recipe", recipe, "--out", out, "--json").json
    names = ["beam-n4", "beam-n8", "dvts-n4", "dvts-n8"]
    assert first["dataset"] == str(dataset)
    assert [each["name"] for each in first["runs"]] == names
    for each in first["runs"]:
        assert (each["problems"], each["correct"], each["accuracy"]) == (3, 2, 2 / 3)
        assert len((out / each["name"] / "results.jsonl").read_text().splitlines()) == 3
    assert first["runs"][3]["settings"]["search"]["n"] == 8
    assert len(fake.calls) == 12
    fake.error = RuntimeError("no model")
    assert cli("eval", dataset, "--recipe", recipe, "--out", out, "--json").json == first


def test_a_setting_that_fails_does_not_stop_the_others(
    cli, fake, dataset, recipe, tmp_path, monkeypatch
):
    def make_solver(settings, timeline=None, progress=None):
        if settings.search.n == 8:
            raise CapacityError("a step", 2, 1, 1)
        return fake

    monkeypatch.setattr("beamwright.solver.solver.Solver", make_solver)
    outcome = cli("eval", dataset, "--recipe", recipe, "--out", tmp_path / "out", "--json")
    assert outcome.code == 1
    runs = {each["name"]: each for each in outcome.json["runs"]}
    assert [name for name, each in runs.items() if "error" in each] == ["beam-n8", "dvts-n8"]
    assert runs["dvts-n4"]["accuracy"] == 2 / 3
    assert "setting beam-n8: " in outcome.err


# --- pages of trees --------------------------------------------------------------------------


def test_real_searches_leave_trees_and_a_report(cli, generator_folder, dataset, tmp_path):
    recipe, out = tmp_path / "real.yaml", tmp_path / "out"
    recipe.write_text("grid: {search: [beam, best-of-n], n: [2, 4]}\n")
    given = ("--model", generator_folder, "--recipe", recipe, "--out", out, "--trees", "2")
    small = "--verifier logprob --width 2 --step-tokens 5 --max-tokens 10 --kv-memory 64MiB"
    report = cli("eval", dataset, *given, *small.split(), "--json").json
    assert all(each["per_problem"]["tokens"]["value"] > 0 for each in report["runs"])
    assert all(each["per_problem"]["kv_device_peak_bytes"] for each in report["runs"])
    for name in ("beam-n2", "best-of-n-n4"):
        files = sorted((out / name / "trees").iterdir())
        assert [file.name for file in files] == ["0000.html", "0001.html"]
        assert "<canvas" in files[0].read_text()
    assert cli("report", out, "--no-png").code == 0
    assert 'href="beam-n2/trees/0001.html"' in (out / "report.html").read_text()


def test_a_right_answer_under_an_unknown_name_is_found_out_before_the_first_problem(
    cli, fake, tmp_path
):
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({"problem": "p", "target": "42"}) + "\n")
    outcome = cli("eval", file)
    assert outcome.code == 2
    assert "fields are problem, target); name its field with --answer-field" in outcome.complaint
    assert not fake.calls
    assert cli("eval", file, "--answer-field", "target", "--json").json["accuracy"] == 1.0
    unjudged = cli("eval", file, "--answer-field", "none")
    assert "not judged: the problems have no right answers" in unjudged.out


def test_ctrl_c_says_what_was_found_and_how_to_go_on(cli, fake, dataset, tmp_path):
    real = fake.solve_many

    def interrupted(problems, *, in_flight):
        for number, found in enumerate(real(problems, in_flight=in_flight)):
            if number == 2:
                raise KeyboardInterrupt
            yield found

    fake.solve_many = interrupted
    words = ("eval", dataset, "--in-flight", "1")
    outcome = cli(*words, "--out", tmp_path / "out")
    assert outcome.code == 130
    assert "2 of 3 problems finished, accuracy so far 50.0% (95 %: 9.5% to 90.5%)" in outcome.err
    assert "Run the same command again to resume" in outcome.err
    assert "They are lost; --out DIR keeps results" in cli(*words).err


def test_warnings_reach_the_summary(cli, fake, dataset):
    fake.solution["warnings"] = ["7 of 9 steps got no [score]"]
    report = cli("eval", dataset, "--json").json
    assert report["warnings"] == {"problems": 3, "example": "7 of 9 steps got no [score]"}
    table = " ".join(cli("eval", dataset).out.replace("│", " ").split())
    assert "3 of 3, such as: 7 of 9 steps got no [score]" in table


# --- advice ------------------------------------------------------------------------------------


def test_advice_is_about_samples_and_a_search(cli, fake, dataset, tmp_path):
    words = ("eval", dataset, "--advise", "--n", "4", "--out", tmp_path / "out")
    said = cli(*words, "--json").json
    assert {"dataset", "problems", "one", "noise", "tokens", "seconds", "say"} <= set(said)
    assert set(said["tokens"]["ways"]) == {"vote", "weighted vote", "best of n", "beam"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"samples", "search"}
    fake.error = RuntimeError("no model")
    assert cli(*words, "--json").json == said
    assert said["say"].split()[0] in cli(*words).out


def test_advice_is_about_one_setting(cli, fake, dataset, recipe):
    assert "one setting" in cli("eval", dataset, "--advise", "--recipe", recipe).complaint
