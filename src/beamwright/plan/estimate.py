"""What is said of one schedule: time, traffic, and whether it fits. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from beamwright.plan.sampling import Spread

ScheduleName = Literal["in-gpu", "layerwise", "locality"]
Fit = Literal["fits", "borderline", "no"]

_ORDER: tuple[Fit, ...] = ("no", "borderline", "fits")


def fit_of(need: Spread, budget_bytes: int) -> Fit:
    """Of a need that differs from search to search; borderline: some fit and some do not."""
    if need.worst <= budget_bytes:
        return "fits"
    return "borderline" if need.least <= budget_bytes else "no"


def lesser(*verdicts: Fit) -> Fit:
    """What holds if all of them have to."""
    return min(verdicts, key=_ORDER.index)


@dataclass(frozen=True)
class Estimate:
    """One schedule with one layout of KV. `None` where it cannot run in the budgets.

    fits: nearly every search fits; borderline: some do and some do not, and the figures are of
    those that do. time_s: prefill_s + decode_s + verify_s + stall_s. groups: groups decoded, over
    all steps. peak_kv_bytes: most of the generator's KV on the device at once, in the expected
    tree. limited_by: what takes most of the time, and what that waits for.
    """

    fits: bool
    borderline: bool = False
    time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    verify_s: float | None = None
    stall_s: float | None = None
    io_share: float | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    groups: int | None = None
    peak_kv_bytes: int | None = None
    limited_by: str | None = None


class Totals:
    """Sums over the steps of one run. Bytes are of all KV, peak_bytes of the generator's."""

    def __init__(self) -> None:
        self.decode_s = self.verify_s = self.stall_s = 0.0
        self.h2d_bytes = self.d2h_bytes = self.peak_bytes = 0.0
        self.groups = 0

    def estimate(self, prefill_s: float, verdict: Fit, limited_by: str) -> Estimate:
        time_s = prefill_s + self.decode_s + self.verify_s + self.stall_s
        return Estimate(
            fits=verdict == "fits",
            borderline=verdict == "borderline",
            time_s=time_s,
            prefill_s=prefill_s,
            decode_s=self.decode_s,
            verify_s=self.verify_s,
            stall_s=self.stall_s,
            io_share=self.stall_s / time_s,
            h2d_bytes=round(self.h2d_bytes),
            d2h_bytes=round(self.d2h_bytes),
            groups=self.groups,
            peak_kv_bytes=round(self.peak_bytes),
            limited_by=limited_by,
        )


NO_FIT = Estimate(fits=False)
