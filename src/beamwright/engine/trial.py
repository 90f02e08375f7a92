"""Trial: whether scoring beside decoding does more a second than in turns, on this machine, now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S, PAIRS, LASTS = 0.25, 3, 40
"""Seconds of a window; windows that each of both ways gets; for how many the better one stays."""


@dataclass
class _Done:
    """Tokens decoded in so many seconds."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Trial:
    """Both ways get windows by turns; then the faster one runs, until both are tried again.

    A window ends where no score is awaited, so both have scored what they have decoded, and their
    tokens can be compared. Which way runs changes no tree.

    beside: decode while steps are scored.
    """

    clock: Callable[[], float] = time.perf_counter
    beside: bool = True
    _windows: int = 0
    _began_s: float | None = None
    _now: _Done = field(default_factory=_Done)
    _done: dict[bool, _Done] = field(default_factory=lambda: {True: _Done(), False: _Done()})

    @property
    def drains(self) -> bool:
        """True if decoding waits for scores: in turns, or for the end of a window."""
        return not self.beside or self._is_over

    def begin(self) -> None:
        """Time in which nothing was in flight counts for neither."""
        self._began_s, self._now = None, _Done()

    def note(self, tokens: int, *, awaited: bool) -> None:
        """A piece of work is over. awaited: scores are still to come."""
        if self._began_s is None:
            self._began_s = self.clock()
            return
        self._now.tokens += tokens
        if self._is_over and not awaited:
            self._end(self.clock())

    @property
    def _is_over(self) -> bool:
        return self._began_s is not None and self.clock() >= self._began_s + WINDOW_S

    def _end(self, now: float) -> None:
        assert self._began_s is not None
        done = self._done[self.beside]
        done.tokens += self._now.tokens
        done.seconds += now - self._began_s
        self._began_s, self._now = now, _Done()
        self._windows += 1
        if self._windows < 2 * PAIRS:
            self.beside = not self.beside
        elif self._windows == 2 * PAIRS:
            self.beside = self._done[True].rate >= self._done[False].rate
        elif self._windows == 2 * PAIRS + LASTS:
            self._windows, self._done = 0, {True: _Done(), False: _Done()}
