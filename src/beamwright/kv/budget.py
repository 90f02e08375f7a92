"""Exact byte accounting of one tier: every block is charged here."""

from __future__ import annotations

from beamwright.errors import DEVICE_TIER, CapacityError


class ByteBudget:
    """A counter with a ceiling. `charge` before memory is used, `release` when it is not.

    together: also counts what several budgets use, which have memory in common.

    tier, hint: how an error names this budget, and what it advises.
    """

    def __init__(
        self,
        total_bytes: int,
        tier: str = DEVICE_TIER,
        hint: str = "raise --memory or --kv-memory, or lower --n",
        together: ScratchMeter | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.tier, self._hint, self._together = tier, hint, together

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
            raise self.exhausted(what, num_bytes)
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self._together is not None:
            self._together.add(num_bytes)

    def exhausted(self, what: str, num_bytes: int) -> CapacityError:
        """The error that says what does not fit, and how much is missing."""
        return CapacityError(
            what, num_bytes, self.free_bytes, self.total_bytes, self.tier, self._hint
        )

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` as free again."""
        if num_bytes > self.used_bytes:
            raise AssertionError(f"released {num_bytes} bytes, only {self.used_bytes} are in use")
        self.used_bytes -= num_bytes
        if self._together is not None:
            self._together.add(-num_bytes)

    def reset_peak(self) -> None:
        """Start a new peak measurement (one per solved batch)."""
        self.peak_bytes = self.used_bytes


class ScratchMeter:
    """Counts bytes of working memory and their peak; it has no ceiling."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes (negative: give them back)."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def reset_peak(self) -> None:
        """Start a new peak measurement."""
        self.peak_bytes = self.used_bytes
