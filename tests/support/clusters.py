"""Clusters on this machine: replicas in this very process, which die when told to, and Ray."""

import asyncio
from contextlib import contextmanager

from beamwright.cluster.replica import Replica


class Died(Exception):
    pass


class Stream:
    """News of a search at one replica, which may die."""

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
                given.roster.give(given, self._replica)
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


@contextmanager
def local_ray(cpus):
    """A cluster of this process. cpus: that Ray counts, however many there are."""
    import ray

    ray.init(
        "local", num_cpus=cpus, include_dashboard=False, configure_logging=False,
        log_to_driver=False, object_store_memory=80_000_000,
    )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()
