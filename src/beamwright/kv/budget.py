"""Exact byte accounting of device KV: every block, tail and per-beam copy is charged here."""

from __future__ import annotations

from beamwright.errors import CapacityError


class DeviceBudget:
    """A counter with a ceiling. `charge` before memory is used, `release` when it is not."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be charged."""
        return self.total_bytes - self.used_bytes

    def charge(self, num_bytes: int, what: str) -> None:
        """Count `num_bytes` as used.

        Raises:
            CapacityError: if they do not fit; nothing is charged then.
        """
        if num_bytes > self.free_bytes:
            raise CapacityError(what, num_bytes, self.free_bytes, self.total_bytes)
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` as free again."""
        if num_bytes > self.used_bytes:
            raise AssertionError(f"released {num_bytes} bytes, only {self.used_bytes} are in use")
        self.used_bytes -= num_bytes

    def reset_peak(self) -> None:
        """Start a new peak measurement (one per solved batch)."""
        self.peak_bytes = self.used_bytes
