"""SimulatedDecoder: `runtime.decode.StepDecoder` with a clock in place of tensors.

Knows a script of the search, a residency and what things cost. Every lease, write-back, prefetch
and reservation is made as the real decoder makes it, so equal searches move equal bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from beamwright.errors import CapacityError
from beamwright.kv import Lease, Path, PathPart, Segment, Source
from beamwright.models.prefill import PrefillRequest
from beamwright.protocols import DecodeWork, ScheduleView, StepDecoded, StepParked
from beamwright.runtime.demand import DemandBuilder
from beamwright.runtime.expect import StepLengths
from beamwright.runtime.simulation.replay import Script
from beamwright.runtime.simulation.residency import Prefill, remember
from beamwright.runtime.simulation.session import Machine, SimulatedRow, SimulatedSession
from beamwright.tree import Node

_OWNER = "generator"


@dataclass
class SimulatedState:
    """What a node holds. forwarded: its last token has KV. parked: its step so far."""

    segment: Segment
    forwarded: bool = False
    parked: SimulatedRow | None = None


class SimulatedDecoder:
    """Lets the steps of a script happen. Owns the `generator` handles; see `executor.Decoder`."""

    def __init__(
        self,
        machine: Machine,
        script: Script,
        lengths: StepLengths,
        *,
        reuse: bool = True,
        prefetch: bool = True,
    ) -> None:
        self.machine = machine
        self._residency, self._script, self._lengths = machine.residency, script, lengths
        self._reuse, self._prefetch = reuse, prefetch
        self._prefill = Prefill(machine.residency, machine.clock, machine.costs)
        home = machine.residency.home
        self._recomputes = home is not None and home.recompute
        self._demand = DemandBuilder(machine.residency, _segment_of, lengths.expected)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """See `protocols.Executor`; working memory is not simulated."""
        return ScheduleView(beams, self._demand.build(beams) if self._residency.evicts else None)

    def decode(self, work: DecodeWork) -> list[StepDecoded | StepParked]:
        """Decode the beams of a group to the end of their steps.

        Raises:
            CapacityError: if not even one beam fits; the segments of all that were under way are
                freed.
        """
        residency = self._residency
        if not self._reuse and work.grouped:
            residency.evict_all()
        rows = [self._row(node) for node in work.beams]
        try:
            residency.expect([self._needs(group) for group in work.upcoming])
            rows.sort(key=lambda row: row.drawn)  # stable: depth-first among equals
            for _, same in groupby(rows, key=lambda row: row.drawn):
                self._decode_rows(list(same), work)
        except BaseException:
            for row in rows:
                row.node.handles.pop(_OWNER, None)
                residency.free(row.segment)
            raise
        return [self._finished(row) for row in rows]

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            state = node.handles.pop(_OWNER, None)
            if state is not None:
                self._residency.free(state.segment)

    # --- one group ---------------------------------------------------------------------------

    def _decode_rows(self, rows: list[SimulatedRow], work: DecodeWork) -> None:
        """Rows that have drawn equally many tokens."""
        residency = self._residency
        beams = [row.node for row in rows]
        with residency.lease(self._needs(beams)) as lease:
            parents = self._complete_parents(beams, lease)
            if work.write_back:
                residency.write_back(parents)
                residency.write_back(residency.dirty())
            self._reserve(rows)
            if self._prefetch and work.upcoming:
                residency.prefetch(self._needs(work.upcoming[0]))
            SimulatedSession(
                self.machine,
                rows,
                lease,
                self._path_needs,
                self._lengths.saw,
                write_back=work.write_back,
            ).run()

    def _reserve(self, rows: Sequence[SimulatedRow]) -> None:
        wanted = {row.segment: self._lengths.expected(row.node) for row in rows}
        try:
            self._residency.reserve(wanted)
        except CapacityError:
            return  # block by block then, and beams are parked where even that does not fit

    def _complete_parents(self, beams: Sequence[Node], lease: Lease) -> list[Segment]:
        """Forward what a parent still owes: a root's prompt, or a step's last token."""
        parents = dict.fromkeys(node.parent for node in beams if node.parent is not None)
        requests: list[PrefillRequest] = []
        for node in parents:
            state: SimulatedState | None = node.handles.get(_OWNER)
            if state is not None and state.forwarded:
                continue
            if state is None:
                state = SimulatedState(self._residency.create(_name(node)))
                node.handles[_OWNER] = state
            tokens = node.token_ids if node.parent is None else node.token_ids[-1:]
            start = node.end - len(tokens)
            requests.append(PrefillRequest(_path(node.parent), state.segment, tokens, start))
            state.forwarded = True
        lease.add({request.segment: 1 for request in requests if not request.segment.length})
        self._prefill.run(requests)
        if self._recomputes:
            for request in requests:
                remember(request)
        return [request.segment for request in requests]

    # --- what is needed ----------------------------------------------------------------------

    def _needs(self, beams: Sequence[Node]) -> dict[Segment, int]:
        """Device copies of each segment that a group reads, parked steps included."""
        return self._count_needs(beams)

    def _path_needs(self, beams: Sequence[Node]) -> dict[Segment, int]:
        """The same without the beams' own steps."""
        return self._count_needs([beam.parent for beam in beams if beam.parent is not None])

    def _count_needs(self, leaves: Sequence[Node]) -> dict[Segment, int]:
        """`kv.copies_needed` of the paths to these nodes, without making paths."""
        per_beam = self._residency.copies_per_beam
        needs: Counter[Segment] = Counter()
        seen: set[Node] = set()
        for leaf in leaves:
            fresh: list[Segment] = []
            node: Node | None = leaf
            while node is not None and node not in seen:
                state = node.handles.get(_OWNER)
                if state is not None and state.segment.length:
                    fresh.append(state.segment)
                if not per_beam:
                    seen.add(node)
                node = node.parent
            for segment in reversed(fresh):
                needs[segment] = needs[segment] + 1 if per_beam else 1
        return needs

    # --- rows --------------------------------------------------------------------------------

    def _row(self, node: Node) -> SimulatedRow:
        """Where a node's step stands: at its start, or where it was parked."""
        state: SimulatedState | None = node.handles.get(_OWNER)
        if state is not None:
            assert state.parked is not None
            return state.parked
        step = self._script.step(node)
        return SimulatedRow(node, self._residency.create(_name(node)), step.tokens, step.stop)

    def _finished(self, row: SimulatedRow) -> StepDecoded | StepParked:
        node = row.node
        if self._recomputes:
            stored = (0,) * row.segment.length
            row.segment.source = Source(_path(node.parent), stored, node.start)
        if not row.complete:
            node.handles[_OWNER] = SimulatedState(row.segment, parked=row)
            return StepParked(node)
        node.handles[_OWNER] = SimulatedState(row.segment)
        return StepDecoded(node, (0,) * row.tokens, (), row.stop, "")


def _segment_of(node: Node) -> Segment | None:
    state: SimulatedState | None = node.handles.get(_OWNER)
    return None if state is None else state.segment


def _path(node: Node | None) -> Path:
    if node is None:
        return ()
    states = (ancestor.handles.get(_OWNER) for ancestor in node.path())
    return tuple(
        PathPart(state.segment, state.segment.length) for state in states if state is not None
    )


def _name(node: Node) -> str:
    return ".".join(map(str, node.lineage))


__all__ = ["SimulatedDecoder"]
