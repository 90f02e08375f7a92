"""Cluster: where engines run; RayServing: a Ray Serve deployment of `Replica`s, and calls to them.

Ray places replicas, looks after their health and starts others in their places. Serve's HTTP stays
off. No torch here until replicas are started.
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from beamwright import errors
from beamwright.errors import BeamwrightError, InputError, UnavailableError
from beamwright.io import import_optional

if TYPE_CHECKING:
    from beamwright.cluster.roster import Given
    from beamwright.config import Settings

_MOST_SEARCHES = 100_000  # at a time in a replica: its engine has the queue
_HEALTH_S = 2.0
_STARTS = 2
_ANSWER_S = 5.0
_END_S = 10.0
_ROUTER = "beamwright.cluster.router:ByLoad"
_DEATHS = (
    "RayActorError", "ObjectLostError", "WorkerCrashedError", "TaskCancelledError", "NodeDiedError"
)  # fmt: skip
_LOGGING = {"log_level": "ERROR", "enable_access_log": False}


@dataclass(frozen=True)
class Cluster:
    """Where replicas run. address: of a Ray cluster; None for processes of this machine.

    replicas: None for one per GPU, or one per `cores` where there is none.
    """

    address: str | None = None
    replicas: int | None = None
    cores: int = 1
    plugins: tuple[str, ...] = ()


class RayServing:
    """One application with one deployment, where `wanted` says.

    in_flight: problems at a time in each replica, None for what keeps it busy. died: errors of a
    call whose replica is gone, none of which its own code raises.
    """

    def __init__(self, wanted: Cluster, settings: Settings, in_flight: int | None = None) -> None:
        self._ray, self._serve = _import_ray()
        self.died = tuple(getattr(self._ray.exceptions, name) for name in _DEATHS)
        self._wanted, self._settings, self._in_flight = wanted, settings, in_flight
        self._gpus = int(settings.model.device.startswith("cuda"))  # Ray shows it no others
        self._name = f"beamwright-{uuid.uuid4().hex[:8]}"
        self._engines: Any = None
        self._begun = False

    def start(self) -> int:
        """Start all replicas, wait until they are loaded, and return their number.

        Raises:
            InputError: if there is no cluster at the address, or they do not fit;
            BeamwrightError: what is wrong with the settings, of the first replica that says so.
        """
        from beamwright.cluster.replica import Replica  # noqa: PLC0415 - waits for torch

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._join()
        serve, number = self._serve, self._num_replicas()
        needs = {"num_gpus": self._gpus} if self._gpus else {"num_cpus": self._wanted.cores}
        make = serve.deployment(
            Replica,
            name="engine",
            num_replicas=number,
            ray_actor_options=needs,
            max_ongoing_requests=_MOST_SEARCHES,
            health_check_period_s=_HEALTH_S,
            graceful_shutdown_timeout_s=_ANSWER_S,
            max_constructor_retry_count=_STARTS * number,
            request_router_config=serve.config.RequestRouterConfig(request_router_class=_ROUTER),
            logging_config=_LOGGING,
        )
        content = self._settings.model_dump(mode="json", exclude_unset=True)
        app = make.bind(content, self._wanted.plugins, replica_name, abandon, self._in_flight)
        try:
            serve.start(proxy_location="Disabled", logging_config=_LOGGING)
            self._engines = serve.run(app, name=self._name, route_prefix=None)
        except self._ray.exceptions.RayError as error:  # of Serve itself: a node without it
            raise BeamwrightError(f"replicas cannot be started: {last_line(error)}") from error
        except RuntimeError as error:
            raise self._why(error) from error
        return number

    def stop(self) -> None:
        """End the replicas, and Ray where it was started here."""
        if self._ray.is_initialized():

            def delete() -> None:
                with suppress(Exception):  # the cluster is gone, and they with it
                    self._serve.delete(self._name)

            deleting = threading.Thread(target=delete, daemon=True)
            deleting.start()
            deleting.join(_END_S)  # of a cluster that is gone there is no answer
        if self._begun:
            self._ray.shutdown()

    # --- calls -------------------------------------------------------------------------------

    def search(self, given: Given) -> Any:
        """Start a search; returns an asynchronous iterator of its news, with `cancel`."""
        return self._engines.options(stream=True).search.remote(given)

    async def broadcast(self, method: Literal["cancel", "pulse"], *arguments: str) -> list[Any]:
        """Call a method of all replicas, and return what the live ones answer.

        Raises:
            TimeoutError: where one does not answer.
        """
        calls = self._engines.broadcast(method, *arguments)
        answers = await calls.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # --- inside ------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connect to the cluster, or start Ray in processes of this machine."""
        if self._ray.is_initialized():
            return
        self._begun = True
        address = self._wanted.address
        _check_answers(address)
        try:
            self._ray.init(
                address=address or "local",  # None would be any that this machine has begun
                include_dashboard=False if address is None else None,
                configure_logging=False,
                log_to_driver=False,
            )
        except Exception as error:  # Ray's own: a machine too busy to start it in time, say
            wrong = isinstance(error, ConnectionError | ValueError)
            kind = InputError if wrong else UnavailableError
            raise kind(f"--ray {address or 'local'}: {last_line(error)}") from error

    def _num_replicas(self) -> int:
        kind, size = ("GPU", self._gpus) if self._gpus else ("CPU", self._wanted.cores)
        units = int(self._ray.cluster_resources().get(kind, 0) // size)
        number = self._wanted.replicas or units
        if number < 1 or number > units:
            said = f"the cluster has {units} times {size} {kind}"
            raise InputError(f"--replicas {number}: {said}")
        return number

    def _why(self, error: RuntimeError) -> BeamwrightError:
        """Find the error that a replica's constructor raised."""
        app = self._serve.status().applications.get(self._name)
        told = [state.message for state in app.deployments.values()] if app else []
        line = last_line("\n".join(told) or error)
        kind, _, message = line.partition(": ")
        named = getattr(errors, kind.rpartition(".")[2], None)
        if isinstance(named, type) and issubclass(named, errors.InputError):
            return named(message)
        return BeamwrightError(f"replicas cannot be started: {line}")


def replica_name() -> str:
    """Return the name of the calling replica, as Ray's routers know it."""
    name: str = _import_ray()[1].get_replica_context().replica_id.unique_id
    return name


def abandon() -> None:
    """End the application of the calling replica."""
    serve = _import_ray()[1]
    serve.delete(serve.get_replica_context().app_name, _blocking=False)


def last_line(error: object) -> str:
    """Return the last line of Ray's message: a remote traceback ends with its error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_answers(address: str | None) -> None:
    """Raises InputError at once where nothing answers; Ray itself would retry for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise InputError(f"--ray {address}: nothing answers there ({why})") from error


def _import_ray() -> tuple[Any, Any]:
    needs = "--ray and --replicas need ray[serve]: pip install 'beamwright[ray]'"
    return import_optional("ray", needs), import_optional("ray.serve", needs)
