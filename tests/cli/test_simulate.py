import json

import pytest

from beamwright.tree import NodeState, StopReason

SMALL = ["simulate", "--model", "opt-6.7b", "--n", "8", "--width", "2", "--generate", "128"]
TIGHT = [*SMALL, "--kv-memory", "600MiB"]
ROW = {
    "time_s",
    "decode_s",
    "stall_s",
    "io_share",
    "h2d_bytes",
    "d2h_bytes",
    "groups",
    "dm_lower_bound_bytes",
    "speedup_over_layerwise",
}
NAMES = {"in-gpu", "layerwise", "layerwise-shared", "locality-dense", "locality"}


@pytest.fixture
def recorded(tmp_path):
    def node(lineage, tokens, state, stop=StopReason.DELIMITER):
        return {"lineage": lineage, "tokens": tokens, "stop": stop, "state": state, "score": 0.5}

    nodes = [
        node([0], 20, NodeState.KEPT),
        node([0, 0], 30, NodeState.FINISHED, StopReason.EOS),
        node([0, 1], 7, NodeState.FINISHED, StopReason.EOS),
        node([1], 40, NodeState.PRUNED),
    ]
    tree = {"version": 1, "problem_id": 0, "prompt_tokens": 50, "rounds": 2, "nodes": nodes}
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tree))
    return file


def test_the_whole_report(cli):
    report = cli(*TIGHT, "--json").json
    assert (report["model"], report["gpu"]) == ("opt-6.7b", "rtx-4090")
    assert (report["n"], report["width"], report["prompt"]) == (8, 2, 128)
    assert (report["generate"], report["step_tokens"], report["seed"]) == (128, 32, 0)
    assert set(report["schedules"]) == NAMES
    assert report["ablation"] is None
    for name, row in report["schedules"].items():
        if name != "in-gpu":
            assert set(row) >= ROW
    assert report["schedules"]["layerwise"]["speedup_over_layerwise"] == 1
    assert report["schedules"]["locality"]["speedup_over_layerwise"] > 1


def test_what_does_not_fit_is_null(cli):
    schedules = cli(*SMALL, "--kv-memory", "120MiB", "--json").json["schedules"]
    assert schedules["in-gpu"] is None
    assert schedules["layerwise"]["h2d_bytes"] > 0


def test_only_what_is_asked_for(cli):
    report = cli(*TIGHT, "--schedules", "locality, in-gpu", "--json").json
    assert set(report["schedules"]) == {"locality", "in-gpu"}
    assert report["schedules"]["locality"]["speedup_over_layerwise"] is None


def test_ablation(cli):
    report = cli(*TIGHT, "--schedules", "locality,locality-dense", "--ablation", "--json").json
    parts = report["ablation"]
    assert set(parts) == {
        f"{name}:{part}"
        for name in ("locality", "locality-dense")
        for part in ("inter-token", "prefetch", "inter-beam")
    }
    for name in ("locality", "locality-dense"):
        assert parts[f"{name}:inter-beam"] == report["schedules"][name]
    inter_token, everything = (
        parts["locality-dense:inter-token"],
        parts["locality-dense:inter-beam"],
    )
    assert everything["h2d_bytes"] < inter_token["h2d_bytes"]


def test_a_slower_link(cli):
    words = [*TIGHT, "--schedules", "layerwise", "--json"]
    slow = cli(*words, "--link-bandwidth", "1GB/s").json["schedules"]["layerwise"]
    usual = cli(*words).json["schedules"]["layerwise"]
    assert slow["h2d_bytes"] == usual["h2d_bytes"]
    assert slow["stall_s"] > 5 * usual["stall_s"]


@pytest.mark.parametrize("search", ["best-of-n", "dvts"])
def test_other_searches_share_less(cli, search):
    words = [*SMALL, "--kv-memory", "4GiB", "--schedules", "in-gpu", "--json"]
    beam = cli(*words).json["schedules"]["in-gpu"]
    other = cli(*words, "--search", search).json["schedules"]["in-gpu"]
    assert other["device_peak_bytes"] > beam["device_peak_bytes"]


def test_a_recorded_tree(cli, recorded):
    words = ["simulate", "--model", "opt-6.7b", "--kv-memory", "1GiB", "--recorded-tree", recorded]
    report = cli(*words, "--json").json
    assert (report["n"], report["prompt"], report["generate"]) == (2, 50, 50)
    assert report["width"] is report["seed"] is report["step_tokens"] is None
    assert report["schedules"]["in-gpu"]["groups"] == 2


def test_a_table_for_people(cli):
    outcome = cli(*TIGHT, "--ablation")
    for name in NAMES:
        assert name in outcome.out
    assert "speedup" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedules", "fast"], "--schedules fast"),
        (["--schedules", ""], "--schedules"),
        (["--search", "mcts"], "--search mcts"),
        (["--gpu", "abacus"], "--gpu abacus"),
        (["--model", "opt-9b"], "opt-9b"),
        (["--width", "3"], "--width 3"),
        (["--generate", "4000"], "context"),
        (["--kv-memory", "20GiB"], "--kv-memory"),
        (["--recorded-tree", "/no/such/file"], "/no/such/file"),
        (["--link-bandwidth", "fast"], "fast"),
    ],
)
def test_bad_input_is_one_line(cli, words, message):
    base = ["simulate"] if words[0] == "--recorded-tree" else SMALL
    outcome = cli(*base, *words, "--json")
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "words", [["--n", "8"], ["--prompt", "8"], ["--survival", "score"], ["--step-tokens", "10"]]
)
def test_a_recorded_tree_is_what_it_is(cli, recorded, words):
    outcome = cli("simulate", "--model", "opt-6.7b", "--recorded-tree", recorded, *words)
    assert outcome.code == 2
    assert words[0] in outcome.err
