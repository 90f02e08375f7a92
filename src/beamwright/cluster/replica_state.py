"""ReplicaState: what whoever looks after replicas knows of one."""

from __future__ import annotations

from dataclasses import dataclass

from beamwright.counters import Usage


@dataclass(frozen=True)
class ReplicaState:
    """A replica that is there. process: its id, where it runs.

    searches, tokens: that it was given and has not ended; tokens are those still expected of it.
    """

    name: str
    process: int
    searches: int
    tokens: int
    usage: Usage
