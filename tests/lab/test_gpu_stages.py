"""The stages of `gpu/check.py` at their tiny scale on a CPU: the code that runs on a card."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from beamwright.protocols import Direction
from beamwright_lab.gpu import (
    attention_kernels,
    check,
    figures,
    graphs,
    link,
    parity,
    roofline,
    search,
    simulator,
    speculation,
)
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.own_link import SMOKE, LinkBench
from beamwright_lab.gpu.points import (
    first_points,
    shrunk,
    with_speedups,
)
from beamwright_lab.gpu.report import UNMEASURED, goal_rows, render
from beamwright_lab.gpu.runner import Journal

ROOT = Path(parity.__file__).parents[3]
MODULE = "beamwright_lab.gpu.check"
STAGE = "figures-opt-6.7b"
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


def test_the_link_stage_moves_what_a_store_moves():
    bench = LinkBench("cpu", SMOKE)
    for directions in ((Direction.H2D,), (Direction.D2H,), tuple(Direction)):
        before = dict(bench.link.bytes_moved)
        bench.wall_s(directions, computing=False)
        wanted = SMOKE.num_blocks * SMOKE.layout.bytes_per_block
        for direction in Direction:
            moved = bench.link.bytes_moved[direction] - before.get(direction, 0)
            assert moved == (wanted if direction in directions else 0)
    blocks = bench.rows[Direction.D2H][0].blocks
    assert all(second - first > 1 for first, second in pairwise(blocks)), "they are scattered"
    bench.link.close()


def test_every_point_of_the_figures_is_measured_and_grows_one_tree(measured):
    points = measured[STAGE]["points"]
    assert [(p["layout"], p["variant"]) for p in points] == [
        ("tree", "locality"),
        ("tree", "in-gpu"),
        ("dense", "locality"),
        ("dense", "lbs"),
        ("dense", "layerwise"),
        ("tree", "layerwise"),
    ]
    assert measured[STAGE]["not_run"] == []
    assert all(point["whole"] and len(point["round_s"]) == 4 for point in points)
    assert len({point["tree_hash"] for point in points if point["layout"] == "tree"}) == 1
    assert [p["h2d_bytes"] > 0 for p in points] == [True, False, True, True, True, False]


def test_a_memory_number_covers_weights_and_kv(measured):
    points = measured["figures-12gb"]["points"]
    assert points
    assert all("error" not in point for point in points)
    assert all(point["device_budget_bytes"] < point["memory_bytes"] // 8 for point in points)


def test_the_simulator_replays_the_measured_trees_to_the_same_bytes(measured):
    rows = measured["simulator"]["points"]
    assert len(rows) == len(measured[STAGE]["points"] + measured["figures-12gb"]["points"])
    for row in rows:
        assert "error" not in row
        assert row["simulated_h2d_bytes"] == row["measured_h2d_bytes"]
        assert row["groups_equal"]


def test_a_point_that_cannot_run_has_its_error_as_its_result(context):
    point = shrunk(first_points())[0]
    broken = figures.measure(context, replace_kv(point, 1), 60.0)
    assert broken["error"].startswith("CapacityError: device KV budget exhausted")
    assert broken["name"] == point.name


def replace_kv(point, kv_bytes):
    return type(point)(**{**vars(point), "kv_bytes": kv_bytes})


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


def test_logits_and_trees_agree_on_a_cpu(context):
    data = parity.run(context)
    assert "error" not in data
    assert {row["attention"] for row in data["logits"]} >= {"reference", "dense", "tree"}
    assert all(row["within"] for row in data["logits"])
    assert all(row["as_first"] for row in data["trees"])


def test_decode_steps_are_set_against_a_ceiling_with_graphs_and_without(context):
    data = roofline.run(context)
    ways = [(row["batch"], row["graphs"]) for row in data["steps"]]
    assert ways == [(1, "auto"), (1, "off"), (2, "auto"), (2, "off")]
    assert all(row["share_of_ceiling"] > 0 for row in data["steps"])
    assert data["steps"][0]["bytes"] < data["steps"][2]["bytes"]
    assert 0 < data["host"]["device_busy_share_profiled"] < 1
    fixed = data["deterministic"]
    assert {type(fixed["exact"]), type(fixed["deterministic_exact"])} == {bool}
    cost = fixed["deterministic_step_ms"] / fixed["step_ms"] - 1
    assert fixed["cost"] == pytest.approx(cost, abs=0.01)
    assert data["host"]["graphs"] == "auto"
    assert data["host_token_by_token"]["graphs"] == "off"
    assert data["not_run"] == []


def test_steps_with_graphs_are_those_without(context):
    data = graphs.run(context)
    assert [(row["what"], row.get("equal")) for row in data["rows"]] == [
        ("graphs, one layer", True),
        ("draw kernel", None),
    ]
    assert "error" not in data


def test_searches_and_a_profile_of_one(context):
    data = search.run(context)
    assert [row["what"] for row in data["rows"]] == ["bundled pair", "random pair", "profile"]
    assert "error" not in data, data
    assert all(row["tokens"] > 0 and row["verifier_tokens"] > 0 for row in data["rows"])
    assert data["rows"][-1]["top"]
    assert (context.out / "trace.json.gz").stat().st_size > 1000


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


def test_kernels_are_timed_on_a_gpu(context):
    assert "on a GPU" in attention_kernels.run(context)["skipped"]


# --- what is compared ------------------------------------------------------------------------


def a_row(variant, layout, round_s, **changes):
    row = {"model": "opt-6.7b", "regime": "paper", "n": 64, "step": 32, "generate": 1920}
    return {**row, "variant": variant, "layout": layout, "round_s": round_s, **changes}


def test_speedup_counts_the_rounds_that_both_sides_have_done():
    rows = with_speedups(
        [
            a_row("locality", "tree", [1.0, 1.0, 1.0]),
            a_row("layerwise", "dense", [2.0, 6.0]),
            a_row("layerwise", "tree", [3.0, 4.0, 5.0]),
            a_row("locality", "tree", [1.0], regime="scaled"),
            {**a_row("lbs", "dense", []), "error": "no room"},
        ]
    )
    assert [row["speedup"] for row in rows] == [4.0, 1.0, 1.14, None, None]
    assert [row["speedup_shared"] for row in rows] == [4.0, 0.88, 1.0, None, None]


def test_goals_are_unmeasured_until_a_run_has_their_figure():
    assert {row["measured"] for row in goal_rows({})} == {UNMEASURED}
    points = [
        a_row("locality", "tree", [1.1, 1.1], whole=False, tokens=64, io_share=0.02),
        a_row("in-gpu", "tree", [1.0, 1.0, 1.0], whole=True, io_share=0.0),
        a_row("layerwise", "dense", [50.0], whole=False, tokens=32, io_share=0.9),
    ]
    found = {r["goal"]: r["measured"] for r in goal_rows({STAGE: {"points": points}})}
    where = "(opt-6.7b, paper, cut at 64)"
    assert found["speedup over layer-wise, shared KV, n = 64"] == f"45.45 {where}"
    assert found["time, shared KV over the link / in-GPU, n = 64"] == f"1.100 {where}"
    assert found["speedup over layer-wise, copies, n = 64"] == UNMEASURED
    assert found["speedup of scheduling alone: both with shared KV, n = 64"] == UNMEASURED


def test_the_report_shows_every_section(folder, measured):
    results = {name: keep(folder, name, data) for name, data in measured.items()}
    text = render(results)
    for part in ("Goals", "Ceilings and the link", "The paper's figures", "dense layerwise"):
        assert part in text


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


# --- the command -----------------------------------------------------------------------------


def test_the_command_runs_a_stage_and_leaves_few_files(tmp_path):
    command = [sys.executable, "-m", MODULE, "--smoke", "--device", "cpu", "--only", "kernels"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "| kernels | ok |" in done.stdout
    assert (tmp_path / "summary.md").read_text() == done.stdout
    found = Journal(tmp_path / "results.jsonl").results()
    assert found["kernels"]["status"] == "ok"
    assert found["environment"]["versions"]["torch"]
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"results.jsonl", "summary.md", "log.txt", "triton_cache.tar"}


def test_a_device_or_a_card_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    for options, line in ((["--device", "cuda:7"], "--device cuda:7: no such device; "),):
        monkeypatch.setattr(sys, "argv", [MODULE, "--out", str(tmp_path), *options])
        assert check.main() == 2
        error = capsys.readouterr().err
        assert error.startswith(line)
        assert error.count("\n") == 1
