"""VirtualClock: the time of a simulated run. Knows seconds and who wants to hear of them."""

from __future__ import annotations

from collections.abc import Callable

from beamwright_lab.simulator.costs import Work


class VirtualClock:
    """Moves only by `advance` and `reach`. now_s: seconds since the start of the run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._listeners: list[Callable[[], None]] = []

    def __call__(self) -> float:
        """The present time, for whoever takes a clock as a function."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let so much time pass.

        Raises:
            ValueError: if it would run backwards.
        """
        if not seconds >= 0:
            raise ValueError(f"a clock cannot advance by {seconds!r} s")
        self.now_s += seconds
        self._notify()

    def run(self, work: Work) -> None:
        """Let the device do something, which has it alone."""
        self.advance(work.seconds)

    def reach(self, time_s: float) -> float:
        """Wait until a moment, which may be over already; returns the seconds waited."""
        waited_s = time_s - self.now_s
        if waited_s <= 0:
            return 0.0
        self.now_s = time_s  # exactly: a sum could fall short of it by a rounding
        self._notify()
        return waited_s

    def watch(self, listener: Callable[[], None]) -> None:
        """Call this whenever time has passed."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
