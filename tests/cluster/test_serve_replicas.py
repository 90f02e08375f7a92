"""A server over Ray Serve's replicas: whatever dies, everybody gets the answer of one process."""

import os
import signal

import pytest

import engines
from beamwright import Settings
from beamwright.cluster.serving import Cluster
from beamwright.cluster.solver import ClusterSolver
from beamwright.errors import InputError
from served import ASKED, PATIENCE, Served, held, text_of, until

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")


pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # Ray has its own
OPTIONS = {"search": "beam", "n": 8, "width": 4, "max_rounds": 4, "max_step_tokens": 12}


@pytest.fixture(scope="module")
def settings(generator_folder):
    return Settings.build(**engines.tiny_options(generator_folder, **OPTIONS))


@pytest.fixture(scope="module")
def far(settings):
    """Replicas of a cluster that is this machine, with cores as many as Ray is told."""
    ray.init(
        "local", num_cpus=32, include_dashboard=False, configure_logging=False,
        log_to_driver=False, object_store_memory=80_000_000,
    )  # fmt: skip
    with ClusterSolver(Cluster(None, 2), settings) as far:
        yield far
    ray.shutdown()


@pytest.fixture
def server(far):
    with Served(far) as server:
        yield server


def content(response):
    return response.json()["choices"][0]["message"]["content"]


def test_who_is_killed_loses_nothing_and_is_replaced(server, far, generator_folder):
    with held(server) as gate:
        asked = [server.later(seed=seed) for seed in range(4)]
        streams = [server.threads.submit(server.stream, seed=seed) for seed in range(4)]
        until(lambda: gate.reached)
        until(lambda: sum(each.candidates for each in far.roster.replicas()) == 8 * 8)
        victim = far.roster.replicas()[0]
        assert victim.candidates > 0
        os.kill(victim.process, signal.SIGKILL)
    found = [content(each.result(PATIENCE)) for each in asked]
    assert found == [text_of(each.result(PATIENCE)) for each in streams]
    with engines.tiny_solver(generator_folder, **OPTIONS) as solver, Served(solver) as alone:
        assert found == [content(alone.chat(seed=seed)) for seed in range(4)]
    until(lambda: far.roster.deaths == 1 and len(far.roster.replicas()) == 2)
    health = server.http.get("/health").json()
    assert (health["status"], health["replicas_wanted"], len(health["replicas"])) == ("ok", 2, 2)
    assert victim.name not in health["replicas"]


def test_what_cannot_be_placed_or_loaded_is_said(far, settings):
    with pytest.raises(InputError, match="--replicas 900: the cluster has"):
        ClusterSolver(Cluster(None, 900), settings)
    bad = settings.changed(verifier="prm:none-such")
    with pytest.raises(InputError, match="none-such"):
        ClusterSolver(Cluster(None, 1), bad)
    assert far.submit(ASKED, seed=1).result().tree_hash
