"""Where replicas run. No Ray, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Where replicas run. address: of a Ray cluster; None for processes of this machine.

    replicas: None for one per GPU, or one per `cores` where there is none.
    """

    address: str | None = None
    replicas: int | None = None
    cores: int = 1
    plugins: tuple[str, ...] = ()
