"""The loop with a scripted executor: search in milliseconds, without a model."""

import pytest

from beamwright.errors import PolicyError
from beamwright.protocols import EndSearch, Extend, FinishPath, Plan, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason, tree_hash
from fakes import ScriptedExecutor, new_tree
from played import Loop, new_run


def run(script, trees=None, how="last", schedule=None, on_round=None, **settings):
    """Run a search; returns the executor and the runs."""
    executor = ScriptedExecutor(script)
    runs = [new_run(tree) for tree in trees or [new_tree()]]
    loop = Loop(executor, make_strategy(SearchSettings(**settings)), schedule, how)
    loop.run(runs, on_round)
    return executor, runs


def ordinal_wins(node):
    """Higher ordinals score better; every path ends at its third step."""
    stop = StopReason.EOS if node.depth == 3 else StopReason.DELIMITER
    return stop, node.lineage[-1] / 10


def test_every_step_is_scored_once_and_every_node_released_once():
    executor, (found,) = run(ordinal_wins, n=8, width=4)
    decoded = [node for group in executor.groups for node in group]
    scored = [node for nodes in executor.scored for node in nodes]
    every = set(found.tree.nodes())
    assert len(scored) == len(set(scored)) == len(decoded)
    assert set(scored) == set(decoded) == every - {found.tree.root}
    assert len(executor.released) == len(set(executor.released))
    assert set(executor.released) == every


# --- several trees ---------------------------------------------------------------------------


def ends_by_problem(node):
    """Problem p's paths end at depth p + 1; scores differ by problem too."""
    stop = StopReason.EOS if node.depth == node.problem_id + 1 else StopReason.DELIMITER
    return stop, (node.lineage[-1] * (node.problem_id + 3)) % 5


def test_trees_in_flight_do_not_know_of_each_other():
    together = [new_tree(i) for i in range(4)]
    executor, _ = run(ends_by_problem, trees=together, n=6, width=3)
    for tree in together:
        alone = new_tree(tree.root.problem_id)
        run(ends_by_problem, trees=[alone], n=6, width=3)
        assert tree_hash(tree) == tree_hash(alone)
        assert tree.rounds == alone.rounds == tree.root.problem_id + 1
    # They share rounds: 4 trees of 1 to 4 rounds are 4 groups, ever smaller.
    assert [len(group) for group in executor.groups] == [24, 18, 12, 6]


# --- reports ---------------------------------------------------------------------------------


# --- what cannot be done is named, and nothing hangs ---------------------------------------------


def goes_on(node):
    return (
        StopReason.EOS if node.lineage[-1] == 0 and node.depth == 2 else StopReason.DELIMITER
    ), 0.5


class Strange:
    """Extends the root by two, then does what the test says."""

    def __init__(self, then):
        self.then = then

    def select(self, tree, rng):
        return [Extend(tree.root, 2)] if tree.rounds == 0 else self.then(tree)


def complaint(strategy, schedule=None):
    tree = new_tree()
    loop = Loop(ScriptedExecutor(goes_on), strategy, schedule)
    with pytest.raises(PolicyError) as caught:
        loop.run([new_run(tree)])
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert tree.done
    return str(caught.value)


def both(tree):
    return tree.candidates()


def ended_path(tree):
    ended = [node for node in both(tree) if node.ended]
    return [Extend(node, 1) for node in ended or both(tree)]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (lambda tree: [], "neither extends a path nor ends the search, so 2 candidates"),
        (lambda tree: [Prune(node) for node in both(tree)], "neither extends a path nor ends"),
        (lambda tree: None, "select returned None, not a list of actions"),
        (lambda tree: "extend", "select returned 'extend'"),
        (
            lambda tree: ["extend"],
            "'extend' is not an action (Extend, Ask, Prune, FinishPath, EndSearch)",
        ),
        (lambda tree: [Extend(both(tree)[0], 1)] * 2, "decides twice about path 0.0"),
        (lambda tree: [Extend(both(tree)[0], 0)], "gives 0 children to path 0.0"),
        (lambda tree: [Extend(both(tree)[0], 1.5)], "gives 1.5 children to path 0.0"),
        (lambda tree: [Prune(tree.root), EndSearch()], "prunes a node that is not decoded: path 0"),
        (
            lambda tree: [FinishPath(tree.root), EndSearch()],
            "finishes a node that is kept: path 0",
        ),
        (
            lambda tree: [Extend(new_tree().root, 1)],
            "acts on a value that is not a node of this tree",
        ),
        (lambda tree: [Extend(None, 1)], "acts on a value that is not a node of this tree: None"),
        (lambda tree: 1 // 0, "it raised ZeroDivisionError"),
        (ended_path, "extends a path that has ended: path 0.0.0"),
    ],
)
def test_a_strange_strategy_is_named(then, words):
    line = complaint(Strange(then))
    assert line.startswith("strategy Strange, round ")
    assert words in line


class StrangeSchedule:
    name = "strange"

    def __init__(self, plan):
        self.plan = plan


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda view: Plan(()), "the plan is empty, but 2 beams wait"),
        (lambda view: Plan(((), ())), "the plan is empty, but 2 beams wait"),
        (lambda view: [view.beams], "not a Plan"),
        (lambda view: Plan((view.beams, view.beams[:1])), "path 0.0 is in two groups"),
        (lambda view: Plan(((view.beams[0].parent,),)), "is not a waiting beam"),
        (lambda view: 1 // 0, "it raised ZeroDivisionError"),
        (lambda view: Plan((view.beams[:1],) if len(view.beams) > 1 else ()), "but 1 beams wait"),
    ],
)
def test_a_strange_schedule_is_named(plan, words):
    line = complaint(Strange(lambda tree: [EndSearch()]), StrangeSchedule(plan))
    assert line.startswith("schedule strange: ")
    assert words in line
