"""What a solution looks like where Python shows it."""

from dataclasses import replace

import pytest

import beamwright
import engines


@pytest.fixture(scope="module")
def solution(generator_folder):
    with engines.tiny_solver(generator_folder, n=8, width=2) as solver:
        return solver.solve("Ann has 3 apples.")


def test_its_repr_is_a_line(solution):
    long = replace(solution, answer="9" * 5000, warnings=("doubtful", "very"), score=0.25)
    line = repr(long)
    assert len(line) < 200
    assert ", score 0.25, 8 candidates, " in line
    assert line.endswith("warnings: 2>")
    assert "warnings" not in repr(replace(solution, warnings=()))


def test_tab_shows_what_the_package_has():
    names = dir(beamwright)
    assert set(beamwright.__all__) <= set(names)
    assert "Solver" in names
    assert {name for name in names if not name.startswith("_")} <= set(beamwright.__all__)
