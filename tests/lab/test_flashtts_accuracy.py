"""Figure 14's table: equal trees are counted against `off`, and R is drawn as asked for."""

from dataclasses import replace
from statistics import mean, stdev

import pytest

from beamwright.engine import tree_run
from beamwright.evaluate import load_problems
from beamwright.tree import SearchTree, unborn
from beamwright_lab.flashtts.accuracy import Setting, changed_trees, rows_of, solve

SETTINGS = [Setting("off"), Setting("exact"), Setting("truncate", 0.85)]


@pytest.fixture(scope="module")
def found():
    problems = load_problems("bundled:test", 2).problems
    options = {"search": "beam", "n": 4, "width": 2}
    return solve(SETTINGS, problems, options)


def test_exact_gives_the_trees_and_answers_of_off_and_truncate_does_not(found):
    off, exact, truncate = rows_of(found, 4)
    same = ("equal trees", "Top-1", "majority", "pass@N", "gained, lost")
    assert [exact[name] for name in same] == [off[name] for name in same]
    assert off["equal trees"] == "2 of 2"
    assert truncate["equal trees"] != "2 of 2"
    assert (off["speculated"], off["kept"]) == (0, None)
    assert 0 < exact["kept"] <= 1


def test_a_tree_that_may_not_change_and_does_is_named(found):
    off, exact, truncate = rows_of(found, 4)
    assert changed_trees([off, exact, truncate]) == []
    assert changed_trees([off, exact | {"equal trees": "1 of 2"}, truncate]) == ["exact"]


def test_answers_that_change_are_counted_both_ways(found):
    off = found[SETTINGS[0]].records
    changed = [replace(each, correct=not each.correct) for each in off]
    row = rows_of({SETTINGS[0]: replace(found[SETTINGS[0]], records=changed), **found}, 4)[0]
    assert row["gained, lost"] == "0, 0"
    other = replace(found[SETTINGS[1]], records=changed)
    right = sum(bool(each.correct) for each in off)
    row = rows_of({SETTINGS[0]: found[SETTINGS[0]], SETTINGS[1]: other}, 4)[1]
    assert row["gained, lost"] == f"{len(off) - right}, {right}"


def test_shares_are_drawn_around_the_one_that_is_in_force():
    parent = SearchTree(0, (1, 2), "").root
    nodes = [unborn(parent, ordinal) for ordinal in range(400)]

    def drawn():
        return [tree_run.truncation(node) for node in nodes]

    usual = drawn()
    assert mean(usual) == pytest.approx(0.85, abs=0.02)
    assert stdev(usual) == pytest.approx(0.1, abs=0.02)
    with Setting("truncate", 0.5).in_force():
        assert mean(drawn()) == pytest.approx(0.5, abs=0.02)
    assert drawn() == usual
    assert max(usual) <= 1
