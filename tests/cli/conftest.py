"""A scripted engine behind the real command line."""

import json
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from beamwright.cli import main
from beamwright.protocols import RoundReport
from beamwright.tree import NodeState, SearchTree, StopReason


def solution_json(**changes):
    return {
        **{"answer": "42", "text": "6*7=42.\n\nThe answer is \\boxed{42}.", "last_step": None},
        **{"score": 0.9, "stop": "eos", "lineage": [0, 0, 0], "rounds": 2, "seed": 0},
        **{"reason_fewer": None, "warnings": [], "remote": None, "io_share": None},
        "candidates": [{"answer": "42", "vote": "42", "score": 0.9, "stop": "eos", "tokens": 20}],
        "tree": {"nodes": 9, "pruned": 6, "unique_tokens": 90, "path_tokens": 100},
        "tokens": {"generated": 1234, "kept": 90, "thought": 0},
        "kv": {"device_peak_bytes": 3 * 1024**2, "link_bandwidth_emulated": None},
        "time": {"total_s": 1.25},
        **{"goodput_tok_s": 16.0, "tree_hash": "abc", "exact": True},
        **{"schedule": "in-gpu", "attention": "tree", **changes},
    }


def grow_tree(num_rounds=2, children=4, text="step {round}.{ordinal}\n\n"):
    """Yield a report per round: the first child survives, in the last round it finishes."""
    tree = SearchTree(0, (1, 2, 3), "6*7?")
    parent = tree.root
    for number in range(1, num_rounds + 1):
        nodes = tree.expand(parent, children)
        for ordinal, node in enumerate(nodes):
            step = text.format(round=number, ordinal=ordinal)
            last = number == num_rounds and ordinal == 0
            stop = StopReason.EOS if last else StopReason.DELIMITER
            tree.commit(node, (5, 6), (-0.1, -0.1), stop, node.text + step)
            node.score = 0.9 - 0.1 * ordinal
        for node in nodes[1:]:
            tree.prune(node)
        (tree.finish if number == num_rounds else tree.keep)(nodes[0])
        tree.rounds = number
        finished = nodes[0].state is NodeState.FINISHED
        yield RoundReport(
            tree=tree,
            round=number,
            candidates=tuple(nodes),
            survivors=() if finished else (nodes[0],),
            pruned=tuple(nodes[1:]),
            finished=(nodes[0],) if finished else (),
            elapsed_s=0.5 * number,
        )
        parent = nodes[0]


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


@pytest.fixture
def as_solution():
    return make_solution
