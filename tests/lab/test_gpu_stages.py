"""The stages of `gpu/check.py` at their tiny scale on a CPU: the code that runs on a card."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Direction
from beamwright_lab.gpu import (
    attention_kernels,
    check,
    figures,
    graphs,
    link,
    parity,
    peers,
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
    small_card_points,
    stage_points,
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


def test_an_emulated_link_is_in_the_profile(folder, measured):
    emulated = make_context(folder, link_bandwidth=1_000_000_000)
    profile = link.profile_of(measured["link"], emulated)
    assert (profile.h2d_bandwidth, profile.link_share) == (1_000_000_000, 1.0)


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


def test_bytes_by_round_add_up_to_those_of_the_run(measured):
    layerwise = measured[STAGE]["points"][-2]
    assert sum(layerwise["round_h2d_bytes"]) == layerwise["h2d_bytes"]


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


def test_the_simulator_needs_a_measured_profile(tmp_path):
    with pytest.raises(RuntimeError, match="has measured no profile"):
        simulator.run(make_context(tmp_path))


def test_a_point_that_cannot_run_has_its_error_as_its_result(context):
    point = shrunk(first_points())[0]
    broken = figures.measure(context, replace_kv(point, 1), 60.0)
    assert broken["error"].startswith("CapacityError: device KV budget exhausted")
    assert broken["name"] == point.name


def replace_kv(point, kv_bytes):
    return type(point)(**{**vars(point), "kv_bytes": kv_bytes})


def test_points_without_time_are_left_out_and_named(folder):
    late = make_context(folder, seconds=0.0)
    data = figures.run(late, STAGE)
    assert data["points"] == []
    assert data["not_run"] == [point.name for point in shrunk(stage_points(STAGE))]


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


def test_a_lost_device_ends_the_stage_with_what_it_has(folder, monkeypatch):
    def lose(context, point, deadline_s):
        return {"name": point.name, "error": "AcceleratorError: CUDA error: an illegal access"}

    monkeypatch.setattr(figures, "measure", lose)
    context = make_context(folder, "lost")
    with pytest.raises(RuntimeError, match="CUDA error"):
        figures.run(context, STAGE)
    assert len(context.data_of("lost")["points"]) == 1


def test_a_search_that_is_cut_off_says_so(context):
    point = shrunk(first_points())[0]
    row = figures.measure(context, point, 1e-9)
    assert not row["whole"]
    assert row["tokens"] == point.step
    assert "--deadline" in row["stopped"]


def test_logits_and_trees_agree_on_a_cpu(context):
    data = parity.run(context)
    assert "error" not in data
    assert {row["attention"] for row in data["logits"]} >= {"reference", "dense", "tree"}
    assert all(row["within"] for row in data["logits"])
    assert all(row["as_first"] for row in data["trees"])


def test_a_wrong_logit_fails_the_stage(context, monkeypatch):
    wrong = [{"within": True}, {"within": False}]
    monkeypatch.setattr(parity, "logit_rows", lambda *_: wrong)
    monkeypatch.setattr(parity, "tree_rows", lambda _: [])
    assert parity.run(context)["error"] == "1 of 2 logits beyond their limit"


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


def test_each_device_test_is_a_row_and_one_that_fails_does_not_stop_the_others(tmp_path):
    """In a process of its own, as a stage is."""
    file = tmp_path / "test_device.py"
    file.write_text("def test_a(): assert not 'wrong'\ndef test_b(): pass\n")
    script = f"""
import sys
from pathlib import Path
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.graphs import run_tests
from beamwright_lab.gpu.runner import Journal
journal = Journal(Path({str(tmp_path / "results.jsonl")!r}))
context = Context("tests", "cpu", True, 60.0, journal)
context.finish(run_tests(context, ({str(file)!r},)))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = Journal(tmp_path / "results.jsonl").results()["tests"]["data"]
    outcomes = [(row["test"].partition("::")[2], row["outcome"]) for row in found["tests"]]
    assert outcomes == [("test_a", "failed"), ("test_b", "passed")]
    assert "wrong" in found["tests"][0]["error"]
    assert found["error"] == "device tests: 1 passed, 1 failed, exit code 1"
    assert all((ROOT / name).exists() for name in graphs.TESTS)


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


def test_other_trees_with_speculation_fail_the_stage_where_results_are_exact():
    row = {"n": 8, "exact": True, "exact_equal": 1, "auto_equal": 2, "problems": 2}
    wrong = "trees differ from those without speculation: n = 8, exact"
    assert speculation.what_is_wrong([row]) == wrong
    assert speculation.what_is_wrong([row | {"exact": False}, {"n": 8, "error": "no room"}]) is None


def test_peers_do_the_same_and_one_that_cannot_run_says_why(context):
    sides = {row["side"]: row for row in peers.run(context)["sides"]}
    assert set(sides) == {
        "transformers, static cache",
        "transformers, offloaded cache",
        "beamwright, in-gpu",
        "beamwright, locality",
    }
    assert "CUDA" in sides["transformers, offloaded cache"].pop("error")
    assert all(row["tokens_per_s"] > 0 for name, row in sides.items() if "offloaded" not in name)


def test_kernels_are_timed_on_a_gpu(context):
    assert "on a GPU" in attention_kernels.run(context)["skipped"]


def test_rows_are_kept_as_they_are_measured_and_one_that_fails_costs_its_own(tmp_path):
    context = replace(make_context(tmp_path), smoke=False)
    data, saved = {"rows": [], "not_run": []}, []

    def measure(number):
        saved.append(len((context.data_of("stage") or {}).get("rows", [])))
        if number == 1:
            raise RuntimeError("out of resource:\nshared memory")
        context.seconds -= SECONDS * (number == 2)
        return {"us": number}

    context.rows(data, "rows", [({"n": n}, partial(measure, n)) for n in range(4)], least_s=1.0)
    assert saved == [0, 1, 2]
    error = "RuntimeError: out of resource: shared memory"
    assert data["rows"] == [{"n": 0, "us": 0}, {"n": 1, "error": error}, {"n": 2, "us": 2}]
    assert data["not_run"] == [{"n": 3}]


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


def test_the_paper_s_points_are_there():
    points = first_points()
    assert {(p.n, p.step) for p in points if p.regime == "paper"} >= {
        *((n, 32) for n in (4, 8, 16, 32, 64, 256, 512)),
        (64, 64),
        (64, 128),
    }
    # A copy per beam of 256 beams would outgrow the host.
    assert all(str(p.layout) == "tree" for p in points if p.n > 64)
    assert {p.memory_bytes for p in small_card_points()} == {12_000_000_000}


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


# --- predictions -----------------------------------------------------------------------------


def test_predictions_need_a_card_with_that_much_memory():
    with pytest.raises(InputError, match="rtx-4090 has"):
        simulator.predictions("rtx-4090", 2**40, [])
    point = small_card_points()[0]
    with pytest.raises(InputError, match="do not fit"):
        simulator.predictions("h200", 2**30, [replace_memory(point)])


def replace_memory(point):
    return type(point)(**{**vars(point), "memory_bytes": None})


def test_a_prediction_has_the_figures_of_a_point():
    small = [
        type(p)(**{**vars(p), "n": 4, "step": 128})
        for p in first_points()[6:12]
        if p.variant != "in-gpu"
    ]
    rows = simulator.predictions("h200", 24 * 2**30, small)
    assert [(row["schedule"], row["layout"]) for row in rows] == [
        ("locality", "tree"),
        ("locality", "dense"),
        ("lbs", "dense"),
        ("layerwise", "dense"),
        ("layerwise", "tree"),
    ]
    assert rows[-2]["speedup"] == rows[-1]["speedup, shared"] == 1.0
    assert [row["paper"] for row in rows] == [None, None, "3.39-9.72", None, None]
    assert all(row["KV GiB"] == 7.0 for row in rows)


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


def test_wheels_that_are_missing_are_one_line_without_any_of_them(tmp_path):
    """Not even torch, and no site-packages at all."""
    command = [sys.executable, "-S", "-m", MODULE, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "lab")
    assert done.returncode == 2
    assert done.stderr.startswith("missing wheels: torch, numpy, pydantic, ")
    assert done.stderr.count("\n") == 1


def test_what_needs_torch_alone_runs_without_the_engine(tmp_path):
    """Where pydantic is not: the ceilings are measured, the rest says what it lacks."""
    script = f"""
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "pydantic" else real(name, *a)
sys.modules["pydantic"] = None
sys.argv = ["check", "--smoke", "--device", "cpu", "--out", {str(tmp_path)!r}]
from beamwright_lab.gpu import check
from pathlib import Path
from beamwright_lab.gpu import link
from beamwright_lab.gpu.context import Context
context = Context("link", "cpu", True, 60.0, check._journal(check.parse()))
context.finish(link.run(context))
missing = {{stage.name: stage.missing for stage in check.stages(check.parse())}}
assert missing.pop("link") == ""
assert set(missing.values()) == {{"missing wheels: pydantic"}}, missing
print(check.report(check.parse()))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    data = Journal(tmp_path / "results.jsonl").results()["link"]["data"]
    assert data["rates"]["weights_bandwidth"] > 0
    assert data["link_peaks"]["h2d"] > 0
    assert "pydantic" in data["own_transfers_error"]
    assert "link: killed" in done.stdout, "no runner has seen it end"


def test_without_a_cuda_device_the_stage_says_so(tmp_path, monkeypatch):
    command = [MODULE, "--stage", "link", "--device", "cuda:7", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--seconds", "9"])
    assert check.main() == 1
    error = Journal(tmp_path / "results.jsonl").results()["link"]["data"]["error"]
    assert error == "--device cuda:7: no CUDA device is available here"


def test_a_device_or_a_card_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    for options, line in (
        (["--device", "cuda:7"], "--device cuda:7: no such device; "),
        (["--predict", "h300"], "--gpu h300: no such profile; "),
        (["--predict", "h200", "--memory", "much"], "'much' is not a size"),
    ):
        monkeypatch.setattr(sys, "argv", [MODULE, "--out", str(tmp_path), *options])
        assert check.main() == 2
        error = capsys.readouterr().err
        assert error.startswith(line)
        assert error.count("\n") == 1
