"""Problems over Ray's workers on this machine: the trees of one process, and deaths survived."""

import pytest

from beamwright import Settings, Solver
from beamwright.cluster.cluster import Cluster
from beamwright.cluster.ray_solving import RaySolving
from beamwright.errors import InputError

OPTIONS = {"n": 8, "width": 4, "max_rounds": 6}
PROBLEMS = [
    (f"p{i}", f"Ann has {i + 3} apples. In May Ann eats {i % 3}. How many?") for i in range(8)
]
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """Two processes of this machine."""
    ray.init(
        "local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False,
        object_store_memory=80_000_000,
    )  # fmt: skip
    yield Cluster(None, replicas=2)
    ray.shutdown()


@pytest.fixture(scope="module")
def spread(cluster):
    with RaySolving(Settings.build(model="bundled", **OPTIONS), cluster) as spread:
        yield spread


def hashes(found):
    return {name: each.to_json()["tree_hash"] for name, each in found}


@pytest.mark.filterwarnings("default")
def test_the_trees_of_one_process(spread):
    with Solver(model="bundled", **OPTIONS) as solver:
        expected = hashes(solver.solve_many(PROBLEMS, in_flight=4))
    assert hashes(spread(PROBLEMS, in_flight="auto")) == expected
    assert len(spread._workers) == 2


@pytest.mark.filterwarnings("default")
def test_a_worker_that_is_killed_loses_nothing(spread):
    expected = hashes(spread(PROBLEMS, in_flight=3))
    found, victim = [], None
    for each in spread(PROBLEMS, in_flight=3):
        found.append(each)
        if victim is None:
            victim = max(spread._workers, key=lambda worker: len(worker.given))
            assert victim.given
            ray.kill(victim.actor)
    assert victim not in spread._workers
    assert len(found) == len(PROBLEMS), "each once"
    assert hashes(found) == expected
    assert hashes(spread(PROBLEMS, in_flight=3)) == expected, "with whoever is there"


@pytest.mark.filterwarnings("default")
def test_a_problem_of_its_own_fails_alone(spread):
    found = dict(spread([*PROBLEMS[:2], ("long", "word " * 2000)], in_flight=2))
    assert isinstance(found["long"], InputError)
    assert set(hashes((name, found[name]) for name in ("p0", "p1"))) == {"p0", "p1"}


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_placed_or_loaded_is_said(cluster):
    settings = Settings.build(model="bundled", **OPTIONS)
    with (
        RaySolving(settings, Cluster(None, replicas=3)) as spread,
        pytest.raises(InputError, match="--replicas 3: the cluster has 2"),
    ):
        list(spread(PROBLEMS, in_flight=1))


@pytest.mark.filterwarnings("default")
def test_starts_that_fail_end_nothing_while_others_work(spread, monkeypatch):
    """A device that is broken is given up; those that are there go on."""
    expected = hashes(spread(PROBLEMS, in_flight=3))
    worker, broken = spread._worker, []

    def failing():
        found = worker()
        ray.kill(found.actor)
        broken.append(found)
        return found

    monkeypatch.setattr(spread, "_worker", failing)
    found = []
    for each in spread(PROBLEMS, in_flight=3):
        found.append(each)
        if not broken:
            ray.kill(spread._workers[0].actor)
    assert hashes(found) == expected
    assert len(spread._workers) == 1
    assert 1 <= len(broken) <= 3
    monkeypatch.undo()
    spread._come()
    assert hashes(spread(PROBLEMS, in_flight=3)) == expected


@pytest.mark.parametrize(
    ("explore", "in_flight", "given"),
    [("continuous", "auto", 4), ("decoupled", "auto", 16), ("continuous", 8, 8)],
)
def test_what_a_replica_is_given(explore, in_flight, given):
    settings = Settings.build(model="bundled", n=64, explore=explore)
    assert RaySolving(settings, Cluster(None))._most_given(in_flight) == given
