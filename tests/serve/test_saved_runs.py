"""Saved runs of every kind become the page's events."""

import json

import pytest
from pydantic import TypeAdapter

from beamwright.engine.timeline import NullTimeline
from beamwright.errors import InputError
from beamwright.evaluate.tree_page import ShownTree, write_tree_page
from beamwright.saved.recorded import write_recorded
from beamwright.serve.events import Event, begin, end
from beamwright.serve.saved_runs import read_runs, with_unique_ids


@pytest.fixture
def page(tmp_path, searched):
    path = tmp_path / "trees" / "0007.html"
    path.parent.mkdir()
    write_tree_page([ShownTree(*searched)], NullTimeline(), path, "A search")
    return path


def steps(run):
    found = {step["lineage"]: step for event in run for step in event.get("nodes", ())}
    TypeAdapter(list[Event]).validate_python(run)
    assert [event["event"] for event in run] == ["begin", "round", "round", "end"]
    return found


def test_a_tree_page(page, searched):
    (run,) = read_runs(page)
    found = steps(run)
    assert list(found) == ["", "0", "1", "2", "0.0", "0.1", "0.2"]
    assert (run[0]["id"], run[0]["problem"]) == ("0007", "What is 1+1?")
    assert (found["0.0"]["text"], found["0.0"]["vote"]) == ("The answer is 2.", "2")
    assert (run[-1]["state"], run[-1]["chosen"], run[-1]["answer"]) == ("saved", "0.0", "2")


def test_the_trees_of_an_evaluation(page, tmp_path):
    assert [run[0]["id"] for run in read_runs(tmp_path)] == ["0007"]


def test_a_recorded_tree_has_no_text(tmp_path, searched):
    write_recorded(searched[0], tmp_path / "tree.json")
    (run,) = read_runs(tmp_path / "tree.json")
    found = steps(run)
    assert found["0.0"]["text"] is None
    assert found["0.0"]["tokens"] == 3
    assert run[-2]["tokens"] == 8


def test_a_checkpoint(tmp_path, make_solver):
    with make_solver(n=4, width=2, max_rounds=3, seed=5) as solver:
        solution = solver.solve("1+1", checkpoint=tmp_path / "saved.json")
        again = solver.resume(tmp_path / "saved.json")
    assert again.tree_hash == solution.tree_hash
    (run,) = read_runs(tmp_path / "saved.json")
    assert (run[0]["problem"], run[0]["n"], run[0]["seed"]) == ("1+1", 4, 5)
    chosen = ".".join(map(str, solution.lineage[1:]))
    assert (run[-1]["chosen"], run[-1]["answer"]) == (chosen, solution.answer)
    assert run[-1]["reason_fewer"] == solution.reason_fewer
    saved = {step["lineage"]: step for event in run for step in event.get("nodes", ())}
    for node in solution.tree.nodes():
        assert saved[".".join(map(str, node.lineage[1:]))]["text"] == node.step_text


def exported(*events, version=1):
    return json.dumps({"format": "beamwright run", "version": version, "events": list(events)})


ABOUT = dict.fromkeys(("model", "method", "n", "width", "seed"))


def test_what_the_page_exported_while_it_grew_has_an_end(tmp_path):
    first = begin("a", {"problem": "p", **ABOUT})
    (tmp_path / "run.json").write_text(exported(first))
    (run,) = read_runs(tmp_path / "run.json")
    assert run == [first, end("saved")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "neither"),
        ("[1]", "neither"),
        ('{"version": 1}', "neither"),
        ("[" * 10_000, "neither"),
        ('<script type="application/json" id="data">{}</script>', "damaged"),
        (
            '<script type="application/json" id="data">{"trees": [{"nodes": []}]}</script>',
            "damaged",
        ),
        (exported(version=2), "version 2"),
        (exported(), "beginning"),
        (exported(end("saved")), "beginning"),
        (exported({"event": "begin", "id": 5}), "damaged run"),
        ('{"prompt_tokens": 3}', "not a recorded tree"),
        ('{"format": "beamwright checkpoint"}', "version"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, content, why):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match=why) as refused:
        read_runs(tmp_path / "run.json")
    assert "run.json" in str(refused.value)


def test_a_folder_without_trees_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="holds no trees"):
        read_runs(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_runs(tmp_path / "none.json")


def test_ids_are_told_apart_and_stand_in_an_address():
    def run(name):
        return [begin(name, {"problem": "p", **ABOUT}), end("saved")]

    runs = with_unique_ids([run("a"), run("a"), run("a-2"), run("../b c/d"), run("..")])
    assert [each[0]["id"] for each in runs] == ["a", "a-2", "a-2-2", "-b-c-d", "run"]


def test_a_checkpoint_of_a_search_that_was_stopped_has_no_answer(tmp_path, make_solver):
    def stop(report):
        if report.round == 2:
            raise ZeroDivisionError

    file = tmp_path / "saved.json"
    with make_solver(n=4, width=2, max_rounds=3, seed=5) as solver:
        with pytest.raises(ZeroDivisionError):
            solver.solve("1+1", checkpoint=file, on_round=stop)
        (run,) = read_runs(file)
        assert (run[-1]["chosen"], run[-1]["answer"]) == (None, None)
