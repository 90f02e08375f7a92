"""A server over Ray Serve's replicas: whatever dies, everybody gets the answer of one process.

All tests of the server run over replicas, too: `python -m pytest tests/serve --replicas 2`.
"""

import os
import signal
import threading

import pytest

import engines
from beamwright import Settings
from beamwright.cluster.serving import Cluster
from beamwright.errors import InputError
from clusters import kept_replicas
from served import ASKED, PATIENCE, Served, held, text_of, until

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # Ray has its own
OPTIONS = {"search": "beam", "n": 8, "width": 4, "max_rounds": 4, "max_step_tokens": 12}


@pytest.fixture(scope="module")
def keep():
    with kept_replicas(2) as keep:
        yield keep


@pytest.fixture(scope="module")
def far(keep, generator_folder):
    settings = Settings.build(**engines.tiny_options(generator_folder, **OPTIONS))
    with keep(settings) as far:
        yield far


@pytest.fixture
def server(far):
    with Served(far) as server:
        yield server


@pytest.fixture(scope="module")
def alone(generator_folder):
    """What one process says."""
    with engines.tiny_solver(generator_folder, **OPTIONS) as solver, Served(solver) as server:
        yield server


def content(response):
    return response.json()["choices"][0]["message"]["content"]


def beside(asks):
    """All at a time; what they return, in order."""
    found = [None] * len(asks)

    def run(place, ask):
        found[place] = ask()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(asks)]
    for thread in threads:
        thread.start()
    return threads, found


def test_who_is_killed_loses_nothing_and_is_replaced(server, far, alone):
    until(lambda: len(far.roster.replicas()) == 2, PATIENCE)
    deaths = far.roster.deaths
    with held() as gate:
        server.queue.listeners.append(gate)
        asks = [lambda seed=seed: server.chat(seed=seed) for seed in range(6)]
        asks += [lambda seed=seed: text_of(server.stream(seed=seed)) for seed in range(6)]
        threads, found = beside(asks)
        until(lambda: gate.reached and len(server.queue.jobs) == 12)
        until(lambda: sum(each.candidates for each in far.roster.replicas()) == 12 * 8)
        victim = far.roster.replicas()[0]
        assert victim.candidates > 0
        os.kill(victim.process, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE)
    expected = [content(alone.chat(seed=seed)) for seed in range(6)]
    assert [content(response) for response in found[:6]] == expected
    assert found[6:] == expected
    until(lambda: far.roster.deaths == deaths + 1, PATIENCE)
    until(lambda: len(far.roster.replicas()) == 2, PATIENCE)
    health = server.http.get("/health").json()
    assert (health["status"], health["replicas_wanted"], len(health["replicas"])) == ("ok", 2, 2)
    assert victim.name not in health["replicas"]
    metrics = server.http.get("/metrics").text
    assert f"beamwright_replica_deaths_total {far.roster.deaths}.0" in metrics
    assert 'beamwright_replica_candidates{replica="' in metrics


def test_with_nobody_there_searches_wait_until_somebody_is(server, far, alone):
    until(lambda: len(far.roster.replicas()) == 2, PATIENCE)
    deaths = far.roster.deaths
    for replica in far.roster.replicas():
        os.kill(replica.process, signal.SIGKILL)
    threads, found = beside([lambda: server.chat(seed=1), lambda: server.chat(seed=2)])
    for thread in threads:
        thread.join(PATIENCE)
    assert [content(each) for each in found] == [content(alone.chat(seed=s)) for s in (1, 2)]
    until(lambda: far.roster.deaths == deaths + 2 and len(far.roster.replicas()) == 2, PATIENCE)


def test_a_run_of_many_problems_survives_a_death(far, alone, generator_folder):
    until(lambda: len(far.roster.replicas()) == 2, PATIENCE)
    problems = [(f"p{i}", f"Ann has {i + 3} apples. How many?", {}) for i in range(12)]
    with engines.tiny_solver(generator_folder, **OPTIONS) as solver:
        expected = {name: solver.solve(text, problem_id=name) for name, text, _ in problems}
    found = {}
    for name, solution in far.solve_many(problems, tells="tree"):
        found[name] = solution
        if len(found) == 1:
            os.kill(far.roster.replicas()[0].process, signal.SIGKILL)
    assert {name: each.tree_hash for name, each in found.items()} == {
        name: each.tree_hash for name, each in expected.items()
    }
    until(lambda: len(far.roster.replicas()) == 2, PATIENCE)


def test_who_hangs_up_leaves_no_kv_in_any_replica(server, far):
    with held() as gate:
        server.queue.listeners.append(gate)
        jobs = []
        threads, _ = beside([lambda seed=seed: server.chat(seed=seed) for seed in range(8)])
        until(lambda: len(server.queue.jobs) == 8 and gate.reached)
        jobs = list(server.queue.jobs.values())
        for job in jobs:
            job.cancel()
    for thread in threads:
        thread.join(PATIENCE)
    assert {job.state for job in jobs} == {"cancelled"}
    until(lambda: not any(each.used_bytes for each in far.usage().levels.values()))
    assert not any(each.candidates for each in far.roster.replicas())


def test_what_cannot_be_placed_or_loaded_is_said(far, generator_folder):
    from beamwright.cluster.solver import ClusterSolver

    settings = Settings.build(**engines.tiny_options(generator_folder, **OPTIONS))
    with pytest.raises(InputError, match="--replicas 900: the cluster has"):
        ClusterSolver(Cluster(None, 900), settings)
    bad = settings.changed(verifier="prm:none-such")
    with pytest.raises(InputError, match="none-such"):
        ClusterSolver(Cluster(None, 1), bad)
    assert far.submit(ASKED, seed=1).result().tree_hash
