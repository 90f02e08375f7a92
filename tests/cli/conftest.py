"""A scripted engine behind the real command line."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import fakes
from beamwright.cli import main
from beamwright.protocols import RoundReport


def solution_json():
    return json.loads(Path(__file__).with_name("solution.json").read_text())


def grow_tree(num_rounds=2, children=4, text="step {round}.{ordinal}\n\n"):
    """Yield a report per round: the first child survives, in the last round it finishes."""
    tree = fakes.new_tree(text="6*7?")
    parent = tree.root
    for number in range(1, num_rounds + 1):
        steps = [text.format(round=number, ordinal=ordinal) for ordinal in range(children)]
        nodes = fakes.grow(tree, parent, steps)
        for ordinal, node in enumerate(nodes):
            node.score = 0.9 - 0.1 * ordinal
        parent, *others = nodes
        for node in others:
            tree.prune(node)
        is_last = number == num_rounds
        (tree.finish if is_last else tree.keep)(parent)
        tree.rounds, went_on = number, (parent,)
        ends = ((), tuple(others), went_on) if is_last else (went_on, tuple(others), ())
        yield RoundReport(tree, number, tuple(nodes), *ends, elapsed_s=0.5 * number)


def make_solution(content, tree):
    """A solution with this JSON."""
    stats = {name: SimpleNamespace(**content[name]) for name in ("tokens", "kv", "time")}
    return SimpleNamespace(
        **{"sparse": None, **content, **stats, "tree": tree},
        tree_stats=SimpleNamespace(**content["tree"]),
        chosen=SimpleNamespace(said=content["text"], thought_tokens=0),
        to_json=lambda: content,
    )


@dataclass
class FakeSolver:
    """Answers everything with one scripted solution, or raises."""

    solution: dict = field(default_factory=solution_json)
    error: BaseException | None = None
    settings: object = None
    calls: list = field(default_factory=list)

    def _answer(self, call, on_round):
        self.calls.append(call)
        sys.stdout.write("a library's chatter\n")
        if self.error is not None:
            raise self.error
        for report in grow_tree():
            if on_round is not None:
                on_round(report)
        return make_solution(self.solution, report.tree)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def solve(self, problem, *, on_round=None, checkpoint=None, search=None):
        return self._answer(problem, on_round)

    def synthetic(self, num_prompt_tokens, *, on_round=None, checkpoint=None):
        return self._answer(num_prompt_tokens, on_round)

    def solve_many(self, problems, *, in_flight):
        for each in problems:
            yield each[0], self._answer(each, None)


@pytest.fixture
def fake_after(monkeypatch):
    """From when it is called: no model is loaded."""

    def install():
        solver = FakeSolver()

        def make_solver(settings, timeline=None, progress=None):
            solver.settings = settings
            return solver

        monkeypatch.setattr("beamwright.solver.solver.Solver", make_solver)
        return solver

    return install


@pytest.fixture
def fake(fake_after):
    return fake_after()


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def complaint(self):
        assert self.err.count("\n") == 1, self.err
        return self.err


@pytest.fixture
def cli(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def reports():
    return grow_tree
