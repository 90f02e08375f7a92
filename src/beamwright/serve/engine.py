"""Engine: whoever searches for a server; a Solver, or replicas that are as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from beamwright.cluster.replica_state import ReplicaState
from beamwright.config import Settings
from beamwright.conversation import Problem
from beamwright.counters import Usage
from beamwright.models import TextCodec
from beamwright.solver.handle import Handle
from beamwright.solver.solver import Solver


class Replicas(Protocol):
    """What a server needs of them beside what it asks of a Solver.

    submit: as `Solver.submit`. wanted: how many there are to be; deaths: of them; restarts: of
    searches that had to begin again elsewhere.
    """

    settings: Settings
    codec: TextCodec | None
    context: int
    wanted: int
    deaths: int
    restarts: int

    @property
    def submit(self) -> Callable[..., Handle]: ...

    def prompt_tokens(self, problem: Problem, /) -> int: ...

    def usage(self) -> Usage:
        """Of all together."""
        ...

    def replicas(self) -> Sequence[ReplicaState]:
        """Those that are there."""
        ...


Engine = Solver | Replicas


def health(engine: Engine) -> dict[str, Any]:
    """That the server is alive; of replicas, each."""
    if isinstance(engine, Solver):
        return {"status": "ok"}
    found = engine.replicas()
    each = [
        {
            "name": replica.name,
            "searches": replica.searches,
            "queued_tokens": replica.tokens,
            "kv_bytes": sum(
                level.used_bytes
                for (_, tier), level in replica.usage.levels.items()
                if tier == "device"
            ),
        }
        for replica in found
    ]
    status = "ok" if len(found) >= engine.wanted else "degraded"
    return {"status": status, "replicas_wanted": engine.wanted, "replicas": each}


def takes_searches(engine: Engine) -> bool:
    """False where no replica is there; who asks all the same waits for one."""
    return isinstance(engine, Solver) or bool(engine.replicas())
