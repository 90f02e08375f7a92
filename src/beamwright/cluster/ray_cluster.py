"""RayCluster: joined or begun on this machine; what an engine needs of it, and how many fit."""

from __future__ import annotations

import socket
from typing import Any

from beamwright.cluster.cluster import Cluster
from beamwright.errors import InputError, UnavailableError
from beamwright.sections import ModelSettings

_ANSWER_S = 5.0


class RayCluster:
    """Where `wanted` says. model: that each engine loads. ray: the package, which is an extra."""

    def __init__(self, wanted: Cluster, model: ModelSettings) -> None:
        self.ray, self.wanted, self._gpus = _import_ray(), wanted, _num_gpus(model)
        self._begun = False

    def join(self) -> None:
        """Be its driver, or begin one in processes of this machine.

        Raises:
            InputError: if there is none at the address.
        """
        if self.ray.is_initialized():
            return
        self._begun = True
        address = self.wanted.address
        _check_answers(address)
        try:
            self.ray.init(
                address=address or "local",  # None would be any that this machine has begun
                include_dashboard=False if address is None else None,
                configure_logging=False,
                log_to_driver=False,
            )
        except (ConnectionError, ValueError) as error:
            raise InputError(f"--ray {address}: {last_line(error)}") from error
        except Exception as error:  # Ray's own: a machine too busy to start it in time, say
            raise UnavailableError(f"--ray {address or 'local'}: {last_line(error)}") from error

    def leave(self) -> None:
        """What has been begun here ends; nothing else."""
        if self._begun:
            self.ray.shutdown()

    @property
    def needs(self) -> dict[str, float]:
        """Of one engine, as Ray counts."""
        return {"num_gpus": self._gpus} if self._gpus else {"num_cpus": self.wanted.cores}

    def num_replicas(self) -> int:
        """As many as are wanted, or fit.

        Raises:
            InputError: if they do not fit.
        """
        kind, size = ("GPU", self._gpus) if self._gpus else ("CPU", self.wanted.cores)
        units = int(self.ray.cluster_resources().get(kind, 0) // size)
        found = self.wanted.replicas or units
        if found < 1 or found > units:
            what = {"GPU": "GPUs", "CPU": "cores"}[kind]
            what = "GPUs" if (kind, size) == ("GPU", 1) else f"groups of {size} {what}"
            raise InputError(f"--replicas {found}: the cluster has {units} {what}")
        return found


def _num_gpus(model: ModelSettings) -> int:
    """Of one engine; Ray lets it see no others."""
    names = {model.device, model.verifier_device or model.device}
    return sum(name.startswith("cuda") for name in names)


def _check_answers(address: str | None) -> None:
    """Ray itself asks for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise InputError(f"--ray {address}: nothing answers there ({why})") from error


def _import_ray() -> Any:
    try:
        import ray  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        raise UnavailableError("--ray needs ray: pip install 'beamwright[ray]'") from error
    return ray


def last_line(error: object) -> str:
    """The last line of what Ray says: a remote traceback ends with its error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
