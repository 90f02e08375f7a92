"""Room: what rows read and will write, in blocks, and whether the device has it for them.

Knows rows, segments and expected lengths; no queue, no order, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from beamwright.engine.chains import GeneratorState
from beamwright.engine.demand import DemandBuilder
from beamwright.engine.lengths import StepLengths
from beamwright.engine.paths import OWNER, path_to, segment_name
from beamwright.engine.row import Row, parts_read
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Path, PathPart, Segment, copies_needed
from beamwright.protocols import KVDemand
from beamwright.tree import Node

_LEAST_BEGUN = 2


class Room:
    """The device of one residency, as rows see it. Creates their segments."""

    def __init__(self, residency: CacheManager, lengths: StepLengths) -> None:
        self._residency, self._lengths = residency, lengths
        self._demand = DemandBuilder(residency, lengths.expected)

    def row(self, node: Node, group: int) -> Row:
        """A node's step: at its start, or where it was preempted."""
        state: GeneratorState | None = node.handles.get(OWNER)
        if state is None:
            segment = self._residency.create(segment_name(node), node.start)
            decoding = self._lengths.decodings.of(node)
            row = Row(node, segment, decoding, self._lengths.limit(node), group)
            state = node.handles[OWNER] = GeneratorState(segment, row=row)
        assert state.row is not None
        return state.row

    def duplicates(self, node: Node, begun: Node, share: float) -> list[Row]:
        """The row of an open node with a share of its sibling's tokens; none if that is too few.

        Their KV is computed when it joins (`chains`).
        """
        state: GeneratorState | None = begun.handles.get(OWNER)
        under_way = None if begun.token_ids or state is None else state.row
        tokens: Sequence[int] = begun.token_ids if under_way is None else under_way.tokens
        source = begun if under_way is None else under_way
        row = self.row(node, 0)
        most = len(tokens) - (source.stop is not None)  # the last one ends a step
        count = min(int(share * len(tokens)), row.limit.tokens - 1, most)
        if count < _LEAST_BEGUN or row.tokens:
            return []
        row.tokens, row.logprobs = list(tokens[:count]), list(source.logprobs[:count])
        row.top = list(source.top[:count])
        row.stats = {name: list(values[:count]) for name, values in source.stats.items()}
        return [row]

    def read_by(self, rows: Iterable[Row]) -> dict[Segment, int]:
        """Device copies that these rows read."""
        return self._copies(map(parts_read, rows))

    def written_by(self, rows: Iterable[Row]) -> dict[Segment, int]:
        """Tokens that blocks are kept for when these rows are admitted."""
        return {row.segment: self._lengths.reserved(row.node, row.forwarded) for row in rows}

    def fits(self, rows: Sequence[Row]) -> bool:
        """Is there room for what these rows read, and for what their steps will write?"""
        parents = dict.fromkeys(row.node.parent for row in rows if row.node.parent is not None)
        grown = self.written_by(rows)
        for parent in parents:
            state: GeneratorState | None = parent.handles.get(OWNER)
            if state is None:
                grown[Segment()] = len(parent.token_ids)
            elif state.segment.length < len(parent.token_ids):
                grown[state.segment] = len(parent.token_ids)
        return self._residency.fits(self._residency.beside_others(self.read_by(rows)), grown)

    def is_free(self, rows: Sequence[Row]) -> bool:
        """Is it there at once, so that nothing has to come or to leave for these rows?"""
        needs = self.read_by(rows)
        resident = all(segment.resident for segment in needs)
        return resident and self._residency.is_free(needs, self.written_by(rows))

    def demand(self, beams: Sequence[Node]) -> KVDemand | None:
        """What these open nodes need; None where nothing can leave the device."""
        return self._demand.build(beams) if self._residency.evicts else None

    def look_ahead(
        self, coming: Sequence[Sequence[Node]], growing: Iterable[Row], *, prefetch: bool
    ) -> None:
        """Say what waits, group by group, and start to fetch what comes next."""
        if not self._residency.evicts:
            return
        needs = [self._copies(map(_parts, nodes)) for nodes in coming]
        self._residency.expect(needs)
        if not coming:
            return
        if prefetch:
            self._residency.prefetch(needs[0])
        growth = [self._lengths.expected(node) for node in coming[0]]
        self._residency.write_ahead(needs[0], growth, {row.segment for row in growing})

    def at_least(self, error: BeamwrightError, row: Row) -> BeamwrightError:
        """The error, with the least budget that one row of this length needs, and a block more."""
        if not isinstance(error, CapacityError):
            return error
        ledger = self._residency.device
        steps = [len(above.token_ids) for above in row.node.path()[:-1]]
        blocks = sum(map(ledger.blocks_for, [*steps, row.limit.tokens])) + 1
        least = blocks * ledger.bytes_per_block
        return error.at_least(least) if least > ledger.budget.total_bytes else error

    def _copies(self, paths: Iterable[Path]) -> dict[Segment, int]:
        return copies_needed(paths, per_beam=self._residency.copies_per_beam)


def _parts(node: Node) -> tuple[PathPart, ...]:
    """What a waiting node reads."""
    state: GeneratorState | None = node.handles.get(OWNER)
    return path_to(node.parent) if state is None or state.row is None else parts_read(state.row)
