"""Problems in flight in a terminal: a row each."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from beamwright.cli.in_flight import MOST_ROWS, ProblemsInFlight


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def shown():
    return ProblemsInFlight(Clock())


def lines(shown, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(shown.table())
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_row_each_the_slowest_first(shown, reports):
    for name in ("first", 0, "third"):
        shown.began(name, 16)
        shown._clock.now += 10
    report = next(reports(num_rounds=2))
    report.tree.expand(report.survivors[0], 3)
    shown.show(report)
    assert lines(shown) == [
        ["problem", "round", "beams", "tokens", "seconds"],
        ["first", "1", "16", "0", "30"],
        ["0", "2", "3", "8", "20"],
        ["third", "1", "16", "0", "10"],
    ]
    shown.ended("first")
    assert [row[0] for row in lines(shown)] == ["problem", "0", "third"]


def test_one_problem_is_no_table(shown):
    assert shown.table() is None
    shown.began(1, 4)
    assert shown.table() is None


def test_its_height_has_a_bound(shown):
    for number in range(MOST_ROWS + 5):
        shown.began(number, 4)
    found = lines(shown)
    assert len(found) == 1 + MOST_ROWS + 1
    assert found[-1] == ["and", "5", "more"]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_problem_has_one_line_whatever_its_name(shown, width):
    shown.began("a\nname " * 40, 4)
    shown.began("[b]", 4)
    assert len(lines(shown, width)) == 3


def test_what_has_ended_is_not_shown_again(shown, reports):
    report = next(reports(num_rounds=1))
    shown.show(replace(report, round=3))
    assert shown.table() is None
