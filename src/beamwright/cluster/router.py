"""Router for Ray Serve that sends each search to the replica with the smallest load.

Ray creates the router in the calling process, and passes the arguments of a call to the router
before pickling them. The router can therefore read the caller's roster, a field of the search.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from beamwright.cluster.roster import SearchRequest


class LeastLoadedRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve request router that sends a search to the replica with the smallest load.

    Ray skips replicas that are full or dead.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one group per replica, the smallest load first.

        The roster assigns the search to the first replica at once, because further searches may be
        routed before this search arrives at the replica.
        """
        match None if pending_request is None else pending_request.args:
            case [SearchRequest(roster=roster) as given] if roster is not None:
                by_name: dict[str, Any] = {
                    replica.replica_id.unique_id: replica for replica in candidate_replicas
                }
                ranked = roster.ranked(by_name)
                if ranked:
                    roster.assign(given, ranked[0])
                return [[by_name[name]] for name in ranked]
        return [list(candidate_replicas)]
