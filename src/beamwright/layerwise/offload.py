"""Offload: what the views over one store share from one to the next, and what they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from beamwright.kv.link import Link, Transfer
from beamwright.kv.pool import ScratchMeter


@dataclass
class Offload:
    """What the views over one store share, and what they count.

    resident: layers [0, resident) are on the device between views; None before the first forward,
        when whatever exists counts as resident in all layers.
    padding: device bytes of packed copies and stream buffers that hold no token of a real row.
    tokens, streamed_layers: decoded tokens per row, and the layers streamed for them.
    discarded_bytes: fetched ahead for a token that did not come, or not with the same rows.
    stall_s: seconds in which compute waited for the link.
    """

    link: Link
    resident: int | None = None
    padding: ScratchMeter = field(default_factory=ScratchMeter)
    stall_s: float = 0.0
    tokens: int = 0
    streamed_layers: int = 0
    discarded_bytes: int = 0

    def order(self, transfers: Sequence[Transfer]) -> None:
        """Compute waits, be it on the host or on the device: that is the stall.

        A device reports later: without transfers, only what it has reported meanwhile is added.
        """
        self.stall_s += self.link.order(transfers)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """The host waits, because it reads what has moved."""
        if transfers:
            self.stall_s += self.link.wait(transfers)
