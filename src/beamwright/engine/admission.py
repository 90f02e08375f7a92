"""Admission: whether one more problem is taken in beside those in flight.

`decoupled` fills the generator's batch from queued problems before anything else (eager; decoupled
tree exploration, Alg. 5), up to the rows beyond which another one costs as much as it is worth, and
only where its KV fits as well. How much that becomes is known when the first tree has ended. Where
a number of problems is given, it is taken at its word: KV that has to leave may cost less than rows
that stay empty (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from beamwright.engine.payoff import Payoff
from beamwright.engine.tree_run import TreeRun
from beamwright.kv.cache import CacheManager
from beamwright.sections import ScheduleSettings

USUAL_ROWS = 64
"""Candidates of all problems together that keep most devices busy."""

FAR_ROWS = 256
"""The same of a generator elsewhere, which has a batch, memory and a queue of its own."""

_MOST_ROWS = 512
_CALL_SHARE = 0.1  # of a pass: what it takes whatever is in it
_LEAST_PASSES = 64


@dataclass
class Admission:
    """A place for one more, or none.

    in_flight: problems at a time at most; None for as many as there is work for. usual_rows:
    candidates of all problems together that keep the generator busy.
    """

    settings: ScheduleSettings
    in_flight: int | None
    stores: Sequence[CacheManager]
    payoff: Payoff
    usual_rows: int = USUAL_ROWS
    _filling: bool = field(default=True, init=False)
    _largest_tokens: int = field(default=0, init=False)
    _before: frozenset[TreeRun] = field(default=frozenset(), init=False)
    _ended: bool = field(default=False, init=False)
    _evicted: int = field(default=0, init=False)

    def has_place(self, live: Mapping[TreeRun, int], num_open: int) -> bool:
        """live: trees in flight, and how many candidates each may have; num_open: their steps that
        are decoded, or wait for it."""
        self._look(live)
        if not live:
            self._filling = True
            return True
        least = self.settings.min_problems
        if least is None and self.settings.explore == "lockstep":
            least = 1
        if self._is_full(list(live.values()), num_open):
            self._filling = least is None
            return False
        self._filling = self._filling or (least is not None and len(live) < least)
        return self._filling

    def _is_full(self, sizes: Sequence[int], num_open: int) -> bool:
        if self.in_flight is not None and len(sizes) >= self.in_flight:
            return True
        if self.settings.explore != "decoupled":
            return self.in_flight is None and sum(sizes) >= self.usual_rows
        if sum(sizes) < self.usual_rows:
            return False
        return num_open >= self.most_rows or (self.in_flight is None and not self._fits(len(sizes)))

    @property
    def most_rows(self) -> int:
        """Rows of which a pass's own cost is a tenth; as usual until that is known (N_LLM)."""
        passes = self.payoff.decoding
        if not passes.several or passes.calls < _LEAST_PASSES:
            return self.usual_rows
        rows = (1 / _CALL_SHARE - 1) * passes.of_a_call / max(passes.of_a_step, 1e-12)
        return round(min(_MOST_ROWS, max(self.usual_rows, rows)))

    def _look(self, live: Mapping[TreeRun, int]) -> None:
        """See how large trees become; whenever one has ended, whether KV has had to leave since the
        one before it: then nobody comes in its place, and nothing is decoded ahead."""
        now = frozenset(live)
        if not self._before <= now:
            evicted = sum(store.counts.evicted_blocks for store in self.stores)
            self.payoff.pressed, self._evicted = evicted > self._evicted, evicted
            self._ended = True
        self._before = now
        for run in live:
            self._largest_tokens = max(self._largest_tokens, *run.round_tokens[-1:], 0)

    def _fits(self, num_live: int) -> bool:
        """True if one more has room, were all as large as the largest so far."""
        tree_bytes = self._largest_tokens * sum(s.device.bytes_per_token for s in self.stores)
        room = sum(store.device.budget.total_bytes for store in self.stores)
        roomy = self._ended and not self.payoff.pressed
        return roomy and tree_bytes * (num_live + 1) <= room
