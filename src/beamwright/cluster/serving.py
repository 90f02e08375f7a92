"""Deploy replicas with Ray Serve, and call them.

Ray places the replicas, checks their health and replaces dead ones. The HTTP proxy of Ray Serve
stays off. This module imports no torch until it starts the replicas.
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
    from beamwright.cluster.roster import SearchRequest
    from beamwright.config import Settings

# Ray's limit on the concurrent searches of a replica, too high to be reached: the engine of the
# replica queues searches itself.
_MOST_SEARCHES = 100_000
_HEALTH_S = 2.0  # seconds between two health checks of a replica
_STARTS = 2  # attempts to start each replica
_ANSWER_S = 5.0  # timeout in seconds of a call of all replicas, and of connecting to the cluster
_END_S = 10.0  # timeout in seconds for the deletion of the application
_ROUTER = "beamwright.cluster.router:LeastLoadedRouter"
# Names of Ray's exception classes that show that a replica has died.
_DEATHS = (
    "RayActorError", "ObjectLostError", "WorkerCrashedError", "TaskCancelledError", "NodeDiedError"
)  # fmt: skip
_LOGGING = {"log_level": "ERROR", "enable_access_log": False}


@dataclass(frozen=True)
class Cluster:
    """Place and number of replicas, as `--ray` and `--replicas` give them."""

    address: str | None = None  # address of a Ray cluster; None: processes on this machine
    # Number of replicas. None: one per GPU, or one per `cores` CPU cores for a model on CPUs.
    replicas: int | None = None
    cores: int = 1  # CPU cores per replica without a GPU
    plugins: tuple[str, ...] = ()  # plugin files that each replica loads


class RayServing:
    """Starts, calls and ends the replicas of one solver: a Ray Serve application.

    wanted: the place and number of replicas.
    in_flight: maximum number of problems in flight on each replica; None: as many as keep its
        engine busy.
    died: exception classes that a call raises if its replica has died. A replica's own code never
        raises these.
    """

    def __init__(self, wanted: Cluster, settings: Settings, in_flight: int | None = None) -> None:
        self._ray, self._serve = _import_ray()
        self.died = tuple(getattr(self._ray.exceptions, name) for name in _DEATHS)
        self._wanted, self._settings, self._in_flight = wanted, settings, in_flight
        # GPUs per replica. Ray makes only this GPU visible to the replica's process.
        self._gpus = int(settings.model.device.startswith("cuda"))
        self._name = f"beamwright-{uuid.uuid4().hex[:8]}"
        self._engines: Any = None
        self._begun = False

    def start(self) -> int:
        """Start all replicas, wait until they are loaded, and return their number.

        Raises:
            InputError: if no cluster answers at the address, if the cluster has too few devices, or
                if the settings are not valid.
            BeamwrightError: if the replicas cannot be started for another reason.
        """
        from beamwright.cluster.replica import Replica  # noqa: PLC0415 - imports torch, slowly

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
        app = make.bind(
            content, self._wanted.plugins, replica_name, end_application, self._in_flight
        )
        try:
            serve.start(proxy_location="Disabled", logging_config=_LOGGING)
            self._engines = serve.run(app, name=self._name, route_prefix=None)
        except self._ray.exceptions.RayError as error:  # for example, a node has no Ray Serve
            raise BeamwrightError(f"replicas cannot be started: {last_line(error)}") from error
        except RuntimeError as error:
            raise self._startup_error(error) from error
        return number

    def stop(self) -> None:
        """End the replicas, and close the connection to Ray if `start` has opened it."""
        if self._ray.is_initialized():

            def delete() -> None:
                with suppress(Exception):  # the whole cluster may have ended already
                    self._serve.delete(self._name)

            deleting = threading.Thread(target=delete, daemon=True)
            deleting.start()
            deleting.join(_END_S)  # has a timeout, because a dead cluster never answers
        if self._begun:
            self._ray.shutdown()

    # --- calls -------------------------------------------------------------------------------

    def search(self, given: SearchRequest) -> Any:
        """Start a search on a replica, and return the stream of `Replica.search`.

        The stream is an asynchronous iterator with a method `cancel`.
        """
        return self._engines.options(stream=True).search.remote(given)

    async def broadcast(self, method: Literal["cancel", "heartbeat"], *arguments: str) -> list[Any]:
        """Call a method of all replicas, and return the results of the live replicas.

        Raises:
            TimeoutError: if a replica does not answer within `_ANSWER_S` seconds.
        """
        calls = self._engines.broadcast(method, *arguments)
        answers = await calls.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # --- starting ----------------------------------------------------------------------------

    def _join(self) -> None:
        """Connect to the cluster, or start Ray on this machine if no address is given."""
        if self._ray.is_initialized():
            return
        self._begun = True
        address = self._wanted.address
        _check_answers(address)
        try:
            self._ray.init(
                address=address or "local",  # None would use any Ray that runs on this machine
                include_dashboard=False if address is None else None,
                configure_logging=False,
                log_to_driver=False,
            )
        except Exception as error:  # Ray raises many classes, for example after a slow start
            wrong = isinstance(error, ConnectionError | ValueError)
            kind = InputError if wrong else UnavailableError
            raise kind(f"--ray {address or 'local'}: {last_line(error)}") from error

    def _num_replicas(self) -> int:
        """Return the number of replicas to start.

        Raises:
            InputError: if the cluster has too few GPUs or CPU cores.
        """
        kind, size = ("GPU", self._gpus) if self._gpus else ("CPU", self._wanted.cores)
        units = int(self._ray.cluster_resources().get(kind, 0) // size)
        number = self._wanted.replicas or units
        if number < 1 or number > units:
            said = f"the cluster has room for {units} replicas with {size} {kind} each"
            raise InputError(f"--replicas {number}: {said}; lower --replicas or add machines")
        return number

    def _startup_error(self, error: RuntimeError) -> BeamwrightError:
        """Return the error that a replica's constructor raised, read from Ray's status."""
        app = self._serve.status().applications.get(self._name)
        told = [state.message for state in app.deployments.values()] if app else []
        line = last_line("\n".join(told) or error)
        kind, _, message = line.partition(": ")
        named = getattr(errors, kind.rpartition(".")[2], None)
        if isinstance(named, type) and issubclass(named, errors.InputError):
            return named(message)
        return BeamwrightError(f"replicas cannot be started: {line}")


def replica_name() -> str:
    """Return the name of the replica that calls this, as Ray's routers know the replica."""
    name: str = _import_ray()[1].get_replica_context().replica_id.unique_id
    return name


def end_application() -> None:
    """End the Ray Serve application to which the calling replica belongs."""
    serve = _import_ray()[1]
    serve.delete(serve.get_replica_context().app_name, _blocking=False)


def last_line(error: object) -> str:
    """Return the last line of an error's message.

    Ray's messages contain remote tracebacks, whose last line states the error.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_answers(address: str | None) -> None:
    """Check that something answers at a cluster's address, because Ray would retry for minutes.

    Raises:
        InputError: if nothing answers.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise InputError(f"--ray {address}: no connection ({why})") from error


def _import_ray() -> tuple[Any, Any]:
    """Return the modules `ray` and `ray.serve`."""
    needs = "--ray and --replicas need ray[serve]: pip install 'beamwright[ray]'"
    return import_optional("ray", needs), import_optional("ray.serve", needs)
