"""ScriptedRows: the rows of the running batch on a virtual clock; their steps are known beforehand.

Everything else of an engine - who is admitted, preempted and retired, what is leased, stored and
fetched - is `decode.RunningBatch` itself. Between two of its decisions nothing can happen, so the
clock moves over an iteration in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from beamwright.engine.row import Ran, Row, awaited
from beamwright.kv.segments import Segment
from beamwright.models.decoder import padded_rows
from beamwright.plan.costs import Layout
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.replay import Scripts
from beamwright_lab.simulator.residency import SimulatedResidency

_FORWARDED = object()

# Blocks in use at one moment after the other.
Moments = list[dict[Segment, int]]


class ScriptedRows:
    """`Rows` that follow a script. tail_tokens: see `protocols.AttentionBackend`.
    moments: collects what is in use whenever something is stored."""

    held_bytes = 0

    def __init__(
        self,
        residency: SimulatedResidency,
        clock: VirtualClock,
        costs: RooflineCosts,
        scripts: Scripts,
        tail_tokens: int,
        moments: Moments | None = None,
    ) -> None:
        self._moments = moments
        self._residency, self._clock, self._costs = residency, clock, costs
        self._scripts, self._tail_tokens = scripts, tail_tokens
        self.num_rows = 0
        self._read = self._seen = 0
        self._batch: list[Row] = []

    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        for row in joining:
            if not row.tokens:
                self._extend(row, 1)
        self.num_rows = padded_rows(len(staying) + len(joining))
        self._arrange([*staying, *joining])

    def max_tokens(self, running: Sequence[Row]) -> int:
        return min(self._tail_tokens - row.forwarded % self._tail_tokens for row in running)

    def run(
        self, running: Sequence[Row], max_tokens: int, enough: int, *, goes_on: bool = False
    ) -> Ran:
        del goes_on
        if len(running) < len(self._batch):
            self._arrange(running)
        counting = awaited(running)
        left = {row: self._scripts.step(row.node).tokens - len(row.tokens) for row in counting}
        # Seen a token late, except where nobody goes on.
        last = max(n + (not self._scripts.step(row.node).stop.ends_path) for row, n in left.items())
        count = min(max_tokens, sorted(left.values())[enough - 1] + 1, last)
        grow = len(self._batch)
        own = sum(row.forwarded + 1 for row in self._batch)
        read, seen = self._read + own, self._seen + own
        self._clock.run(self._costs.tokens(self.num_rows, read, seen, grow, count))
        for row in running:
            self._extend(row, count)
        return Ran(count, count * self.num_rows)

    def store(self, tokens: Mapping[Row, int]) -> None:
        missing = {row: n - row.segment.length for row, n in tokens.items()}
        missing = {row: count for row, count in missing.items() if count > 0}
        self._residency.append([row.segment for row in missing], list(missing.values()))
        if self._moments is not None:
            used = dict.fromkeys(segment for row in tokens for segment in row.needs())
            self._moments.append({s: s.blocks_for(s.length) for s in used if s.length})

    def text(self, row: Row) -> str:
        """A script has none."""
        del row
        return ""

    def close(self) -> None:
        self.num_rows, self._batch = 0, []

    def release(self) -> None:
        self.close()

    def _extend(self, row: Row, count: int) -> None:
        """So many tokens, as far as the step goes; one more forwards its last one."""
        step = self._scripts.step(row.node)
        left = step.tokens - len(row.tokens)
        row.tokens += [0] * min(count, left)
        if len(row.tokens) == step.tokens:
            row.stop = step.stop
            if count > left and not step.stop.ends_path:
                row.hidden = _FORWARDED

    def _arrange(self, rows: Sequence[Row]) -> None:
        """The present batch, and the tokens of its paths: read, and seen. Who has left is not."""
        self._batch = list(rows)
        self._seen = self._read = sum(row.node.start for row in rows)
        if self._costs.layout is Layout.TREE:
            shared: dict[Segment, None] = {}
            for row in rows:
                shared.update(dict.fromkeys(row.needs()))
            own = {row.segment for row in rows}
            kv = (segment for segment in shared if segment not in own and not segment.group.fixed)
            self._read = sum(segment.length for segment in kv)
