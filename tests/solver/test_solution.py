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


def test_a_notebook_shows_answer_warnings_and_candidates(solution):
    first = replace(solution.candidates[0], answer="<b>7</b>", score=0.125)
    candidates = (first, *solution.candidates[1:])
    shown = replace(solution, answer="<script>", warnings=("a < b",), candidates=candidates)
    page = shown._repr_html_()
    assert "<b>&lt;script&gt;</b>" in page
    assert "Warning: a &lt; b" in page
    assert "<summary>8 candidates</summary>" in page
    assert "<td>&lt;b&gt;7&lt;/b&gt;</td><td>0.125</td>" in page
    assert page.count("<tr>") == 9
    unstated = replace(solution, answer=None, last_step="so <it> is")
    assert "<b>so &lt;it&gt; is</b>" in unstated._repr_html_()


def test_tab_shows_what_the_package_has():
    names = dir(beamwright)
    assert set(beamwright.__all__) <= set(names)
    assert "Solver" in names
    assert {name for name in names if not name.startswith("_")} <= set(beamwright.__all__)
