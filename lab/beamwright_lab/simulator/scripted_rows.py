"""ScriptedRows: rows of the running batch with steps known in advance, on a virtual clock.

Admission, preemption and all KV management are those of the real `engine.batch.RunningBatch`. It
decides nothing during an iteration, so the clock advances once per iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from beamwright.engine.row import IterationWork, Row, filter_open_rows
from beamwright.kv.segments import Segment
from beamwright.models.decoder import padded_rows
from beamwright.plan.costs import Layout
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.replay import Scripts
from beamwright_lab.simulator.residency import SimulatedResidency

_FORWARDED = object()

# A list with one entry whenever KV is stored: the segments in use, each with its blocks.
Moments = list[dict[Segment, int]]


class ScriptedRows:
    """A `RowRunner` that follows a script.

    tail_tokens: size of a row's tail (KV before it is stored in a segment).
    """

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
                self._add_tokens(row, 1)
        self.num_rows = padded_rows(len(staying) + len(joining))
        self._set_batch([*staying, *joining])

    def max_tokens(self, running: Sequence[Row]) -> int:
        return min(self._tail_tokens - row.forwarded % self._tail_tokens for row in running)

    def run(
        self, running: Sequence[Row], max_tokens: int, enough: int, *, goes_on: bool = False
    ) -> IterationWork:
        del goes_on
        if len(running) < len(self._batch):
            self._set_batch(running)
        counting = filter_open_rows(running)
        left = {row: self._scripts.step(row.node).tokens - len(row.tokens) for row in counting}
        # A row's end is noticed one token late, unless its path ends.
        last = max(n + (not self._scripts.step(row.node).ends_path) for row, n in left.items())
        count = min(max_tokens, sorted(left.values())[enough - 1] + 1, last)
        grow = len(self._batch)
        own = sum(row.forwarded + 1 for row in self._batch)
        read, seen = self._read + own, self._seen + own
        self._clock.run(self._costs.tokens(self.num_rows, read, seen, grow, count))
        for row in running:
            self._add_tokens(row, count)
        return IterationWork(count, count * self.num_rows)

    def store(self, tokens: Mapping[Row, int]) -> None:
        missing = {row: n - row.segment.length for row, n in tokens.items()}
        missing = {row: count for row, count in missing.items() if count > 0}
        self._residency.append([row.segment for row in missing], list(missing.values()))
        if self._moments is not None:
            used = dict.fromkeys(segment for row in tokens for segment in row.needed_segments())
            self._moments.append({s: s.blocks_for(s.length) for s in used if s.length})

    def reply_text(self, row: Row) -> str:
        """Return an empty text: scripts have none."""
        del row
        return ""

    def close(self) -> None:
        self.num_rows, self._batch = 0, []

    def release(self) -> None:
        self.close()

    def _add_tokens(self, row: Row, count: int) -> None:
        """Add up to `count` tokens of the row's step.

        If `count` is larger than what is left, the step's last token has been forwarded too.
        """
        step = self._scripts.step(row.node)
        left = step.tokens - len(row.tokens)
        row.tokens += [0] * min(count, left)
        if len(row.tokens) == step.tokens:
            row.stop = step.stop
            if count > left and not step.ends_path:
                row.hidden = _FORWARDED

    def _set_batch(self, rows: Sequence[Row]) -> None:
        """Make these rows the batch, and count the KV tokens that their paths read and see."""
        self._batch = list(rows)
        self._seen = self._read = sum(row.node.start for row in rows)
        if self._costs.layout is Layout.TREE:
            shared: dict[Segment, None] = {}
            for row in rows:
                shared.update(dict.fromkeys(row.needed_segments()))
            own = {row.segment for row in rows}
            kv = (
                segment
                for segment in shared
                if segment not in own and not segment.group.state_blocks
            )
            self._read = sum(segment.length for segment in kv)
