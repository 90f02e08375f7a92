import json

import pytest

from declared import restored

SMALL = ["simulate", "--model", "opt-6.7b", "--n", "8", "--width", "2", "--generate", "128"]
TIGHT = [*SMALL, "--kv-memory", "600MiB"]
NAMES = {
    f"{name}/{layout}"
    for name in ("in-gpu", "layerwise", "locality")
    for layout in ("dense", "tree")
}


@pytest.fixture
def recorded(tmp_path):
    ends = {"stop": "delimiter", "score": 0.5}
    nodes = [
        {"lineage": [0], "tokens": 20, "state": "kept", **ends},
        {"lineage": [0, 0], "tokens": 30, "state": "finished", **ends},
        {"lineage": [0, 1], "tokens": 7, "state": "finished", **ends},
        {"lineage": [1], "tokens": 40, "state": "pruned", **ends},
    ]
    tree = {"version": 1, "problem_id": 0, "prompt_tokens": 50, "rounds": 2, "nodes": nodes}
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tree))
    return file


def test_a_recorded_tree(cli, recorded):
    words = ["simulate", "--model", "opt-6.7b", "--kv-memory", "1GiB", "--recorded-tree", recorded]
    report = cli(*words, "--json").json
    assert (report["n"], report["prompt"], report["generate"]) == (2, 50, 50)
    assert report["width"] is report["seed"] is report["step_tokens"] is None
    assert report["schedules"]["in-gpu/tree"]["groups"] == 2
    outcome = cli(*words, "--n", "8")
    assert (outcome.code, "--n: only for made-up searches" in outcome.err) == (2, True)


def test_a_table_for_people(cli):
    outcome = cli(*TIGHT, "--ablation")
    for name in NAMES:
        assert name.replace("/", ", ") in outcome.out
    assert "over dense" in outcome.out
    assert "data sheet, not measured" in " ".join(outcome.out.split())
    assert max(map(len, outcome.out.splitlines())) <= 80


# --- engines ---------------------------------------------------------------------------------

FAIR = ["vllm", "vllm-offload", "sglang", "sglang-hicache", "sglang-write-back"]


def test_engines_that_exist_stand_beside_all_schedules(cli):
    report = cli(*TIGHT, "--json").json
    assert list(report["engines"]) == FAIR
    assert report["engines_left_out"] is None


def test_engines_know_no_verifier(cli):
    words = [*SMALL, "--memory", "16GiB", "--verifier", "qwen2.5-0.5b"]
    assert cli(*words, "--json").json["engines"] is None
    assert "no engines were simulated: they support no verifier" in cli(*words).out
    outcome = cli(*words, "--engines", "vllm")
    assert (outcome.code, "--engines vllm" in outcome.err) == (2, True)


# --- plan and simulate -----------------------------------------------------------------------

PAIRS = [["--model", "opt-6.7b"], ["--model", "qwen2.5-1.5b", "--verifier", "skywork-prm-1.5b"]]


@pytest.mark.parametrize("pair", PAIRS, ids=["alone", "scored"])
def test_plan_and_simulate_agree_on_what_fits(cli, pair):
    """Whatever the budget: what plan calls fitting fits, and what it refuses does not."""
    words = [*pair, "--n", 16, "--width", 4, "--step-tokens", 40, "--generate", 120]
    words += ["--gpu", "h100", "--json"]
    needed = cli("plan", *words).json["memory"]
    both = needed["generator_kv_bytes"] + (needed["verifier_kv_bytes"] or 0)
    seen = set()
    for share in (0.03, 0.1, 0.3, 1.0, 12.0):
        budget = ["--kv-memory", f"{round(share * both)}B"]
        planned = cli("plan", *words, *budget).json["schedules"]
        simulated = cli("simulate", *words, *budget, "--seed", "3").json["schedules"]
        assert set(planned) < set(simulated) == NAMES
        for name, plan in planned.items():
            if not plan["borderline"]:
                assert plan["fits"] == (simulated[name] is not None), (name, share)
            seen.add(plan["fits"])
    assert seen == {True, False}


# --- options of schedules --------------------------------------------------------------------


def test_a_plugin_s_schedule_takes_its_own_options(cli, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from beamwright.protocols import Plan\n"
        "from beamwright.registry import option\n"
        "from beamwright.schedule import Schedule, schedule\n"
        '@schedule("so-many", meaning="so many beams together")\n'
        "class SoMany(Schedule):\n"
        '    so_many: int = option(1, ge=1, help="Beams of a group.")\n'
        "    def plan(self, view):\n"
        "        starts = range(0, len(view.beams), self.so_many)\n"
        "        return Plan(tuple(view.beams[i : i + self.so_many] for i in starts))\n"
    )
    words = [*TIGHT, "--plugin", file, "--schedules", "so-many/tree", "--batching", "grouped"]
    with restored():
        two, four = (cli(*words, "--so-many", count, "--json").json for count in (2, 4))
        too_few = cli(*words, "--so-many", 0)
        unused = cli(*TIGHT, "--plugin", file, "--so-many", 2)
    assert two["schedule_options"] == {"so_many": 2}
    groups = [report["schedules"]["so-many/tree"]["groups"] for report in (two, four)]
    assert groups[0] == 2 * groups[1]
    assert (unused.code, "It belongs to so-many" in unused.complaint) == (2, True)
    assert (too_few.code, "so-many" in too_few.complaint) == (2, True)


# --- what it shows meanwhile -----------------------------------------------------------------


def test_the_bar_is_for_terminals_and_on_standard_error(cli, monkeypatch):
    words = [*TIGHT, "--schedules", "in-gpu/tree", "--json"]
    silent = cli(*words)
    assert silent.err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = cli(*words)
    assert "in-gpu/tree" in shown.err
    assert shown.json == silent.json


def test_the_command_leaves_out_what_knows_no_states(cli):
    asked = ["simulate", "--model", "qwen3.5-9b", "--weights=int4", "--n=16", "--generate=64"]
    asked += ["--gpu", "rtx-3060", "--kv-memory", "600MiB"]
    report = cli(*asked, "--json").json
    assert [*report["schedules"]] == ["in-gpu/tree", "locality/tree"]
    assert report["schedules"]["in-gpu/tree"] is None
    assert report["schedules"]["locality/tree"]["h2d_state_bytes"] > 0
    assert report["state_bytes"] == 49.5 * 2**20
    for more in (["--schedules", "layerwise"], ["--engines", "vllm"], ["--ablation"]):
        outcome = cli(*asked, *more)
        assert outcome.code == 2
        assert "recurrent layers" in outcome.complaint
