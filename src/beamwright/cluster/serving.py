"""Serving: the seam between whoever has searches and whoever keeps the replicas that take them."""

from __future__ import annotations

from typing import Any, Protocol

from beamwright.cluster.ledger import Given
from beamwright.cluster.searcher import EngineFacts, Pulse


class Serving(Protocol):
    """Whoever keeps replicas, and takes searches to them.

    died: errors of a search whose replica is gone; an error of its own code is none of these.
    """

    @property
    def died(self) -> tuple[type[Exception], ...]: ...

    def start(self) -> int:
        """Returns how many replicas there are, all loaded. Raises BeamwrightError."""
        ...

    def stop(self) -> None:
        """End the replicas, and what else was begun."""
        ...

    def facts(self) -> EngineFacts:
        """Of any of them; waits."""
        ...

    def search(self, given: Given) -> Any:
        """News of it, as they come; an asynchronous iterator with `cancel`."""
        ...

    async def cancel(self, search: str) -> None:
        """Tell whoever has it."""
        ...

    async def pulses(self) -> list[Pulse]:
        """Of all that are there. Raises TimeoutError where one does not answer."""
        ...
