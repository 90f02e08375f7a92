"""A mirror of a tree is that tree, round by round, and again when it begins anew."""

import pickle
from collections import Counter

import pytest

from beamwright import Solver
from beamwright.cluster.mirror import Mirror, TreeChangeCollector
from beamwright.page.runs import PageChanges
from beamwright.serve.answers import settled_text
from beamwright.tree import SearchTree, tree_hash

PROBLEM = "Ann has 12 apples. She eats 3. How many are left?"
FACTS = (
    "lineage", "start", "state", "token_ids", "logprobs", "stats", "top", "text", "stop",
    "step_score", "score", "usage", "notes", "problem_text", "greedy", "round", "turn",
    "speculative", "depth", "end",
)  # fmt: skip


@pytest.fixture(scope="module")
def solver():
    with Solver(model="bundled", n=4, width=2, max_rounds=4, top_logprobs=2) as solver:
        yield solver


def facts(tree):
    """All there is of every node, KV left out."""
    return [{name: getattr(node, name) for name in FACTS} for node in tree.nodes()]


def same(report, other):
    names = ("candidates", "survivors", "pruned", "finished")
    for name in names:
        pairs = zip(getattr(report, name), getattr(other, name), strict=True)
        assert all(one.lineage == two.lineage for one, two in pairs)
    assert (report.round, report.elapsed_s) == (other.round, other.elapsed_s)


def test_a_worker_may_count_on_while_steps_are_compared():
    class Counted(Counter):
        def __iter__(self):
            self[f"verifier_{len(self)}"] += 1
            return super().__iter__()

        def copy(self):
            return Counter(dict(self.items()))

    changes, tree = TreeChangeCollector(), SearchTree("p", (1,), "")
    tree.root.usage = Counted(verifier_prefilled=1)
    (begun,), (told, *others) = changes.collect(tree).steps, changes.collect(tree).steps or [None]
    assert begun.attributes["usage"] == Counter(verifier_prefilled=1)
    assert (told, others) == (None, [])


@pytest.mark.parametrize("search", ["beam", "dvts", "mcts", "lookahead", "revise", "best-of-n"])
def test_every_round_is_the_tree_s_and_the_page_shows_the_same(solver, search):
    changes, mirror, there, here = TreeChangeCollector(), Mirror(), PageChanges(), PageChanges()

    def hear(report):
        sent = pickle.loads(pickle.dumps(changes.collect(report.tree, report)))
        mirror.apply(sent)
        same(report, mirror.report(sent))
        assert facts(report.tree) == facts(mirror.tree)
        assert settled_text(report.tree) == settled_text(mirror.tree)
        assert there.changes(report.tree) == here.changes(mirror.tree)

    solution = solver.solve(PROBLEM, on_round=hear, search=search, seed=2)
    mirror.apply(pickle.loads(pickle.dumps(changes.collect(solution.tree))))
    assert facts(solution.tree) == facts(mirror.tree)
    assert tree_hash(mirror.tree) == solution.tree_hash
    assert there.last_changes(solution.tree) == here.last_changes(mirror.tree)
    finished = [node.lineage for node in solution.tree.finished()]
    assert [node.lineage for node in mirror.tree.finished()] == finished
    assert mirror.tree.rounds == solution.rounds
    node = mirror.tree.node(solution.lineage)
    assert node.text == solution.text
