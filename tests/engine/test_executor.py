"""Executors: both do the same work; whenever the worker gets to finish, the trees are the same."""

import random
import threading

import pytest

from beamwright.counters import Progress
from beamwright.engine.timeline import Accounting
from beamwright.errors import (
    BeamwrightError,
    CapacityError,
    DeviceMemoryError,
    InputError,
    LinkError,
)
from beamwright.protocols import Plan, StepDecoded, StepFailed, StepScored
from beamwright.tree import tree_hash
from fakes import new_tree
from worker_parts import OPEN, Scorer, Writer, by_lineage, overlapped, plain, search, workers


@pytest.fixture
def make():
    """Makes executors of a kind, and closes them; no thread survives."""
    made = []

    def make(kind, writer, scorer, **options):
        made.append((kind(writer, scorer, **options), scorer))
        return made[-1][0]

    yield make
    for executor, scorer in made:
        scorer.gate.release(1000)
        executor.close()
    assert not workers()


# --- both ------------------------------------------------------------------------------------


def test_one_piece_of_work_at_a_time_and_scores_first():
    tree, accounting = new_tree(), Accounting()
    first, second, third = tree.expand(tree.root, 3)
    executor = plain(Writer(most=1), Scorer(opened=OPEN), accounting)
    assert executor.wait() == []
    executor.writer.submit(Plan(((second,), (first,))))
    executor.verify(())
    executor.verify((third, second))
    found = [executor.wait() for _ in range(3)]
    assert found[0] == [StepScored(third, 2.0), StepScored(second, 1.0)]
    assert [[(type(e), e.node) for e in events] for events in found[1:]] == [
        [(StepDecoded, second)],
        [(StepDecoded, first)],
    ]
    assert executor.wait() == []
    assert not executor.writer.busy
    assert accounting.counts.groups == 1
    assert {"decode", "verify"} <= set(accounting.counts.seconds) <= {"decode", "verify", "stall"}


@pytest.mark.parametrize("kind", [plain, overlapped])
def test_release_reaches_both_owners(make, kind):
    tree, writer, scorer = new_tree(), Writer(), Scorer(opened=OPEN)
    nodes = tree.expand(tree.root, 2)
    executor = make(kind, writer, scorer)
    executor.release([tree.root])
    assert scorer.released == [tree.root]
    assert scorer.threads == {threading.current_thread()}
    executor.verify(nodes)
    executor.release(nodes)
    executor.close()
    assert writer.released == scorer.released == [tree.root, *nodes]
    assert executor.wait() == []


@pytest.mark.parametrize("kind", [plain, overlapped])
def test_a_verifier_that_fails_ends_its_tree_alone(make, kind):
    tree, scorer = new_tree(), Scorer(opened=OPEN)
    nodes = tree.expand(tree.root, 2)
    executor = make(kind, Writer(), scorer)
    scorer.error = CapacityError("a thing", 8, 4, 4)
    executor.verify(nodes)
    assert executor.wait() == [StepFailed(node, scorer.error) for node in nodes]
    scorer.error = InputError("no step")
    executor.verify(nodes)
    assert executor.wait() == [StepFailed(nodes[0], scorer.error)]
    executor.release([tree.root])
    scorer.error = MemoryError()
    executor.verify(nodes)
    (event,) = executor.wait()
    assert isinstance(event.error, DeviceMemoryError)
    executor.release([tree.root])
    for error in (LinkError("gone"), KeyboardInterrupt(), AssertionError("a bug")):
        scorer.error = error
        executor.verify(nodes)
        with pytest.raises(type(error)):
            executor.wait()
    scorer.error = None
    executor.verify(nodes)
    assert [type(event) for event in executor.wait()] == [StepScored] * 2, "it goes on"


@pytest.mark.parametrize("kind", [plain, overlapped])
def test_a_tree_that_has_failed_is_not_scored_any_more(make, kind):
    """Its other steps may wait already, where steps are scored as they end."""
    tree, other = new_tree(), new_tree()
    first, second = tree.expand(tree.root, 2)
    (third,) = other.expand(other.root, 1)

    def script(node):
        if node is first:
            raise InputError("no step")
        return None, 0.5

    scorer = Scorer(script, opened=3)
    executor = make(kind, Writer(), scorer)
    for batch in ((first,), (second,), (third,)):
        executor.verify(batch)
    (failed,) = executor.wait()
    assert (type(failed), failed.node) == (StepFailed, first)
    assert [event.node for event in (*executor.wait(), *executor.wait())] == [third]
    assert scorer.scored == [(first,), (third,)]


# --- a worker --------------------------------------------------------------------------------


def test_decoding_goes_on_while_the_worker_scores(make):
    tree, scorer, writer = new_tree(), Scorer(), Writer()
    first, second, third = tree.expand(tree.root, 3)
    executor = make(overlapped, writer, scorer)
    assert executor.wait() == []
    executor.verify(())
    assert not workers(), "a worker starts with its first batch"
    executor.verify((third, second))
    scorer.entered.acquire()
    writer.submit(Plan(((first,),)))
    assert [type(event) for event in executor.wait()] == [StepDecoded]
    assert not writer.busy
    scorer.gate.release()
    assert executor.wait() == [StepScored(third, 2.0), StepScored(second, 1.0)]
    assert executor.wait() == []
    assert threading.current_thread() not in scorer.threads


def test_what_the_worker_reads_is_freed_when_it_has_finished(make):
    tree, other, scorer, writer = new_tree(0), new_tree(1), Scorer(), Writer()
    nodes, waiting = tree.expand(tree.root, 2), other.expand(other.root, 2)
    executor = make(overlapped, writer, scorer)
    executor.verify(nodes)
    executor.verify(waiting)
    scorer.entered.acquire()
    executor.release([tree.root, *nodes])
    executor.release([other.root, *waiting])
    assert writer.released == [tree.root, *nodes, other.root, *waiting], "the generator's at once"
    assert scorer.released == []
    scorer.gate.release()
    late = executor.wait()
    assert [event.node for event in late] == nodes, "nobody knows them any more"
    executor.close()
    assert scorer.released == writer.released
    assert scorer.scored == [tuple(nodes)], "what waited is not scored"


def test_close_forgets_what_waits_and_the_executor_can_be_used_again(make):
    tree, scorer = new_tree(), Scorer()
    nodes = tree.expand(tree.root, 2)
    executor = make(overlapped, Writer(), scorer)
    for _ in range(3):
        executor.verify(nodes[:1])
        executor.verify(nodes[1:])
        scorer.entered.acquire()
        scorer.gate.release()
        executor.close()
        assert not workers()
        assert executor.wait() == [], "a score that came too late"
    assert scorer.scored[:1] == [(nodes[0],)]
    executor.verify(nodes)
    scorer.gate.release()
    assert len(executor.wait()) == 2


# --- whole searches by a script --------------------------------------------------------------


class Chance(Progress):
    """Opens the gate whenever a coin says so, and when the loop waits for nothing else."""

    def __init__(self, writer, scorer, rng):
        self.scorer, self.rng, self.real = scorer, rng, writer.iterate
        writer.iterate = self.iterate

    def iterate(self):
        if self.rng.random() < 0.4:
            self.scorer.gate.release(self.rng.randint(1, 3))
        return self.real()

    def doing(self, what):
        self.scorer.gate.release()


def breaks(node):
    """Problem 5 cannot be scored after a while."""
    if node.problem_id == 5 and node.depth > 1:
        raise InputError("no score")
    return by_lineage(node)


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_ends_at_any_time_changes_no_tree(seed):
    """Trees that fail or are cancelled in the middle of a score do not change the others."""
    rng = random.Random(seed)
    expected = search(plain(Writer(by_lineage), Scorer(breaks, opened=OPEN)))
    writer, scorer = Writer(by_lineage, rng.randint(1, 9)), Scorer(breaks)
    executor = overlapped(writer, scorer, progress=Chance(writer, scorer, rng))
    cancels = [(rng.randrange(9), rng.randint(2, 40)) for _ in range(3)]
    close = executor.close
    executor.close = lambda: scorer.gate.release(1000) or close()
    found = search(executor, cancels)
    assert not workers()
    for one, other in zip(expected, found, strict=True):
        name = one.tree.root.problem_id
        assert isinstance(one.error, BeamwrightError) == (name == 5)
        if name not in [cancelled for cancelled, _ in cancels]:
            assert isinstance(other.error, BeamwrightError) == (name == 5)
            assert name == 5 or tree_hash(other.tree) == tree_hash(one.tree)
        assert set(other.tree.nodes()) <= set(writer.released)
    assert len(scorer.released) == len(set(scorer.released)), "freed once"
    assert set(scorer.released) == set(writer.released)
