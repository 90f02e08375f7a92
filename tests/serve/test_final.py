"""Text that is final: never taken back, and as the answer begins, under every strategy."""

from itertools import pairwise

import pytest

from beamwright import Solver
from beamwright.evaluate import load_problems
from beamwright.search import STRATEGIES
from beamwright.serve.final import common, contenders, final_node, final_text, held_back
from beamwright.tree import NodeState, SearchTree

SMALL = {"n": 8, "width": 4, "max_rounds": 6, "max_step_tokens": 12, "max_tokens": 40}
COMMITS = [name for name, row in STRATEGIES.items() if row.commits]


def grown(*specs):
    """A tree of (lineage, step text, state)."""
    tree = SearchTree(0, (1, 2), "?")
    nodes = {(): tree.root}
    for lineage, text, state in specs:
        parent = nodes[lineage[:-1]]
        if len(parent.children) <= lineage[-1]:
            tree.expand(parent, lineage[-1] + 1 - len(parent.children))
        node = nodes[lineage] = parent.children[lineage[-1]]
        node.text, node.state = parent.text + text, state
    return tree


KEPT, OPEN, CANDIDATE = NodeState.KEPT, NodeState.OPEN, NodeState.CANDIDATE
FINISHED, PRUNED = NodeState.FINISHED, NodeState.PRUNED


def test_what_all_that_can_win_begin_with():
    tree = grown(
        ((0,), "One. ", KEPT),
        ((1,), "Two. ", PRUNED),
        ((0, 0), "So it is 4.", FINISHED),
        ((0, 1), "So it was 5.", CANDIDATE),
        ((0, 2), "No.", PRUNED),
    )
    assert final_text(tree) == "One. So it "
    assert final_text(tree, whole_steps=True) == "One. "
    assert final_node(tree).lineage == (0, 0)
    assert {node.lineage[1:] for node in contenders(tree)} == {(0, 0), (0, 1)}


def test_a_leaf_that_is_being_written_may_say_anything_behind_its_parent():
    tree = grown(((0,), "One. ", KEPT), ((0, 0), "", OPEN), ((0, 1), "So", FINISHED))
    assert final_text(tree) == "One. "
    assert final_text(grown(((0,), "", OPEN))) == ""
    assert final_text(SearchTree(0, (1,), "?")) == ""


def test_what_is_decoded_ahead_of_selection_says_nothing():
    tree = grown(((0,), "One. ", KEPT), ((0, 0), "Two.", CANDIDATE))
    tree.root.children[0].children[0].speculative = True
    assert final_text(tree) == "One. "


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("Half of a \ufffd", (), "Half of a "),
        ("one\n", ("\n\n",), "one"),
        ("one\n\ntwo", ("\n\nthree",), "one\n\ntwo"),
        ("one\n\nt", ("\n\nthree", "tx"), "one"),
        ("aab", ("ab", "aab"), ""),
        ("", ("x",), ""),
    ],
)
def test_what_may_yet_change_is_held_back(text, stops, held):
    assert held_back(text, stops) == held


def test_what_two_begin_with():
    assert common("abc", "abd") == "ab"
    assert common("ab", "abd") == "ab"
    assert common("", "x") == ""


@pytest.mark.parametrize("method", STRATEGIES)
def test_it_only_grows_and_the_answer_begins_with_it(make_solver, method):
    row = STRATEGIES[method]
    said, problem = [], "Ann has 7 apples."

    def hear(report):
        said.append(final_text(report.tree))

    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    options = {**SMALL, "search": method, "chat_template": template, "speculation": "exact"}
    with make_solver(**options) as solver:
        for seed in range(8):
            said.clear()
            solution = solver.solve(problem, seed=seed, on_round=hear)
            if row.commits:
                texts = [*said, solution.text]
                assert all(after.startswith(text) for text, after in pairwise(texts))


def test_text_is_final_before_the_end():
    """Or nothing would be gained: beams of the bundled pair soon agree on their first steps."""
    said, early = [], 0
    problems = load_problems("bundled:test", limit=4).problems
    with Solver(model="bundled", search="beam", n=8, width=4) as solver:
        for each in problems:
            said.clear()
            solution = solver.solve(
                each.problem, on_round=lambda report: said.append(final_text(report.tree))
            )
            assert all(solution.text.startswith(text) for text in said)
            early += bool(said[-2])
    assert early >= 2


def test_strategies_that_come_back_commit_to_nothing():
    assert set(COMMITS) >= {"beam", "dvts", "mcts", "best-of-n", "majority", "particles"}
    assert not {"lookahead", "deepconf", "revise"} & set(COMMITS)
