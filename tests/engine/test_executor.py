"""Executors: both do the same work; whenever the worker gets to finish, the trees are the same."""

import random
import threading

import pytest

from beamwright.counters import Progress
from beamwright.engine import executor as executors
from beamwright.engine.executor import has_own_thread
from beamwright.errors import BeamwrightError, Cancelled, InputError, Interrupted, LinkError
from beamwright.kv.link import StreamLink
from beamwright.solver import machinery
from beamwright.tree import tree_hash
from beamwright.verify.prm import PrmVerifier
from engines import assert_nothing_allocated, exact_dtype, tiny_solver
from fakes import new_tree
from streams import LateStreams
from worker_parts import OPEN, Scorer, Writer, by_lineage, overlapped, plain, search, workers


def test_a_tree_that_has_failed_is_not_scored_any_more():
    """Its other steps may wait already, where steps are scored as they end."""
    tree, other = new_tree(), new_tree()
    first, second = tree.expand(tree.root, 2)
    (third,) = other.expand(other.root, 1)

    def script(node):
        if node is first:
            raise InputError("no step")
        return None, 0.5

    scorer = Scorer(script, opened=3)
    executor = plain(Writer(), scorer)
    for batch in ((first,), (second,), (third,)):
        executor.verify(batch)
    assert [event.node for _ in range(3) for event in executor.wait()] == [first, third]
    assert scorer.scored == [(first,), (third,)]


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
        ({"verifier": "logprob"}, "has no effect with --verifier logprob, which has no model"),
        ({"verifier": lambda nodes: [0.5 for _ in nodes]}, "which has no model"),
        ({"executor": "plain"}, "has no effect with --executor plain"),
        ({"decoder": "transformers"}, "transformers' modules in one thread only"),
    ],
)
def test_who_cannot_be_several_says_so(make_solver, verifier_folder, options, said):
    given = {"verifier": str(verifier_folder), "executor": "auto", **options}
    with pytest.raises(InputError, match=said) as caught:
        make_solver(verifiers=2, **given)
    assert str(caught.value).startswith("--verifiers 2 ")
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
    solver = make_solver(verifier=Hangs(None), dtype="float64", **SMALL)
    expected = {name: each.tree_hash for name, each in solver.solve_many(PROBLEMS, in_flight=5)}
    assert {name: each.tree_hash for name, each in found.items()} | {3: expected[3]} == expected


def test_a_solver_closes_while_its_verifier_hangs(stuck):
    solver, hangs = stuck
    handle = solver.submit(PROBLEMS[3][1], problem_id=3)
    assert hangs.stuck.wait(600)
    solver.close()
    with pytest.raises(Cancelled):
        handle.result(0.0)


def chosen(solver, **changes):
    """Does this solver overlap, were it run so?"""
    how = {"in_flight": 4, "exact": True, "num_threads": 1, **changes}
    parts = solver._machinery
    models = (parts.generator, *parts.scorers)
    return has_own_thread(solver.settings.schedule, solver.verifier, models, **how)


def test_auto_overlaps_only_where_it_was_measured_to_be_faster(make_pair, make_solver, monkeypatch):
    monkeypatch.setattr(executors, "num_cores", lambda: 2)
    solver = make_pair(executor="auto")
    assert chosen(solver)
    assert not chosen(solver, in_flight=1)
    assert not chosen(solver, exact=False)
    assert not chosen(solver, num_threads=2)
    assert not chosen(make_solver(verifier="logprob", executor="auto"))
    assert chosen(make_solver(verifier=OwnBeside(), executor="auto"), in_flight=1), "it may hang"
    solver.generator.store.outgrown = True
    assert not chosen(solver)
