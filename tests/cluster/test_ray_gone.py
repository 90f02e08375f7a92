"""A cluster that dies under a run: it ends in one line, with what is done. No Ray."""

from types import SimpleNamespace

import pytest

from beamwright import Settings
from beamwright.cluster import ray_cluster, ray_solving
from beamwright.cluster.cluster import Cluster
from beamwright.cluster.ray_solving import RaySolving
from beamwright.errors import UnavailableError

PROBLEMS = [(f"p{i}", "?") for i in range(4)]


class Gone(Exception):
    pass


class Call:
    """A method of an actor; what it is given resolves when the script says so."""

    def __init__(self, ray, name):
        self._ray, self._name = ray, name

    def remote(self, *of, **options):
        ref = (self._name, *of[:1], len(self._ray.refs))
        self._ray.refs.append(ref)
        return ref


class FakeRay:
    """Two replicas that load; the first problem is solved, and then the node dies.

    alive: what is said of the node from then on. A wait for nothing takes its time on `clock`.
    """

    exceptions = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, RayTaskError=Gone)

    def __init__(self, alive):
        self.refs, self.clock, self.dead, self.killed = [], 0.0, False, []
        self.loading_s = 0.0
        self._alive = alive

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2}

    def nodes(self):
        return [{"Alive": self._alive or not self.dead}]

    def remote(self, kind):
        return SimpleNamespace(options=lambda **needs: SimpleNamespace(remote=self.actor))

    def actor(self, *of):
        return SimpleNamespace(**{n: Call(self, n) for n in ("solve", "ready", "give_back")})

    def kill(self, actor):
        self.killed.append(actor)

    def wait(self, refs, timeout):
        ready = [ref for ref in refs if self.resolves(ref)]
        if not ready:
            self.clock += timeout
        return ready[:1], [ref for ref in refs if ref not in ready[:1]]

    def resolves(self, ref):
        if ref[0] == "ready":
            return not self.dead and self.clock >= self.loading_s
        return self.dead or ref[1] == "p0"

    def get(self, ref):
        if isinstance(ref, list):
            return [None for each in ref]
        if self.dead:
            raise Gone("the node is gone\nits raylet has died")
        self.dead = True
        return "solved"


@pytest.fixture
def spread_on(monkeypatch):
    def make(ray):
        monkeypatch.setattr(ray_cluster, "_import_ray", lambda: ray)
        monkeypatch.setattr(ray_solving.time, "monotonic", lambda: ray.clock)
        return RaySolving(Settings.build(model="bundled", n=4), Cluster(None, replicas=2))

    return make


@pytest.mark.parametrize(
    ("alive", "waited_s", "why"),
    [(True, 60, "no replica has been there for 61 s"), (False, 0, "all nodes of the cluster are")],
)
def test_a_run_whose_replicas_are_gone_ends_with_what_is_done(spread_on, alive, waited_s, why):
    ray = FakeRay(alive)
    with spread_on(ray) as spread:
        found = spread(PROBLEMS, in_flight=1)
        assert next(found) == ("p0", "solved")
        with pytest.raises(UnavailableError, match=why) as error:
            next(found)
    assert "\n" not in str(error.value)
    assert waited_s <= ray.clock <= waited_s + 2
    assert ray.killed


def test_replicas_that_take_long_to_load_are_waited_for_as_long(spread_on):
    ray = FakeRay(alive=True)
    ray.loading_s = 50.0
    with spread_on(ray) as spread, pytest.raises(UnavailableError, match="for 101 s"):
        list(spread(PROBLEMS, in_flight=1))
