"""Executors: both do the same work; whenever the worker gets to finish, the trees are the same."""

import random
import threading

import pytest

from beamwright.counters import Progress
from beamwright.engine import executor as executors
from beamwright.engine.executor import overlaps
from beamwright.engine.timeline import Accounting
from beamwright.errors import (
    BeamwrightError,
    Cancelled,
    CapacityError,
    DeviceMemoryError,
    InputError,
    Interrupted,
    LinkError,
)
from beamwright.kv.link import StreamLink
from beamwright.protocols import Plan, StepDecoded, StepFailed, StepScored
from beamwright.solver import machinery
from beamwright.tree import tree_hash
from beamwright.verify.prm import PrmVerifier
from engines import assert_nothing_allocated, exact_dtype, tiny_solver
from fakes import new_tree
from streams import LateStreams
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


@pytest.mark.parametrize("seed", range(6))
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


# --- whole searches: trees of the plain executor -------------------------------------------------


PROBLEMS = [(i, f"Ann has {i + 3} apples. She eats {i % 3}.") for i in range(6)]
SMALL = {"n": 6, "width": 2, "max_rounds": 4}


@pytest.fixture(scope="module")
def make_pair(generator_folder, verifier_folder):
    """Makes a solver whose steps are scored by a model."""
    return lambda **options: tiny_solver(
        generator_folder, verifier=str(verifier_folder), dtype=exact_dtype(), **SMALL | options
    )


def trees(solver, in_flight=5):
    """Hash and scores of every problem's tree."""
    found = dict(solver.solve_many(PROBLEMS, in_flight=in_flight))
    assert_nothing_allocated(solver)
    assert not [each for each in threading.enumerate() if each.name == "verifier"]
    return {
        name: (each.tree_hash, [node.score for node in each.tree.nodes()])
        for name, each in found.items()
    }


@pytest.fixture(scope="module")
def in_gpu(make_pair):
    """What the plain executor finds where all KV fits, and the KV of five searches at a time."""
    solver = make_pair(executor="plain")
    found = trees(solver)
    return found, sum(model.store.device_peak_bytes for model in solver._machinery.tree_models)


@pytest.fixture
def expected(in_gpu):
    found, _ = in_gpu
    assert len({tree_hash for tree_hash, _ in found.values()}) == len(PROBLEMS)
    return found


@pytest.fixture
def quarter(in_gpu):
    return {"kv_memory": in_gpu[1] // 4, "schedule": "locality", "host_memory": "16MiB"}


@pytest.mark.parametrize(("schedule", "share"), [("locality", 0.25), ("layerwise", 1.0)])
def test_over_streams_that_copy_as_late_as_they_may(
    make_pair, in_gpu, quarter, monkeypatch, schedule, share
):
    """Each thread waits for its own transfers: a copy that nobody waits for is never made."""
    expected, peak = in_gpu
    where = quarter | {"schedule": schedule, "kv_memory": int(share * peak)}
    monkeypatch.setattr(machinery, "StreamLink", lambda *_, **__: StreamLink(LateStreams()))
    assert trees(make_pair(**where, executor="overlapped")) == expected


def test_careless_streams_are_found_out(make_pair, expected, quarter, monkeypatch):
    monkeypatch.setattr(StreamLink, "wait", lambda self, transfers: 0.0)
    monkeypatch.setattr(
        machinery, "StreamLink", lambda *_, **__: StreamLink(LateStreams(careless=True))
    )
    assert trees(make_pair(**quarter, executor="overlapped")) != expected


def test_every_instant_is_counted_once(make_pair):
    solver = make_pair(executor="overlapped")
    for _, solution in solver.solve_many(PROBLEMS, in_flight=6):
        time = solution.time
        parts = time.decode_s + time.verify_s + time.both_s + time.schedule_s + time.stall_s
        assert parts + time.other_s == pytest.approx(time.total_s)
        assert min(vars(time).values()) >= 0


@pytest.mark.parametrize(
    ("error", "verifiers"),
    [(KeyboardInterrupt, 1), (InputError, 1), (LinkError, 2), (InputError, 2)],
)
def test_what_goes_wrong_on_the_worker(make_pair, expected, monkeypatch, error, verifiers):
    """An error of the verifier's ends one tree, all others all; nothing is left either way."""
    real, calls = PrmVerifier.score, []

    def score(self, nodes):
        calls.append(nodes)
        if len(calls) == 7:
            raise error("no score")
        return real(self, nodes)

    solver = make_pair(executor="overlapped", verifiers=verifiers)
    with monkeypatch.context() as patch:
        patch.setattr(PrmVerifier, "score", score)
        if error is InputError:
            found = dict(solver.solve_many(PROBLEMS, in_flight=5))
            (broken,) = [name for name, each in found.items() if isinstance(each, InputError)]
            for name in expected.keys() - {broken}:
                assert found[name].tree_hash == expected[name][0]
        else:
            with pytest.raises(Interrupted if error is KeyboardInterrupt else LinkError):
                dict(solver.solve_many(PROBLEMS, in_flight=5))
    assert_nothing_allocated(solver)
    assert trees(solver) == expected


def test_a_caller_that_goes_away_leaves_no_thread(make_pair):
    solver = make_pair(executor="overlapped")
    found = solver.solve_many(PROBLEMS, in_flight=5)
    next(found)
    found.close()
    assert_nothing_allocated(solver)
    assert not [each for each in threading.enumerate() if each.name == "verifier"]


# --- several verifiers -----------------------------------------------------------------------


def test_several_verifiers_score_at_a_time_each_its_own_trees(make_pair, expected, monkeypatch):
    """Their first calls wait for one another; a tree stays where it is."""
    real, together, scored_by = PrmVerifier.score, threading.Barrier(3), {}

    def score(self, nodes):
        if self not in scored_by.values():
            scored_by[nodes[0].root] = self
            together.wait(600)
        assert all(scored_by.setdefault(node.root, self) is self for node in nodes)
        return real(self, nodes)

    monkeypatch.setattr(PrmVerifier, "score", score)
    assert trees(make_pair(executor="auto", verifiers=3, explore="decoupled")) == expected
    assert len(set(scored_by.values())) == 3


def test_several_verifiers_divide_the_kv(make_pair, expected, quarter):
    half = quarter | {"kv_memory": 2 * quarter["kv_memory"], "executor": "auto", "verifiers": 2}
    with make_pair(**half) as solver:
        assert trees(solver) == expected
        _, *verifiers = [model.budget.total_bytes for model in solver._machinery.tree_models]
        assert verifiers == [solver._machinery.plan.verifier_kv_bytes // 2] * 2
        used = solver.usage()
        assert used.levels["verifier", "device"].budget_bytes == sum(verifiers)
        assert used.counters["verifier"].loaded_tokens > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verifier": "logprob"}, "does nothing with --verifier logprob, which has no model"),
        ({"verifier": lambda nodes: [0.5 for _ in nodes]}, "which has no model"),
        ({"executor": "plain"}, "does nothing with --executor plain"),
        ({"decoder": "transformers"}, "transformers' modules, which one thread at a time may call"),
    ],
)
def test_who_cannot_be_several_says_so(make_solver, verifier_folder, options, said):
    given = {"verifier": str(verifier_folder), "executor": "auto", **options}
    with pytest.raises(InputError, match=said) as caught:
        make_solver(verifiers=2, **given)
    assert str(caught.value).startswith("--verifiers 2: ")
    assert "\n" not in str(caught.value)


# --- who has a worker ------------------------------------------------------------------------


class Own:
    """A user's verifier; remembers the threads that it ran on."""

    def __init__(self):
        self.threads = set()

    def score(self, nodes):
        self.threads.add(threading.current_thread().name)
        return [0.5 for _ in nodes]


class OwnBeside(Own):
    beside_decoding = True


@pytest.mark.parametrize(("kind", "thread"), [(Own, "MainThread"), (OwnBeside, "verifier")])
def test_a_users_verifier_has_a_worker_only_if_it_says_so(make_solver, kind, thread):
    verifier = kind()
    solver = make_solver(verifier=verifier, executor="overlapped", **SMALL)
    list(solver.solve_many(PROBLEMS[:4], in_flight=4))
    assert verifier.threads == {thread}


class Hangs(OwnBeside):
    """Does not come back from a problem's first step before it is late."""

    def __init__(self, problem_id):
        super().__init__()
        self.problem_id, self.stuck, self.late = problem_id, threading.Event(), threading.Event()

    def score(self, nodes):
        if nodes[0].problem_id == self.problem_id:
            self.stuck.set()
            assert self.late.wait(600)
        return [0.1 * node.lineage[-1] for node in nodes]


@pytest.fixture
def stuck(make_solver, monkeypatch):
    """A solver whose verifier never comes back from problem 3."""
    monkeypatch.setattr(executors, "PATIENCE_S", 0.0)
    solver = make_solver(verifier=Hangs(3), executor="overlapped", dtype="float64", **SMALL)
    hangs = solver.verifier.function
    yield solver, hangs
    hangs.late.set()
    for thread in threading.enumerate():
        if thread.name == "verifier":
            thread.join()
    assert_nothing_allocated(solver)


def without_it(make_solver):
    solver = make_solver(verifier=Hangs(None), dtype="float64", **SMALL)
    return {name: each.tree_hash for name, each in solver.solve_many(PROBLEMS, in_flight=5)}


def test_a_verifier_that_hangs_costs_its_own_problem_its_scores(make_solver, stuck):
    solver, _ = stuck
    handles = {
        name: solver.submit(text, problem_id=name, deadline=0.5 if name == 3 else None)
        for name, text in PROBLEMS
    }
    found = {name: handle.result(600) for name, handle in handles.items()}
    cut = found.pop(3)
    assert "--deadline" in cut.reason_fewer
    assert {each.score for each in cut.candidates} == {None}
    expected = without_it(make_solver)
    assert {name: each.tree_hash for name, each in found.items()} | {3: expected[3]} == expected


def test_a_solver_closes_while_its_verifier_hangs(stuck):
    solver, hangs = stuck
    handle = solver.submit(PROBLEMS[3][1], problem_id=3)
    assert hangs.stuck.wait(600)
    solver.close()
    with pytest.raises(Cancelled):
        handle.result(0.0)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(executors, "num_cores", lambda: 2)


def chosen(solver, **changes):
    """Does this solver overlap, were it run so?"""
    how = {"in_flight": 4, "exact": True, "num_threads": 1, **changes}
    parts = solver._machinery
    models = (parts.generator, *parts.scorers)
    return overlaps(solver.settings.schedule, solver.verifier, models, **how)


def test_auto_overlaps_only_where_it_was_measured_to_be_faster(make_pair, make_solver, two_cores):
    solver = make_pair(executor="auto")
    assert chosen(solver)
    assert not chosen(solver, in_flight=1)
    assert not chosen(solver, exact=False)
    assert not chosen(solver, num_threads=2)
    assert not chosen(make_solver(verifier="logprob", executor="auto"))
    assert chosen(make_solver(verifier=OwnBeside(), executor="auto"), in_flight=1), "it may hang"
    solver.generator.store.outgrown = True
    assert not chosen(solver)
