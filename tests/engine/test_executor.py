import pytest

from beamwright.engine.timeline import Accounting
from beamwright.errors import CapacityError, InputError, LinkError
from beamwright.protocols import Plan, ScheduleView, StepDecoded, StepFailed, StepScored
from beamwright.tree import StopReason
from fakes import new_tree
from lane_parts import plain


class Writer:
    """Decodes one node per iteration."""

    def __init__(self):
        self.released, self.cancelled, self.queue = [], [], []
        self.running_nodes, self.num_groups = frozenset(), 0

    @property
    def busy(self):
        return bool(self.queue)

    def submit(self, plan):
        self.queue = [node for group in plan.groups for node in group]
        self.num_groups += 1

    def iterate(self):
        return [StepDecoded(self.queue.pop(0), (1,), (-0.1,), StopReason.EOS, "x")]

    def cancel(self, nodes):
        self.cancelled.extend(nodes)

    def view(self, beams):
        return ScheduleView(beams)

    def release(self, nodes):
        self.released.extend(nodes)


class Scorer(Writer):
    default_aggregate = "last"
    probabilities = False
    error = None

    def score(self, nodes):
        if self.error is not None:
            raise self.error
        return [float(node.lineage[-1]) for node in nodes]


def test_one_piece_of_work_at_a_time_and_scores_first():
    tree, accounting = new_tree(), Accounting()
    first, second, third = tree.expand(tree.root, 3)
    executor = plain(Writer(), Scorer(), accounting)
    assert executor.wait() == []
    executor.writer.submit(Plan(((second,), (first,))))
    executor.verify(())
    executor.verify((third, second))
    found = [executor.wait() for _ in range(3)]
    assert [[(type(e), e.node) for e in events] for events in found] == [
        [(StepScored, third), (StepScored, second)],
        [(StepDecoded, second)],
        [(StepDecoded, first)],
    ]
    assert [e.score for e in found[0]] == [2.0, 1.0]
    assert executor.wait() == []
    assert not executor.writer.busy
    assert accounting.counts.groups == 1
    assert {"decode", "verify"} <= set(accounting.counts.seconds) <= {"decode", "verify", "stall"}


def test_release_reaches_both_owners_and_what_waits_for_a_score():
    tree = new_tree()
    nodes = tree.expand(tree.root, 2)
    writer, scorer = Writer(), Scorer()
    executor = plain(writer, scorer, Accounting())
    executor.verify(nodes)
    executor.release([tree.root, *nodes])
    assert writer.released == scorer.released == [tree.root, *nodes]
    assert executor.wait() == []


def test_a_verifier_that_fails_names_a_node_of_its_tree():
    tree, scorer = new_tree(), Scorer()
    nodes = tree.expand(tree.root, 2)
    executor = plain(Writer(), scorer, Accounting())
    scorer.error = CapacityError("a thing", 8, 4, 4)
    executor.verify(nodes)
    assert executor.wait() == [StepFailed(node, scorer.error) for node in nodes]
    scorer.error = InputError("no step")
    executor.verify(nodes)
    assert executor.wait() == [StepFailed(nodes[0], scorer.error)]
    executor.release([tree.root])
    scorer.error = LinkError("gone")
    executor.verify(nodes)
    with pytest.raises(LinkError):
        executor.wait()
