"""The frontier's rows on a small search: what must hold of them whatever the rules cost."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from argparse import Namespace

import pytest

from beamwright_lab.tiers import frontier


@pytest.fixture(scope="module")
def rows():
    args = Namespace(
        n=[16], width=2, steps=[32], generate=96, spread=0.5, recorded_tree=None, shapes=["GQA"],
        percent=[100, 50, 5], gpu="rtx-4090", set=[],
    )  # fmt: skip
    found = list(frontier.searches(args))
    return [row for search in found for row in frontier.rows_of(search, args)]


def test_each_line_has_every_system(rows):
    lines = frontier.lines_of(rows)
    assert len(lines) == 2 * 3
    assert len(rows) == len(lines) * 9
    assert {row["system"] for row in rows} == {
        "Beamwright", "continuous", "vllm", "vllm-offload", "sglang", "sglang-hicache",
        "sglang-write-back", "Belady", "STEP",
    }  # fmt: skip


def test_all_the_kv_costs_nothing(rows):
    for row in rows:
        if row["system"] == "Beamwright" and row["percent"] == 100:
            assert row["over_all_fits"] == 1
            assert row["h2d_bytes"] == row["d2h_bytes"] == row["recomputed_tokens"] == 0


def test_this_engine_computes_nothing_again_and_keeps_above_the_bounds(rows):
    ours = [r for r in rows if r["system"] in {"Beamwright", "continuous"} and "time_s" in r]
    assert any(row["percent"] == 50 for row in ours)
    for row in ours:
        assert row["recomputed_tokens"] == 0
        assert row["h2d_bytes"] >= row["load_bound_bytes"]
        assert row["d2h_bytes"] >= row["store_bound_bytes"]
        assert row["time_s"] >= row["link_floor_s"]


def test_the_figure_has_a_panel_per_search(rows, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "frontier.svg"
    assert frontier.draw(rows, file)
    texts = {each.text for each in ET.parse(file).iter() if each.tag.endswith("}text")}
    assert {"GQA, n = 16, 32", "GQA, n = 16, about 32"} <= texts
