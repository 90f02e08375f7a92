"""What a solution looks like where Python shows it."""

import re
import sys
from dataclasses import replace
from html import unescape
from types import ModuleType, SimpleNamespace

import pytest

import engines
from beamwright import Settings
from beamwright.counters import Progress
from beamwright.errors import InputError
from beamwright.solver.notebook import usual_progress

PATIENCE = 120.0


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


def test_a_notebook_shows_answer_warnings_five_candidates_and_the_tree(solution):
    first = replace(solution.candidates[0], answer="<b>7</b>", score=0.125)
    candidates = (first, *solution.candidates[1:])
    shown = replace(
        solution, answer="<script>", score=0.25, warnings=("a < b",), candidates=candidates
    )
    page = shown._repr_html_()
    assert "<b>&lt;script&gt;</b> (score 0.25)" in page
    assert "Warning: a &lt; b" in page
    assert "<summary>5 of 8 candidates</summary>" in page
    assert page.count("<tr>") == 6
    best = replace(shown, lineage=first.lineage)._repr_html_()
    assert "</tr><tr><td>&lt;b&gt;7&lt;/b&gt;</td><td>0.125</td>" in best, "the chosen one first"
    unstated = replace(solution, answer=None, last_step="so <it> is")
    assert "<b>so &lt;it&gt; is</b>" in unstated._repr_html_()


def test_the_tree_is_a_folded_page_that_reaches_nothing(solution, monkeypatch):
    text = solution._repr_html_()
    folded = text[text.index("<details><summary>The tree") :]
    frame = re.search(r'<iframe sandbox="([^"]*)" .*? srcdoc="([^"]*)"></iframe>', folded)
    assert "allow-same-origin" not in frame[1]
    page = unescape(frame[2])
    assert page.startswith("<!doctype html>")
    assert "Ann has 3 apples." in page
    assert len(text) < 300_000
    monkeypatch.setattr("beamwright.solver.solution._MOST_PAGE_CHARACTERS", 1000)
    heavy = replace(solution, text="a < b")._repr_html_()
    assert "<iframe" not in heavy
    assert "<pre>a &lt; b</pre>" in heavy


def test_settings_show_what_differs_from_the_defaults():
    assert repr(Settings()) == str(Settings.build(n=Settings().search.n)) == "Settings()"
    settings = Settings.build(n=6, width=3, search="dynamic", delimiter="\n", memory="2GiB")
    assert "\n" not in repr(settings)
    assert "n=6, width=3" in repr(settings)
    again = eval(repr(settings), {"Settings": Settings.build})
    assert again.search == settings.search


def test_solver_and_handle_are_a_line_each(make_solver):
    with make_solver(n=4, width=2, seed=5) as solver:
        assert repr(solver).endswith("beam n=4 width=2 seed=5>")
        good, bad = solver.submit("Ann has 3 apples.", problem_id="a"), solver.submit("")
        assert repr(good) in ("<Handle 'a': waiting>", "<Handle 'a': running>")
        assert isinstance(bad.future.exception(PATIENCE), InputError)
        good.result(PATIENCE)
    assert (repr(good), repr(bad)) == ("<Handle 'a': solved>", "<Handle 0: InputError>")
    with make_solver(verifier=lambda problem, text: 0.5) as solver:
        assert "verifier CallableVerifier" in repr(solver)


# --- progress in a cell ------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """A notebook's kernel, as far as it is asked: its cell, and what that shows."""
    shell, lines = SimpleNamespace(kernel=object(), execution_count=1), []

    def display(line, *, raw, display_id):
        assert raw
        assert display_id
        place = len(lines)
        lines.append([line["text/plain"]])
        return SimpleNamespace(update=lambda line, raw: lines[place].append(line["text/plain"]))

    python = ModuleType("IPython")
    python.get_ipython = lambda: shell
    python.display = ModuleType("IPython.display")
    python.display.display = display
    for name, module in (("IPython", python), ("IPython.display", python.display)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    return SimpleNamespace(shell=shell, lines=lines)


def test_searches_of_a_cell_are_one_line(make_solver, kernel, monkeypatch):
    monkeypatch.setattr("beamwright.solver.notebook._BETWEEN_S", 0.0)
    with make_solver(n=4, width=2) as solver:
        assert kernel.lines[0][-1].startswith("done | ")
        kernel.shell.execution_count = 2
        first = solver.solve("Ann has 3 apples.")
        second = solver.solve("Ann has 4 apples.")
    loading, solving = kernel.lines
    assert any("loading the generator" in line for line in loading)
    for doing in ("prefill of ", "round 1: decoding 4 beams | ", "round 1: scoring 4 steps | "):
        assert any(line.startswith(doing) for line in solving)
    written = first.tokens.generated + second.tokens.generated
    assert solving[-1].startswith(f"done | {written:,} tokens | ")


def test_elsewhere_nothing_is_shown(make_solver, kernel, capsys):
    silent = Progress()
    with make_solver(progress=silent) as solver:
        assert solver.progress is silent
    kernel.shell.kernel = None  # IPython in a terminal
    assert type(usual_progress()) is Progress
    assert kernel.lines == []
    assert capsys.readouterr().out == ""
