"""A verifier's call that does not return: its tree ends in time, and nobody else notices."""

import threading

import pytest

from beamwright.engine.limits import StopRule
from beamwright.engine.timeline import Accounting
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import tree_hash
from fakes import new_tree
from lane_parts import Scorer, Writer, by_lineage, open_scorer, overlapped, plain, search, workers
from played import Loop, new_run


class Hangs(Scorer):
    """Comes back from one step of problem 0 only when it is late; `clock` jumps meanwhile."""

    def __init__(self):
        super().__init__(by_lineage)
        self.depth, self.late, self.now_s = 1, threading.Event(), 0.0
        self.gate.release(10_000)

    def clock(self):
        return self.now_s

    def score(self, nodes):
        if nodes[0].problem_id == 0 and nodes[0].depth == self.depth:
            self.stuck = threading.current_thread()
            self.now_s = 100.0
            self.entered.release()
            assert self.late.wait(600)
            return [9.0 for _ in nodes]
        return super().score(nodes)


@pytest.fixture
def hangs():
    """A scorer whose stuck thread ends with the test."""
    scorer = Hangs()
    yield scorer
    scorer.late.set()
    for worker in workers():  # without patience, `close` waits for no healthy one
        worker.join(600)
    assert not workers()


def steps(tree):
    return tree.expand(tree.root, 2)


def test_a_call_that_nobody_needs_is_left_to_itself_and_another_thread_goes_on(hangs):
    tree, other, accounting = new_tree(0), new_tree(1), Accounting()
    stuck, waiting = steps(tree), steps(other)
    executor = overlapped(Writer(), hangs, accounting, patience_s=0.0)
    executor.verify(stuck)
    executor.verify(waiting)
    hangs.entered.acquire()
    assert executor.wait() == []
    assert workers() == [hangs.stuck], "while it is needed it keeps its thread"
    executor.release(stuck)
    while not (events := executor.wait()):
        pass
    assert [event.node for event in events] == waiting
    assert hangs.released == stuck
    hangs.late.set()
    hangs.stuck.join()
    assert executor.wait() == [], "what comes too late is dropped"
    executor.verify(waiting)
    while not executor.wait():
        pass
    executor.close()
    assert hangs.stuck not in hangs.threads


def test_close_does_not_wait_for_a_call_that_hangs(hangs):
    tree, other = new_tree(0), new_tree(1)
    stuck = steps(tree)
    executor = overlapped(Writer(), hangs, patience_s=0.0)
    for _ in range(2):
        executor.verify(stuck)
        hangs.entered.acquire()
        before = hangs.stuck
        executor.release(stuck)
        executor.close()
        assert before in workers()
    assert hangs.released == stuck * 2
    executor.verify(steps(other))
    while not executor.wait():
        pass
    executor.close()
    hangs.late.set()
    before.join()


def test_a_deadline_ends_a_tree_whose_scores_never_come(hangs):
    """With what is scored so far; the others are those of an executor that never waits in vain."""
    hangs.depth = 2
    expected = search(plain(Writer(by_lineage), open_scorer(by_lineage)))
    executor = overlapped(Writer(by_lineage), hangs, patience_s=0.0)
    settings = SearchSettings(n=6, width=3, max_rounds=8)
    loop = Loop(executor, make_strategy(settings), clock=hangs.clock)
    runs = [new_run(new_tree(i)) for i in range(9)]
    runs[0].rule = StopRule(StopSettings(deadline=50.0), settings)
    loop.run(runs)
    tree = runs[0].tree
    assert tree.reason_fewer.endswith("unfinished when --deadline 50s had passed")
    scored = {node.depth: node.step_score is not None for node in tree.nodes() if node.parent}
    assert scored == {1: True, 2: False}
    assert set(tree.nodes()) <= set(hangs.released)
    for one, other in zip(expected[1:], runs[1:], strict=True):
        assert tree_hash(other.tree) == tree_hash(one.tree)
