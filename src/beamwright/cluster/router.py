"""Ray Serve's router of searches: to the replica with the fewest candidates.

Ray makes one in the process of whoever has the handle, and gives it the very arguments of a call,
before they are pickled: with a search comes the roster of all that were given.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from beamwright.cluster.roster import Given


class ByLoad(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by load; Ray skips those that are full or gone."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank each replica alone. A search counts at once: others are routed before it arrives."""
        match None if pending_request is None else pending_request.args:
            case [Given(roster=roster) as given] if roster is not None:
                by_name: dict[str, Any] = {
                    replica.replica_id.unique_id: replica for replica in candidate_replicas
                }
                ranked = roster.ranked(by_name)
                if ranked:
                    roster.give(given, ranked[0])
                return [[by_name[name]] for name in ranked]
        return [list(candidate_replicas)]
