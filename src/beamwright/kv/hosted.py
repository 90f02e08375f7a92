"""HostedStore: a store whose pool is the host's, beside a device that attention computes on."""

from __future__ import annotations

import torch

from beamwright.kv.budget import ByteBudget
from beamwright.kv.link import Link
from beamwright.kv.pool import BlockPool
from beamwright.kv.store import SegmentStore


class HostedStore(SegmentStore):
    """A `SegmentStore` in two places: all segments are in the host's pool.

    device: where attention computes. device_budget: bytes of what is there of them for now.
    """

    def __init__(
        self, pool: BlockPool, device: torch.device, link: Link, device_budget: ByteBudget
    ) -> None:
        super().__init__(pool)
        self.link, self.device_budget, self._device = link, device_budget, device

    @property
    def compute_device(self) -> torch.device:
        return self._device

    @property
    def tiers(self) -> dict[str, ByteBudget]:
        return {"device": self.device_budget, "host": self.pool.budget}

    @property
    def device_peak_bytes(self) -> int:
        """Of what was there at a time."""
        return self.device_budget.peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        """All KV is on the host."""
        return self.pool.budget.peak_bytes

    def reset_peaks(self) -> None:
        super().reset_peaks()
        self.device_budget.reset_peak()
