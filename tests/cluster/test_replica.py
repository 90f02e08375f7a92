"""A replica: errors that cross processes, as many problems in flight as it is told, and its end."""

import asyncio
import pickle

import pytest

import engines
from beamwright import Settings
from beamwright.cluster.replica import Replica, picklable_error
from beamwright.errors import CapacityError, InputError, NotFiniteError


class Ours(InputError):
    """Of a user's own file."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("x"), InputError),
        (NotFiniteError("x"), NotFiniteError),
        (CapacityError("x", 1, 2, 3), CapacityError),
        (Ours("x"), InputError),
    ],
)
def test_errors_keep_whose_fault_they_are(error, kind):
    error.partial = object()
    found = pickle.loads(pickle.dumps(picklable_error(error)))
    assert type(found) is kind
    assert (str(found), found.partial) == (str(error), None)
    assert vars(found).keys() == vars(error).keys() - {"partial"}


@pytest.mark.parametrize(("n", "in_flight", "most"), [(64, None, 1), (64, 3, 3)])
def test_as_many_are_in_flight_as_it_is_told(generator_folder, n, in_flight, most):
    options = engines.tiny_options(
        generator_folder, n=n, width=4, delimiter="e", max_tokens=40, max_rounds=4,
        kv_memory="64MiB", max_step_tokens=12,
    )  # fmt: skip
    settings = Settings.build(**options).model_dump(mode="json", exclude_unset=True)
    solver = Replica(settings, in_flight=in_flight)._solver
    handles, seen = [], []

    def count(report):
        seen.append(sum(handle.begun and not handle.done() for handle in handles))

    for i in range(4):
        handles.append(solver.submit(f"Problem {i}.", problem_id=i, on_round=count))
    for handle in handles:
        handle.result(60)
    assert max(seen) == most
    solver.close()


def test_a_replica_that_nobody_asks_for_any_more_ends_itself(generator_folder, monkeypatch):
    options = engines.tiny_options(generator_folder)
    settings = Settings.build(**options).model_dump(mode="json", exclude_unset=True)

    async def asked():
        gone = asyncio.Event()
        replica = Replica(settings, abandoned=gone.set)
        for patience_s in (0.0, 60.0):
            monkeypatch.setattr("beamwright.cluster.replica.ABANDONED_S", patience_s)
            await replica.heartbeat()
        await asyncio.sleep(0)
        assert not gone.is_set(), "it has been asked for since"
        monkeypatch.setattr("beamwright.cluster.replica.ABANDONED_S", 0.0)
        await replica.heartbeat()
        await asyncio.wait_for(gone.wait(), 60)
        replica._solver.close()

    asyncio.run(asked())
