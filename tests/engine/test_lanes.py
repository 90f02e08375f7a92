"""The overlapped executor: the same trees as the plain one, whenever the lane gets to finish."""

import random
import threading
from contextlib import contextmanager

import pytest

from beamwright.engine.scoring import without
from beamwright.errors import (
    BeamwrightError,
    CapacityError,
    DeviceMemoryError,
    InputError,
    LinkError,
)
from beamwright.progress import Progress
from beamwright.protocols import Plan, StepDecoded, StepFailed, StepScored
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import tree_hash, unborn
from fakes import new_tree
from lane_parts import Scorer, Writer, by_lineage, open_scorer, overlapped, plain, search, workers
from played import Loop, new_run


@pytest.fixture
def make_overlapped():
    """Makes executors, and closes them; no thread survives."""
    made = []

    def make(writer, scorer, **options):
        made.append((overlapped(writer, scorer, **options), scorer))
        return made[-1][0]

    yield make
    for executor, scorer in made:
        scorer.gate.release(1000)
        executor.close()
    assert not workers()


def test_decoding_goes_on_while_the_lane_scores(make_overlapped):
    tree, scorer, writer = new_tree(), Scorer(), Writer()
    first, second, third = tree.expand(tree.root, 3)
    executor = make_overlapped(writer, scorer)
    assert executor.wait() == []
    executor.verify(())
    assert not workers(), "a lane starts with its first batch"
    executor.verify((third, second))
    scorer.entered.acquire()
    executor.writer.submit(Plan(((first,),)))
    assert [type(event) for event in executor.wait()] == [StepDecoded]
    assert not executor.writer.busy
    scorer.gate.release()
    assert executor.wait() == [StepScored(third, 2.0), StepScored(second, 1.0)]
    assert executor.wait() == []
    assert threading.current_thread() not in scorer.threads


def test_scores_come_first_and_in_their_order(make_overlapped):
    trees, scorer, writer = [new_tree(i) for i in range(3)], Scorer(), Writer()
    executor = make_overlapped(writer, scorer)
    nodes = [tree.expand(tree.root, 1)[0] for tree in trees]
    for node in nodes:
        executor.verify((node,))
    scorer.gate.release(3)
    for _ in nodes:
        scorer.entered.acquire()
    executor.close()
    assert scorer.scored == [(node,) for node in nodes]
    writer.queue = [nodes[0]]
    executor.verify((nodes[1],))
    scorer.gate.release()
    scorer.entered.acquire()
    while executor._worker.busy:
        pass
    found = [executor.wait()[0] for _ in range(2)]
    assert [type(event) for event in found] == [StepScored, StepDecoded]


def test_what_the_lane_reads_is_freed_when_it_has_finished(make_overlapped):
    tree, other, scorer, writer = new_tree(0), new_tree(1), Scorer(), Writer()
    nodes, waiting = tree.expand(tree.root, 2), other.expand(other.root, 2)
    executor = make_overlapped(writer, scorer)
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


def test_without_a_lane_release_is_at_once(make_overlapped):
    tree, scorer = new_tree(), Scorer()
    executor = make_overlapped(Writer(), scorer)
    executor.release([tree.root])
    assert scorer.released == [tree.root]
    assert scorer.threads == {threading.current_thread()}


def test_a_verifier_that_fails_ends_its_tree_alone(make_overlapped):
    tree, scorer = new_tree(), Scorer()
    nodes = tree.expand(tree.root, 2)
    executor = make_overlapped(Writer(), scorer)
    scorer.gate.release(10)
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


def test_a_tree_that_has_failed_is_not_scored_any_more(make_overlapped):
    """Its other steps may wait already, where steps are scored as they end."""
    tree, other = new_tree(), new_tree()
    first, second = tree.expand(tree.root, 2)
    (third,) = other.expand(other.root, 1)

    def script(node):
        if node is first:
            raise InputError("no step")
        return None, 0.5

    scorer = Scorer(script)
    executor = make_overlapped(Writer(), scorer)
    for batch in ((first,), (second,), (third,)):
        executor.verify(batch)
    scorer.gate.release(3)
    (failed,) = executor.wait()
    assert (type(failed), failed.node) == (StepFailed, first)
    assert [event.node for event in (*executor.wait(), *executor.wait())] == [third]
    assert scorer.scored == [(first,), (third,)]


def test_a_batch_waits_for_its_open_steps():
    tree = new_tree()
    first, second = tree.expand(tree.root, 2)
    ahead = unborn(first, 0)
    batches = [(first, ahead), (second,)]
    assert [without(batch, [ahead]) for batch in batches] == [(first,), (second,)]
    assert [without(batch, [first]) for batch in batches] == [None, (second,)]
    assert [without(batch, [second]) for batch in batches] == [(first, ahead), None]


def test_what_freeing_raises_is_raised_in_the_loop(make_overlapped):
    tree, scorer = new_tree(), Scorer()
    nodes = tree.expand(tree.root, 1)
    executor = make_overlapped(Writer(), scorer)
    executor.verify(nodes)
    scorer.entered.acquire()
    scorer.release = lambda nodes: 1 / 0
    executor.release(nodes)
    scorer.gate.release()
    with pytest.raises(ZeroDivisionError):
        executor.close()
    executor.close()
    scorer.release = lambda nodes: None


def test_close_forgets_what_waits_and_the_executor_can_be_used_again(make_overlapped):
    tree, scorer = new_tree(), Scorer()
    nodes = tree.expand(tree.root, 2)
    executor = make_overlapped(Writer(), scorer)
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


class Compute:
    """A stand-in for a card's stream: writes down on which thread it begins and ends."""

    def __init__(self, fails=False):
        self.log, self.fails = [], fails

    def __call__(self):
        self.note("made")
        return self.entered()

    def note(self, what):
        self.log.append((what, threading.current_thread().name))

    @contextmanager
    def entered(self):
        if self.fails:
            raise RuntimeError("no stream")
        self.note("begins")
        try:
            yield
        finally:
            self.note("is empty")


def test_a_lane_computes_in_its_own_place_from_first_to_last(make_overlapped):
    tree, scorer, compute = new_tree(), Scorer(), Compute()
    nodes = tree.expand(tree.root, 1)
    here = threading.current_thread().name
    scorer.script = lambda node: (None, compute.note("scores"))
    scorer.release = lambda nodes: compute.note("frees")
    executor = make_overlapped(Writer(), scorer, context=compute)
    executor.verify(nodes)
    assert compute.log == [("made", here), ("begins", "verifier")]
    scorer.gate.release()
    executor.wait()
    executor.release(nodes)
    executor.close()
    assert compute.log[2:] == [
        ("scores", "verifier"),
        ("frees", "verifier"),
        ("is empty", "verifier"),
    ]


def test_a_lane_that_cannot_start_says_so_and_loses_nothing(make_overlapped):
    tree, scorer = new_tree(), Scorer()
    nodes = tree.expand(tree.root, 1)
    executor = make_overlapped(Writer(), scorer, context=Compute(fails=True))
    executor.verify(nodes)
    executor.release(nodes)
    with pytest.raises(RuntimeError, match="no stream"):
        executor.wait()
    executor.close()
    assert scorer.released == nodes


# --- whole searches by a script --------------------------------------------------------------


class Chance(Progress):
    """Opens the lane's gate whenever a coin says so, and when the loop waits for nothing else."""

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


@pytest.mark.parametrize("seed", range(60))
def test_a_lane_that_ends_at_any_time_changes_no_tree(seed):
    """Trees that fail or are cancelled in the middle of a score do not change the others."""
    rng = random.Random(seed)
    expected = search(plain(Writer(by_lineage), open_scorer(breaks)))
    writer, scorer = Writer(by_lineage, rng.randint(1, 9)), Scorer(breaks)
    chance = Chance(writer, scorer, rng)
    executor = overlapped(writer, scorer, progress=chance)
    cancels = [(rng.randrange(9), rng.randint(2, 40)) for _ in range(3)]
    close = executor.close
    executor.close = lambda: scorer.gate.release(1000) or close()
    found = search(executor, cancels)
    assert not workers()
    for one, other in zip(expected, found, strict=True):
        name = one.tree.root.problem_id
        assert isinstance(one.error, BeamwrightError) == (name == 5)
        cut = any(name == cancelled for cancelled, _ in cancels)
        if not cut:
            assert isinstance(other.error, BeamwrightError) == (name == 5)
        if other.error is None and one.error is None and not cut:
            assert tree_hash(other.tree) == tree_hash(one.tree)
        every = set(other.tree.nodes())
        assert every <= set(writer.released)
    assert len(scorer.released) == len(set(scorer.released)), "freed once"
    assert set(scorer.released) == set(writer.released)


def test_an_error_in_the_loop_leaves_nothing_running():
    scorer = open_scorer(by_lineage)
    loop = Loop(
        overlapped(Writer(by_lineage), scorer),
        make_strategy(SearchSettings(n=4, width=2)),
    )

    def stop(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run([new_run(new_tree(i)) for i in range(3)], stop)
    assert not workers()
