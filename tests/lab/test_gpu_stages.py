"""The stages of `gpu/check.py` at their tiny scale on a CPU: the code that runs on a card."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from beamwright.io import read_toml_beside
from beamwright_lab.gpu import (
    check,
    figures,
    graphs,
    link,
    paged,
    parity,
    peers,
    published,
    roofline,
    search,
    simulator,
    speculation,
    tables,
    trace,
    vllm_side,
)
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.llama_side import sides as llama_sides
from beamwright_lab.gpu.points import with_speedups
from beamwright_lab.gpu.report import UNMEASURED, goal_rows, render
from beamwright_lab.gpu.runner import Journal
from beamwright_lab.gpu.sides import SMOKE as SMOKE_CASE
from beamwright_lab.gpu.sides import Side

ROOT = Path(parity.__file__).parents[3]
STAGE = "figures-opt-6.7b"
CALLS = read_toml_beside(__file__)
SECONDS = 600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu_check")


@pytest.fixture
def context(folder):
    return make_context(folder)


def make_context(folder, stage="stage", **changes):
    options = {"seconds": SECONDS, "journal": Journal(folder / "results.jsonl"), **changes}
    return Context(stage=stage, device="cpu", smoke=True, **options)


def keep(folder, name, data):
    """What the runner and a stage write."""
    journal = Journal(folder / "results.jsonl")
    journal.begin(name, {"key": {"machine": "cpu", "smoke": True}}, goes_on=False)
    make_context(folder, name).finish(data)
    journal.end(name, {"status": "ok", "finished": 0.0})
    return journal.results()[name]


@pytest.fixture(scope="module")
def measured(folder):
    """Link, figures and the simulator, whose results belong together."""
    found = {"link": link.run(make_context(folder))}
    keep(folder, "link", found["link"])
    for name in (STAGE, "figures-12gb"):
        found[name] = figures.run(make_context(folder), name)
        keep(folder, name, found[name])
    found["simulator"] = simulator.run(make_context(folder))
    return found


def test_the_link_stage_measures_a_profile_that_the_simulator_takes(measured):
    data = measured["link"]
    assert "own_transfers_error" not in data
    assert [row["direction"] for row in data["own_transfers"]] == ["h2d", "d2h", "both"]
    assert data["profile"]["h2d_bandwidth"] == data["link_peaks"]["h2d"]
    assert len(data["own_small_blocks"]) == 3


def test_every_point_of_the_figures_is_measured_and_grows_one_tree(measured):
    points = measured[STAGE]["points"]
    assert [f"{point['layout']} {point['variant']}" for point in points] == CALLS["points"]
    assert measured[STAGE]["not_run"] == []
    assert all(point["whole"] and len(point["round_s"]) == 4 for point in points)
    assert len({point["tree_hash"] for point in points if point["layout"] == "tree"}) == 1
    assert [p["h2d_bytes"] > 0 for p in points] == [True, False, True, True, True, False]


def test_a_memory_number_covers_weights_and_kv_and_the_simulator_replays_the_trees(measured):
    points = measured["figures-12gb"]["points"]
    assert points
    assert all(point["device_budget_bytes"] < point["memory_bytes"] // 8 for point in points)
    rows = measured["simulator"]["points"]
    assert len(rows) == len(measured[STAGE]["points"] + points)
    assert all(row["simulated_h2d_bytes"] == row["measured_h2d_bytes"] for row in rows)
    assert all(row["groups_equal"] for row in rows)


def test_a_stage_goes_on_with_what_is_missing_and_what_stopped_it_comes_last(folder, measured):
    points = measured[STAGE]["points"]
    names = [row["name"] for row in points]
    lost = {"name": names[0], "error": "AcceleratorError: CUDA error: an illegal access"}
    failed = {"name": names[1], "error": "CapacityError: no room"}
    earlier = {"points": [lost, failed, points[2]], "underway": names[1]}
    later = figures.run(make_context(folder, earlier=earlier), STAGE)["points"]
    assert later[:2] == [lost, points[2]]
    assert [row["name"] for row in later[2:]] == [*names[3:], names[1]]
    assert not any("error" in row for row in later[2:])


@pytest.mark.nightly
def test_logits_and_trees_agree_on_a_cpu(context):
    data = parity.run(context)
    assert "error" not in data
    assert {row["attention"] for row in data["logits"]} >= {"reference", "dense", "tree"}
    assert all(row["within"] for row in data["logits"])
    assert all(row["as_first"] for row in data["trees"])


def test_decode_steps_are_set_against_a_ceiling_one_without_graphs(context):
    data = roofline.run(context)
    ways = [(row["batch"], row["graphs"], row["deterministic"]) for row in data["steps"]]
    usual = [(2, "auto", False), (1, "auto", False)]
    assert ways == [*usual, (2, "auto", True), (1, "auto", True), (2, "off", False)]
    assert all(row["share_of_ceiling"] > 0 for row in data["steps"])
    assert data["steps"][0]["bytes"] > data["steps"][1]["bytes"]
    assert {row["exact"] for row in data["steps"]} <= {True, False}
    (host,) = data["hosts"]
    assert 0 < host["device_busy_share_profiled"] < 1
    assert data["not_run"] == []


def test_steps_with_graphs_are_those_without(context):
    data = graphs.run(context)
    assert [(row["what"], row.get("equal")) for row in data["rows"]] == [
        ("graphs, one layer", True),
        ("draw kernel", None),
    ]
    assert "error" not in data


@pytest.mark.nightly
def test_searches_with_less_and_less_kv_grow_one_tree(context):
    data = search.run(context)
    assert "error" not in data, data
    assert all(row["tokens"] > 0 and row["verifier_tokens"] > 0 for row in data["rows"])
    whole, half, quarter, streamed = data["rows"][3:]
    assert [row["what"] for row in data["rows"][:3]] == ["bundled pair", "random pair", "profile"]
    assert (half["kv_share"], quarter["kv_share"]) == (0.5, 0.25)
    assert 2 * half["kv_budget_bytes"] == whole["kv_peak_bytes"]
    assert len({row["tree_hash"] for row in data["rows"][1:] if row["what"] != "profile"}) == 1
    assert whole["h2d_bytes"] == 0 < half["h2d_bytes"] < streamed["h2d_bytes"]
    assert data["rows"][2]["step"]["kernels"] == [], "no card, no graph"
    assert (context.out / "trace.json.gz").stat().st_size > 1000


@pytest.mark.nightly
def test_others_write_as_much_as_ours(context):
    data = peers.run(context)
    # On a CPU, continuous batching asks psutil for the memory.
    alike = [row for row in data["rows"] if find_spec("psutil") or "batching" not in row["side"]]
    assert all(row.get("tokens_per_s", 0) > 0 for row in alike), data
    sides = [row["side"] for row in data["rows"]]
    assert sides == [side.name for side, _ in peers.rows_of(context, SMOKE_CASE)]
    assert sides[:3] == ["beamwright", "beamwright", paged.WAYS[0].side]
    assert {row["n"] for row in data["rows"]} == set(SMOKE_CASE.counts)


@pytest.fixture
def run_peers(tmp_path, monkeypatch):
    """Runs the stage with other sides than ours, behind rows of earlier calls: context, data."""
    ours = [{"side": "beamwright", "n": n, "s": 2.0} for n in SMOKE_CASE.counts]

    def run(sides, *earlier):
        monkeypatch.setattr(peers, "OTHERS", (lambda context, case: sides,))
        data = peers.run(make_context(tmp_path, earlier={"rows": [*ours, *earlier]}))
        assert data["rows"][:2] == ours
        return data["rows"][2:]

    return run


def test_rows_of_peers_are_kept_and_those_that_failed_are_not(run_peers):
    def broken(n):
        raise ValueError("no")

    sides = [Side("dear", lambda n: {"s": 1.0 * n}, 9.0), Side("cheap", broken, 1.0, (8,))]
    rows = run_peers(sides, {"side": "dear", "n": 4, "error": "cut off"})
    assert [(row["side"], row["n"]) for row in rows] == [("cheap", 8), ("dear", 4), ("dear", 8)]
    assert rows[0]["error"] == "ValueError: no"


def test_a_side_that_stops_the_device_ends_the_call_and_is_not_asked_again(run_peers, tmp_path):
    def stops(n):
        raise RuntimeError("CUDA error: device-side assert triggered")

    sides = [Side("stops", stops, 1.0, (4,)), Side("next", lambda n: {"s": 1.0}, 2.0, (4,))]
    with pytest.raises(RuntimeError, match=r"stops, 4: .*device-side assert"):
        run_peers(sides)
    found = Journal(tmp_path / "results.jsonl").results()["stage"]["data"]["rows"]
    assert [row["side"] for row in run_peers(sides, *found)] == ["stops", "next"]


class StandInForVllm:
    """Answers as `peers/adapters/vllm_card.py` does."""

    def __init__(self, module, options, log, **how):
        self.facts = {"version": "vllm 0", "block_tokens": 16, "attention": ["FA"]}
        self.facts |= {"flash_attention": [3], "limits": []}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, op, **request):
        if op == "search":
            self.facts["limits"].append(request["blocks"])
        return {"s": 0.5, "tokens": 64, "peak_blocks": 80, "preempted": 2}


@pytest.mark.nightly
def test_vllm_gets_the_same_paths_and_both_the_same_kv(context, monkeypatch):
    monkeypatch.setattr(vllm_side, "Worker", StandInForVllm)
    data = vllm_side.run(context)
    assert data["engines"][0]["limits"] == [0] * 3 + [40] * 3 + [20] * 3
    sides = [(row["side"], row["what"], row.get("kv_share")) for row in data["rows"]]
    assert sides[:2] == [("beamwright", "4 paths", None), ("beamwright", "search", None)]
    assert sides[4:] == [
        (side, "search", x) for side in ("vllm", "beamwright") for x in (0.5, 0.25)
    ]
    assert all(row["tokens_per_s"] > 0 for row in data["rows"]), data
    less = {row["kv_share"]: row for row in data["rows"][-2:]}
    assert all(row["peak_bytes"] <= row["kv_bytes"] for row in less.values())
    assert len({row["tree_hash"] for row in data["rows"] if row["side"] == "beamwright"}) == 2
    assert "Compared with vllm 0, FA [3]" in render({"vllm": {"status": "ok", "data": data}})


NO_CARD = SimpleNamespace(on_gpu=False, device="cpu", left_s=60.0)


@pytest.fixture
def tool(monkeypatch):
    """Of a stand-in for llama.cpp's tool."""
    monkeypatch.setenv("PATH", f"{Path(__file__).with_name('tools')}:{os.environ['PATH']}")
    return llama_sides(NO_CARD, SMOKE_CASE)[0]


def test_seconds_are_the_better_of_two_runs_with_the_prompt(tool):
    assert tool.said.startswith("7.7, ")
    assert tool.measure(8) == {"s": 1.0, "tokens_per_s": 48.0, "first_s": 1.0}


def test_there_is_no_side_without_the_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert llama_sides(NO_CARD, SMOKE_CASE) == []


def test_a_step_of_a_trace_is_told_by_kernel_and_wait():
    found = trace.steps(CALLS["trace"])
    assert found["kernels"] == [
        {"kernel": "attend", "calls": 1, "us a call": 20.0, "us a step": 20.0},
        {"kernel": "MulFunctor", "calls": 1, "us a call": 8.0, "us a step": 8.0},
    ]
    assert (found["span_us"], found["busy_us"], found["between_kernels_us"]) == (30.0, 28.0, 2.0)
    assert (found["between_steps_us"], found["longer_waits_us"]) == (20.0, [8920])
    assert found["busy_in_longer_waits_us"] == [300]
    assert trace.steps([]) == {"kernels": []}


def test_every_test_for_a_card_is_there_and_first_cases_come_first():
    for name in graphs.TESTS:
        file, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / file).read_text()
    items = [SimpleNamespace(nodeid=f"f.py::test_{n}") for n in ("a[1]", "a[2]", "b", "compile_c")]
    ordered = [item.nodeid.partition("::")[2] for item in graphs.first_cases_first(items)]
    assert ordered == ["test_a[1]", "test_b", "test_a[2]"]


@pytest.mark.nightly
def test_speculation_grows_the_trees_that_are_grown_without_it(folder, context):
    data = speculation.run(context)
    assert [(row["n"], row["deterministic"]) for row in data["rows"]] == [(8, False), (8, True)]
    for row in data["rows"]:
        assert (row["exact_equal"], row["auto_equal"], row["problems"]) == (1, 1, 1)
        assert row["exact_tokens"] > 0
        assert row["off_s"] > 0
    assert "error" not in data
    goals = {r["goal"]: r["measured"] for r in goal_rows({"speculation": data})}
    assert goals["trees equal with speculation, --deterministic"] == "2 of 2"
    assert "Speculation, bundled pair" in render({"speculation": keep(folder, "speculation", data)})


# --- what is compared ------------------------------------------------------------------------


def test_speedup_counts_the_rounds_that_both_sides_have_done():
    rows = with_speedups(CALLS["speedups"])
    assert [row["speedup"] for row in rows] == [4.0, 1.0, 1.14, None, None]
    assert [row["speedup_shared"] for row in rows] == [4.0, 0.88, 1.0, None, None]


def test_goals_are_unmeasured_until_a_run_has_their_figure():
    assert {row["measured"] for row in goal_rows({})} == {UNMEASURED}
    found = {r["goal"]: r["measured"] for r in goal_rows({STAGE: {"points": CALLS["goals"]}})}
    where = "(opt-6.7b, paper, cut at 64)"
    assert found["speedup over layer-wise, shared KV, n = 64"] == f"45.45 {where}"
    assert found["time, shared KV over the link / in-GPU, n = 64"] == f"1.100 {where}"
    assert found["speedup over layer-wise, copies, n = 64"] == UNMEASURED
    assert found["speedup of scheduling alone: both with shared KV, n = 64"] == UNMEASURED


def test_a_partial_run_names_what_is_missing_and_an_emulated_link_is_labelled():
    key = {"machine": "tiny-card", "smoke": True, "link_bandwidth": "12GB/s"}
    link_result = {"status": "killed", "key": key, "data": {}}
    text = render({"link": link_result, "roofline": {"status": "not run", "data": {}}})
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert "killed" in lines["| link"]
    assert "not run" in lines["| roofline"]
    assert "tiny-card" in text
    assert "SMOKE RUN" in text
    assert "EMULATED at 12GB/s" in text


def test_a_device_or_a_card_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path), "--device", "cuda:7"])
    assert check.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("--device cuda:7: no such device; ")
    assert error.count("\n") == 1


# --- what pages say --------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Writes a call's rows on a card, as the check does; gives the figures of all calls so far."""
    monkeypatch.setattr(published, "commit_of", {"s1": "abc", "s2": None}.get)
    card = {"name": "NVIDIA A1", "driver_version": "5", "memory.total": "1000"}
    versions = {"torch": "2", "triton": "3", "transformers": "5"}
    made = []

    def write(commit, stage, **data):
        journal = Journal(tmp_path / f"{len(made)}.jsonl")
        made.append(journal)
        facts = {"key": {}, "card": card, "versions": versions, "python": "3.12"}
        for name in ("environment", stage):
            dated = {**facts, "sources": commit, "date": "2026-11-26 10:00"}
            journal.begin(name, dated, goes_on=False)
            for part, value in data.items() if name == stage else ():
                journal.part(name, part, value)
            journal.end(name, {"status": "ok", "error": None})
        return published.figures(tmp_path)

    return write


def test_calls_on_a_card_become_the_tables_of_pages(call, tmp_path):
    """The last call counts; half of the KV with another tree is not exact."""
    with pytest.raises(ValueError, match="on a card"):
        published.figures(tmp_path)
    call("s1", "roofline", **CALLS["earlier"])
    found = call("s1", "roofline", **CALLS["roofline"])
    steps = tables.steps(found)
    assert "| qwen2.5-1.5b | 64 | 3.00 | 20,000 | 0.30 | true | 4.00 |  |" in steps
    assert "commit abc" in steps
    assert tables.peers(found) == tables.NOTHING
    found = call("s2", "search", **CALLS["search"])
    searches = tables.searches(found)
    assert "commit unknown, sources s2" in searches
    half = "7B, 1.5B verifier, locality: half of it | 1.00 | 9 | 0.50 | 8 | 0.100 | false |"
    assert half in searches
    found = call("s1", "peers", **CALLS["peers"])
    assert "| 16 | other | 0.50 | 2,048 | 0.50 |\n| 64 | beamwright" in tables.peers(found)
    assert all(isinstance(shown(found), str) for shown in tables.BLOCKS.values())


def test_ours_stand_beside_vllm_s_best_call_and_what_one_side_lacks_is_left_out(call):
    found = call("s1", "vllm", **CALLS["vllm"])
    shown = tables.vllm(found)
    assert "| 64 paths | 32,768 | 16,384 | 2.00 | 0 | 7 |" in shown
    assert "50%" in shown
    assert "25%" not in shown
    said = " ".join(tables.sentence(found).split())
    assert "32,768 tokens a second; vLLM 9 generates 16,384" in said
