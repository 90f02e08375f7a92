"""A verifier's call that does not return: its tree ends in time, and nobody else notices."""

import threading

import pytest

from beamwright.engine.decisions import StopRule
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings, StopSettings
from beamwright.tree import tree_hash
from fakes import new_tree
from played import Loop, new_run
from worker_parts import OPEN, Scorer, Writer, by_lineage, overlapped, plain, search, workers


class Hangs(Scorer):
    """Comes back from one step of problem 0 only when it is late; `clock` jumps meanwhile."""

    def __init__(self):
        super().__init__(by_lineage, opened=OPEN)
        self.depth, self.late, self.now_s = 1, threading.Event(), 0.0

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


def next_events(executor):
    while not (events := executor.wait()):
        pass
    return events


@pytest.fixture
def steps():
    """Two steps of problem 0, and two of another."""
    return [tree.expand(tree.root, 2) for tree in (new_tree(0), new_tree(1))]


def test_a_call_that_nobody_needs_is_left_to_itself_and_another_thread_goes_on(hangs, steps):
    stuck, waiting = steps
    executor = overlapped(Writer(), hangs, patience_s=0.0)
    executor.verify(stuck)
    executor.verify(waiting)
    hangs.entered.acquire()
    assert executor.wait() == []
    assert workers() == [hangs.stuck], "while it is needed it keeps its thread"
    executor.release(stuck)
    assert [event.node for event in next_events(executor)] == waiting
    assert hangs.released == stuck
    hangs.late.set()
    hangs.stuck.join()
    assert executor.wait() == [], "what comes too late is dropped"
    executor.verify(waiting)
    next_events(executor)
    executor.close()
    assert hangs.stuck not in hangs.threads


def test_close_does_not_wait_for_a_call_that_hangs(hangs, steps):
    stuck, others = steps
    executor = overlapped(Writer(), hangs, patience_s=0.0)
    for _ in range(2):
        executor.verify(stuck)
        hangs.entered.acquire()
        before = hangs.stuck
        executor.release(stuck)
        executor.close()
        assert before in workers()
    assert hangs.released == stuck * 2
    executor.verify(others)
    next_events(executor)
    executor.close()


def test_a_deadline_ends_a_tree_whose_scores_never_come(hangs):
    """With what is scored so far; the others are those of an executor that never waits in vain."""
    hangs.depth = 2
    expected = search(plain(Writer(by_lineage), Scorer(by_lineage, opened=OPEN)))
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
