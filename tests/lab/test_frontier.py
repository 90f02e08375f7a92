"""The frontier's rows on a small search: what must hold of them whatever the rules cost."""

from __future__ import annotations

from argparse import Namespace

import pytest

from beamwright_lab import tables
from beamwright_lab.claims import lbs
from beamwright_lab.tiers import frontier
from beamwright_lab.tiers.searches import LEVERS, searches

ARGS = Namespace(
    n=[16], width=2, steps=[32], about=[32], spread=0.5, recorded=False, generate=96,
    shapes=["GQA"], percent=[100, 50, 25, 10], gpu="rtx-4090", set=[],
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return [row for search in searches(ARGS) for row in frontier.rows_of(search, ARGS)]


@pytest.fixture(scope="module")
def found(rows):
    inputs = {"drafts": {"accepted": 0.5}, "rivals_drafts": {"accepted": 0.3}}
    return {**frontier.summarise(rows), **inputs}


def test_every_way_to_batch_and_every_lever_has_its_row(rows):
    cell = [row for row in rows if row["search"].endswith("about 32") and row["percent"] == 50]
    own = {row["system"] for row in cell if not row["lever"]} - set(frontier.FAIR)
    assert own == {"Beamwright", *frontier.BATCHINGS} - {"auto"}
    assert {row["lever"] for row in cell if row["system"] == "Beamwright"} == set(LEVERS)
    assert {row["lever"] for row in cell if row["system"] == "sglang-hicache"} == set(LEVERS)


def test_all_the_kv_costs_nothing(rows):
    for row in rows:
        if row["system"] == "Beamwright" and row["percent"] == 100 and not row["lever"]:
            assert row["time_s"] == row["all_fits_s"]
            assert row["h2d_bytes"] == row["recomputed_tokens"] == 0
            if "about" not in row["search"]:  # else a step may be thought longer than it gets
                assert row["d2h_bytes"] == 0


def test_this_engine_computes_nothing_again_and_keeps_above_the_bounds(rows):
    ours = [
        row for row in rows if row["system"] in {"Beamwright", *frontier.BATCHINGS}
        and not row["lever"] and "time_s" in row
    ]  # fmt: skip
    assert any(row["percent"] == 50 for row in ours)
    for row in ours:
        assert row["recomputed_tokens"] == 0
        assert row["h2d_bytes"] >= row["load_bound_bytes"]
        assert row["d2h_bytes"] >= row["store_bound_bytes"]
        assert row["time_s"] >= row["link_floor_s"]
        assert row["time_s"] >= 0.97 * row["floor_s"], "but for last tokens, see the floor"


def test_levers_spare_time_on_both_sides(rows):
    cells = {(r["search"], r["percent"], r["system"], r["lever"]): r.get("time_s") for r in rows}
    for (search, percent, system, lever), seconds in cells.items():
        if lever and seconds is not None and (plain := cells[search, percent, system, ""]):
            assert seconds < 1.02 * plain


def test_a_line_has_the_fastest_engine_in_both_readings(found):
    assert {line["percent"] for line in found["lines"]} == {100, 50, 25}
    for line in found["lines"]:
        assert line["once"] <= line["by_row"]
        assert line["once_s"] == pytest.approx(line["once"] * line["ours_s"], rel=0.05, abs=0.01)
        assert set(line["levers"]) == set(LEVERS) - {""}


def test_engines_rows_of_an_earlier_result_are_taken_over(rows):
    search = next(searches(ARGS))
    known = [{**row, "time_s": -1.0} for row in rows if row["system"] == "sglang"]
    again = frontier.rows_of(search, ARGS, [row for row in known if row["search"] == search.name])
    assert {row["time_s"] for row in again if row["system"] == "sglang"} == {-1.0}
    assert [row for row in again if row["system"] != "sglang"] == [
        row for row in rows if row["search"] == search.name and row["system"] != "sglang"
    ]


def test_pages_tables_are_made_of_what_is_quoted(found):
    assert "GQA, n = 16, about 32" in tables.frontier(found)
    assert len(tables.frontier_shares(found).splitlines()) == 2 + 3
    assert len(tables.frontier_levers(found).splitlines()) == 2 + 2 + len(LEVERS) - 1
    assert "grouped" in tables.frontier_batching(found)
    shares = {**found["shares"], "10 %": found["shares"]["25 %"]}
    assert "of our time with a quarter" in lbs._fair({"shares": shares})[0]
