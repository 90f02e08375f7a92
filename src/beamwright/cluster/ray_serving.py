"""RayServing: a Ray Serve deployment of `Searcher`s, and calls to them. Serve's HTTP stays off.

Ray places replicas, looks after their health and starts others in their places.
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import suppress
from typing import Any

from beamwright import errors
from beamwright.cluster.ledger import Given
from beamwright.cluster.ray_cluster import RayCluster, last_line
from beamwright.cluster.searcher import EngineFacts, Pulse, Searcher
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, UnavailableError

_MOST_SEARCHES = 100_000  # at a time in a replica: its engine has the queue
_HEALTH_S = 2.0
_STARTS = 2
_ANSWER_S = 5.0
_END_S = 10.0
_ROUTER = "beamwright.cluster.token_router:ByTokens"
_LOGGING = {"log_level": "ERROR", "enable_access_log": False}


class RayServing:
    """One application with one deployment. died: errors of a call whose replica is gone."""

    def __init__(self, cluster: RayCluster, settings: Settings) -> None:
        self._serve, self._cluster, self._settings = _import_serve(), cluster, settings
        self._name = f"beamwright-{uuid.uuid4().hex[:8]}"
        self._engines: Any = None

    def start(self) -> int:
        """Returns how many replicas there are, all loaded.

        Raises:
            BeamwrightError: what is wrong with the settings, of the first replica that says so.
        """
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._cluster.join()
        serve, wanted = self._serve, self._cluster.wanted
        number = self._cluster.num_replicas()
        ray_error = self._cluster.ray.exceptions.RayError
        make = serve.deployment(
            Searcher,
            name="engine",
            num_replicas=number,
            ray_actor_options=self._cluster.needs,
            max_ongoing_requests=_MOST_SEARCHES,
            health_check_period_s=_HEALTH_S,
            graceful_shutdown_timeout_s=_ANSWER_S,
            max_constructor_retry_count=_STARTS * number,
            request_router_config=serve.config.RequestRouterConfig(request_router_class=_ROUTER),
            logging_config=_LOGGING,
        )
        content = self._settings.model_dump(mode="json", exclude_unset=True)
        app = make.bind(content, wanted.plugins, replica_name, abandon)
        try:
            serve.start(proxy_location="Disabled", logging_config=_LOGGING)
            self._engines = serve.run(app, name=self._name, route_prefix=None)
        except ray_error as error:  # of Serve itself: a node without it
            raise BeamwrightError(f"replicas cannot be started: {last_line(error)}") from error
        except RuntimeError as error:
            raise self._why(error) from error
        return number

    def stop(self) -> None:
        """End the replicas, and what else was begun."""
        if self._cluster.ray.is_initialized():
            deleting = threading.Thread(target=self._delete, daemon=True)
            deleting.start()
            deleting.join(_END_S)  # of a cluster that is gone there is no answer
        self._cluster.leave()

    def _delete(self) -> None:
        with suppress(Exception):  # the cluster is gone, and they with it
            self._serve.delete(self._name)

    @property
    def died(self) -> tuple[type[Exception], ...]:
        """What its callers see of a replica's end; an error of its own code is none of these."""
        found = self._cluster.ray.exceptions
        return (
            found.RayActorError, found.ObjectLostError, found.WorkerCrashedError,
            found.TaskCancelledError, found.NodeDiedError,
        )  # fmt: skip

    def facts(self) -> EngineFacts:
        """Of any of them; waits."""
        found: EngineFacts = self._engines.facts.remote().result()
        return found

    def search(self, given: Given) -> Any:
        """News of it, as they come; an asynchronous iterator with `cancel`."""
        return self._engines.options(stream=True).search.remote(given)

    async def cancel(self, search: str) -> None:
        """Tell whoever has it."""
        answers = self._engines.broadcast("cancel", search)
        await answers.results_async(timeout_s=_ANSWER_S, return_exceptions=True)

    async def pulses(self) -> list[Pulse]:
        """Of all that are there. Raises TimeoutError where one does not answer."""
        answers = self._engines.broadcast("pulse")
        found = await answers.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return [each for each in found if isinstance(each, Pulse)]

    def _why(self, error: RuntimeError) -> BeamwrightError:
        """What a replica's constructor has raised, where it was on purpose."""
        apps = self._serve.status().applications
        told = [
            each.message for app in apps.values() if app is apps.get(self._name)
            for each in app.deployments.values()
        ]  # fmt: skip
        line = last_line("\n".join(told) or error)
        kind, _, message = line.partition(": ")
        found = getattr(errors, kind.rpartition(".")[2], None)
        if isinstance(found, type) and issubclass(found, errors.InputError):
            return found(message)
        return BeamwrightError(f"replicas cannot be started: {line}")


def replica_name() -> str:
    """Of the replica that asks, as Ray's routers know it."""
    name: str = _import_serve().get_replica_context().replica_id.unique_id
    return name


def abandon() -> None:
    """End the application of the replica that asks."""
    serve = _import_serve()
    serve.delete(serve.get_replica_context().app_name, _blocking=False)


def _import_serve() -> Any:
    try:
        from ray import serve  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise UnavailableError(
            "--replicas needs ray[serve]: pip install 'beamwright[ray]'"
        ) from error
    return serve
