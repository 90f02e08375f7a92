"""A strategy or a schedule that asks for what cannot be done is named, and nothing hangs."""

import pytest

from beamwright.errors import PolicyError
from beamwright.protocols import Complete, Extend, Finish, Plan, Prune
from beamwright.tree import StopReason
from fakes import ScriptedExecutor, new_tree
from played import Loop, new_run


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
        (lambda tree: [], "neither extends a path nor finishes the search; 2 candidates wait"),
        (lambda tree: [Prune(node) for node in both(tree)], "neither extends a path nor finishes"),
        (lambda tree: None, "select returned None, not a list of actions"),
        (lambda tree: "extend", "select returned 'extend'"),
        (lambda tree: ["extend"], "'extend' is no action (Extend, Ask, Prune, Complete, Finish)"),
        (lambda tree: [Extend(both(tree)[0], 1)] * 2, "decides twice about path 0.0"),
        (lambda tree: [Extend(both(tree)[0], 0)], "gives 0 children to path 0.0"),
        (lambda tree: [Extend(both(tree)[0], 1.5)], "gives 1.5 children to path 0.0"),
        (lambda tree: [Prune(tree.root), Finish()], "prunes what is not decoded: path 0"),
        (lambda tree: [Complete(tree.root), Finish()], "completes a node that is kept: path 0"),
        (lambda tree: [Extend(new_tree().root, 1)], "acts on what is no node of this tree"),
        (lambda tree: [Extend(None, 1)], "acts on what is no node of this tree: None"),
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
        (lambda view: Plan(()), "an empty plan, while 2 beams wait"),
        (lambda view: Plan(((), ())), "an empty plan, while 2 beams wait"),
        (lambda view: [view.beams], "not a Plan"),
        (lambda view: Plan((view.beams, view.beams[:1])), "path 0.0 is in two groups"),
        (lambda view: Plan(((view.beams[0].parent,),)), "is no beam that waits"),
        (lambda view: 1 // 0, "it raised ZeroDivisionError"),
        (lambda view: Plan((view.beams[:1],) if len(view.beams) > 1 else ()), "while 1 beams wait"),
    ],
)
def test_a_strange_schedule_is_named(plan, words):
    line = complaint(Strange(lambda tree: [Finish()]), StrangeSchedule(plan))
    assert line.startswith("schedule strange: ")
    assert words in line
