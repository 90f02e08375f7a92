"""Engines elsewhere as one: the trees of one process, deaths survived, errors and ends as there."""

import asyncio
import threading

import pytest

import engines
from beamwright import Settings
from beamwright.cluster import solver as cluster_solver
from beamwright.cluster.replica import Replica
from beamwright.cluster.serving import Cluster
from beamwright.cluster.solver import MOST_DEATHS, ClusterSolver
from beamwright.errors import (
    BeamwrightError,
    Cancelled,
    InputError,
    ProblemTooLongError,
    UnavailableError,
)
from beamwright.page.runs import PageChanges
from beamwright.tree import tree_hash
from served import Served, until


class Died(Exception):
    pass


class Stream:
    """SearchMessage of a search at one replica, which may die."""

    def __init__(self, serving, given):
        self._serving, self._given, self._news, self._replica = serving, given, None, None

    def __aiter__(self):
        return self

    async def __anext__(self):
        serving, given = self._serving, self._given
        while self._news is None:
            ranked = given.roster.ranked(serving.engines)
            if ranked:
                self._replica = ranked[0]
                given.roster.assign(given, self._replica)
                serving.sent.append((self._replica, given))
                self._news = serving.engines[self._replica].search(given)
                if given.problem in serving.deadly:
                    serving.kill(self._replica, asyncio.get_running_loop())
            else:
                await asyncio.sleep(0.01)
        coming = asyncio.ensure_future(anext(self._news))
        dead = asyncio.ensure_future(serving.dead[self._replica].wait())
        await asyncio.wait({coming, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            coming.cancel()
            raise Died(f"{self._replica} is gone")
        dead.cancel()
        return coming.result()

    def cancel(self):
        if self._news is not None:
            self._serving.closing.append(asyncio.ensure_future(self._news.aclose()))


class FakeServing:
    """A `RayServing` of so many Replicas. sent: replica and search, in order.

    deadly: problems that kill whoever has them.
    """

    died = (Died,)

    def __init__(self, settings, number=2):
        self._settings, self._number = settings.model_dump(mode="json", exclude_unset=True), number
        self.engines, self.dead, self.sent = {}, {}, []
        self.deadly, self.closing = [], []

    def start(self):
        for name in "abcdef"[: self._number]:
            self.add(name)
        return self._number

    def add(self, name):
        self.dead[name] = asyncio.Event()
        self.engines[name] = Replica(self._settings, (), lambda: name)

    def kill(self, name, loop):
        del self.engines[name]
        loop.call_soon_threadsafe(self.dead[name].set)

    def stop(self):
        for engine in self.engines.values():
            engine._solver.close()

    def search(self, given):
        return Stream(self, given)

    async def broadcast(self, method, *arguments):
        engines = list(self.engines.values())
        return [await getattr(engine, method)(*arguments) for engine in engines]


PROBLEM = "Ann has 12 apples. She eats 3."
OPTIONS = {"search": "beam", "n": 8, "width": 4, "max_rounds": 6}


@pytest.fixture
def make(generator_folder):
    """A ClusterSolver over a fake; both."""
    made = []

    def make(number=2, in_flight=None, **options):
        given = engines.tiny_options(generator_folder, **{**OPTIONS, **options})
        settings = Settings.build(**given)
        serving = FakeServing(settings, number)
        made.append(ClusterSolver(Cluster(), settings, in_flight=in_flight, serving=serving))
        return made[-1], serving

    yield make
    for far in made:
        far.close()


@pytest.fixture
def alone(generator_folder):
    with engines.tiny_solver(generator_folder, **OPTIONS) as solver:
        yield solver


class Stop:
    """A listener in whose round the search stays here, while its replica goes on."""

    def __init__(self, at=1):
        self.at, self.rounds, self.shown, self.page = at, [], [], PageChanges()
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, report):
        self.rounds.append(report.round)
        self.shown.append(self.page.changes(report.tree))
        if report.round == self.at:
            self.reached.set()
            assert self.opened.wait(30)


def test_its_trees_are_those_of_one_process(make, alone):
    far, serving = make()
    handles = [far.submit(PROBLEM, seed=seed) for seed in range(6)]
    for seed, handle in enumerate(handles):
        found, expected = handle.result(60), alone.solve(PROBLEM, seed=seed)
        assert found.tree_hash == tree_hash(found.tree) == expected.tree_hash
        assert [c.text for c in found.candidates] == [c.text for c in expected.candidates]
    assert {replica for replica, _ in serving.sent} == {"a", "b"}
    assert far.exact == alone.exact
    asked = far.settings  # the front keeps what was asked, and each engine settles it for itself
    shared = ("search", "sampling", "step", "stop")
    assert [getattr(asked, s) for s in shared] == [getattr(alone.settings, s) for s in shared]
    assert far.prompt_tokens(PROBLEM) == alone.prompt_tokens(PROBLEM)


def test_scores_of_given_steps_are_those_of_one_process(make, generator_folder, verifier_folder):
    options = {**OPTIONS, "verifier": str(verifier_folder)}
    far, serving = make(**options)
    paths = [["one, e", "two"], ["one, e", "three"]]
    with engines.tiny_solver(generator_folder, **options) as solver:
        expected = solver.score_many(PROBLEM, paths, aggregate="mean")
    handles = [far.submit_score(PROBLEM, paths, aggregate="mean", deadline="60s") for _ in "ab"]
    assert [handle.result(60).candidates for handle in handles] == [expected, expected]
    assert {replica for replica, _ in serving.sent} == {"a", "b"}
    with pytest.raises(InputError, match="path 0: must be a list of at least one step"):
        far.submit_score(PROBLEM, [[]])
    with pytest.raises(ProblemTooLongError, match=r"path 0.* tokens long"):
        far.submit_score(PROBLEM, [["two"] * 1025]).result(60)
    with pytest.raises(InputError, match="aggregate"):
        far.submit_score(PROBLEM, paths, aggregate="most")
    far, _ = make()
    with pytest.raises(InputError, match="--verifier logprob scores only sampled tokens"):
        far.submit_score(PROBLEM, paths).result(60)


def test_a_search_whose_replica_dies_goes_on_elsewhere_and_tells_no_round_twice(make, alone):
    far, serving = make()
    stop = Stop(at=2)
    handle = far.submit(PROBLEM, seed=3, on_round=stop)
    other = far.submit(PROBLEM, seed=4)
    assert stop.reached.wait(30)
    replica = serving.sent[0][0]
    serving.kill(replica, far._loop)
    stop.opened.set()
    here = Stop(at=None)
    expected = alone.solve(PROBLEM, seed=3, on_round=here)
    assert handle.result(60).tree_hash == expected.tree_hash
    assert stop.rounds == here.rounds == list(range(1, expected.rounds + 1))
    assert stop.shown == here.shown
    assert other.result(60).tree_hash == alone.solve(PROBLEM, seed=4).tree_hash
    assert [state.name for state in far.roster.replicas()] == [{"a": "b", "b": "a"}[replica]]
    assert far.roster.deaths == 1
    assert far.usage().engine.row_tokens > 0
    assert not any(each.candidates for each in far.roster.replicas())


def test_a_search_that_kills_its_replicas_ends(make):
    far, serving = make(number=MOST_DEATHS + 1)
    serving.deadly.append(PROBLEM)
    with pytest.raises(BeamwrightError, match="3 replicas died during this search"):
        far.submit(PROBLEM).result()
    assert len(serving.engines) == 1
    assert far.submit("1+1", seed=3).result().tree_hash


def test_without_a_replica_it_waits_for_one_and_no_longer_than_its_time(make, monkeypatch):
    monkeypatch.setattr(cluster_solver, "_PLACE_S", 0.05)
    far, serving = make(number=1)
    serving.kill("a", far._loop)
    with pytest.raises(BeamwrightError, match="no replica took"):
        far.submit(PROBLEM, deadline=0.05).result()
    waiting = far.submit(PROBLEM, seed=1)
    serving.add("b")
    assert waiting.result(60).tree_hash


def test_what_is_cancelled_ends_with_the_best_until_then(make):
    far, _ = make()
    stop = Stop()
    handle = far.submit(PROBLEM, on_round=stop, seed=1)
    assert stop.reached.wait(30)
    handle.cancel()
    stop.opened.set()
    with pytest.raises(Cancelled) as caught:
        handle.result(30)
    assert caught.value.partial.tree.root.token_ids
    assert not any(each.used_bytes for each in far.usage().levels.values())


def test_errors_are_those_of_one_process(make, alone):
    far, _ = make()
    for options in ({"model": "x"}, {"n": -1}, {"search": "none such"}, {"priority": "high"}):
        with pytest.raises(InputError) as there:
            alone.submit(PROBLEM, **options)
        with pytest.raises(InputError, match=r".") as here:
            far.submit(PROBLEM, **options)
        assert str(here.value) == str(there.value)
    for solver in (far, alone):
        with pytest.raises(ProblemTooLongError):
            solver.submit("word " * 500).result()
    with pytest.raises(InputError, match="must be a text"):
        far.submit(3)


def test_a_bug_in_a_replica_is_no_error_of_ours(make, monkeypatch):
    far, serving = make(number=1)
    monkeypatch.setattr(
        "beamwright.solver.scheduler.RequestScheduler._record_outcomes", lambda *args: 1 // 0
    )
    for _ in range(3):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            far.submit(PROBLEM).result()
    health = serving.engines["a"].check_health()
    with pytest.raises(RuntimeError, match="3 searches in a row"):
        health.send(None)


def test_who_closes_it_leaves_nobody_waiting(make):
    far, _ = make()
    stop = Stop()
    handle = far.submit(PROBLEM, on_round=stop)
    assert stop.reached.wait(30)
    stop.opened.set()
    far.close()
    assert handle.done()
    far.close()


# --- many problems ---------------------------------------------------------------------------


def problems(count):
    return [
        (f"p{i}", f"Ann has {i + 3} apples. In May Ann eats {i % 3}.", {}) for i in range(count)
    ]


@pytest.mark.parametrize("tells", ["tree", "nothing"])
def test_many_problems_have_the_trees_of_one_process_and_a_death_loses_nothing(make, alone, tells):
    far, serving = make()
    expected = {name: alone.solve(text, problem_id=name) for name, text, _ in problems(8)}
    found = {}
    for name, solution in far.solve_many(problems(8), tells=tells):
        found[name] = solution
        if len(found) == 1:
            serving.kill(next(iter(serving.engines)), far._loop)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        engines.assert_same(each, expected[name])
        assert len(list(each.tree.nodes())) > 1 or tells == "nothing"


AGAIN = {"search": "aggregate", "aggregate_rounds": 1, "aggregate_prompt": "{solutions}"}


def test_a_problem_of_its_own_fails_alone_and_options_are_its_own(make, alone):
    far, _ = make()
    given = [("long", "word " * 2000, {}), ("seed", PROBLEM, {"seed": 5}), ("p", PROBLEM, {})]
    given.append(("again", PROBLEM, AGAIN))
    found = dict(far.solve_many(given))
    assert isinstance(found["long"], InputError)
    for name, options in (("seed", {"seed": 5}), ("p", {}), ("again", AGAIN)):
        assert found[name].tree_hash == alone.solve(PROBLEM, problem_id=name, **options).tree_hash


def test_a_replica_has_one_more_than_what_is_in_flight_and_the_rest_waits_here(make):
    far, serving = make(number=1, in_flight=2)
    found = far.solve_many(problems(8))
    next(found)
    assert len(serving.sent) <= 4
    assert len(dict(found)) == 7


def test_a_run_whose_replicas_are_gone_ends_with_what_is_done(make, monkeypatch):
    monkeypatch.setattr(cluster_solver, "_WAIT_S", 0.05)
    far, serving = make(number=1, in_flight=1)
    far._loading_s = 0.0
    found = far.solve_many(problems(6))
    assert next(found)[1].tree_hash
    serving.kill("a", far._loop)
    monkeypatch.setattr(cluster_solver, "_ABSENT_S", 0.2)
    with pytest.raises(UnavailableError, match="no replica was available for") as error:
        list(found)
    assert "\n" not in str(error.value)


def test_a_server_says_who_is_there(make):
    far, serving = make()
    with Served(far) as server:
        assert server.chat(PROBLEM, seed=1).status_code == 200
        found = server.http.get("/health").json()
        assert (found["status"], found["replicas"]) == ("ok", ["a", "b"])
        for name in "ab":
            serving.kill(name, far._loop)
        until(lambda: not far.roster.replicas())
        assert server.http.get("/health").json()["status"] == "degraded"
        metrics = server.http.get("/metrics").text
        for line in ("replica_deaths_total 2.0", "replicas 0.0", "kv_budget_bytes"):
            assert f"beamwright_{line}" in metrics
