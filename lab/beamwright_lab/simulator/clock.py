"""VirtualClock: the time of a simulated run, in seconds."""

from __future__ import annotations

from collections.abc import Callable

from beamwright_lab.simulator.costs import Work


class VirtualClock:
    """A clock that moves only when told to.

    now_s: seconds since the start of the run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._listeners: list[Callable[[], None]] = []

    def __call__(self) -> float:
        """Return the current time, for code that takes a clock as a function."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: if `seconds` is negative or NaN.
        """
        if not seconds >= 0:
            raise ValueError(f"a clock cannot advance by {seconds!r} s")
        self.now_s += seconds
        self._notify()

    def run(self, work: Work) -> None:
        """Advance by the time that the device takes for this work alone."""
        self.advance(work.seconds)

    def advance_to(self, time_s: float) -> float:
        """Advance to `time_s`, and return the seconds waited; 0 if that time has passed."""
        waited_s = time_s - self.now_s
        if waited_s <= 0:
            return 0.0
        self.now_s = time_s  # not by addition, whose rounding could stop just before it
        self._notify()
        return waited_s

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the clock has moved."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
