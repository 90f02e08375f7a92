"""Decode a group of beams to the end of their step: the plain token loop of one executor.

A group's KV is leased first, so all of it is on the device; what the next group needs is fetched
meanwhile, and new KV goes home block by block (LBS section 4). A beam for which no block can be
found is parked and goes on in a later group, with the same random stream and the same sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from beamwright.config import SamplingSettings, StepSettings
from beamwright.errors import CapacityError
from beamwright.kv import Lease, Path, PathPart, Segment, Source, copies_needed
from beamwright.models import PrefillRequest, TextCodec, TreeModel
from beamwright.models.session import DecodeSession
from beamwright.protocols import DecodeWork, KVDemand, StepDecoded, StepParked
from beamwright.runtime.batch import Batch, Row, worth_compacting
from beamwright.runtime.demand import DemandBuilder
from beamwright.runtime.expect import StepLengths
from beamwright.runtime.sampling import Sampler
from beamwright.runtime.stops import DelimiterTable, StopDetector, row_limit
from beamwright.tree import Node

OWNER = "generator"


@dataclass
class GeneratorState:
    """What a node holds: its segment, and the final hidden state [1, embed_dim] of its last token.

    The last token of a step is forwarded when the node is extended, so `hidden` is None until
    then and the segment is one token short of the node.
    parked: the step so far, of a node that ran out of room.
    """

    segment: Segment
    hidden: torch.Tensor | None = None
    parked: Row | None = None


class StepDecoder:
    """Writes the next step of open nodes. Owns the `generator` handles.

    token_stats: names of what is kept of every token's distribution (`sampling.TOKEN_STATS`).
    """

    def __init__(
        self,
        model: TreeModel,
        codec: TextCodec | None,
        sampling: SamplingSettings,
        step: StepSettings,
        seed: int,
        *,
        reuse: bool = True,
        prefetch: bool = True,
        token_stats: Collection[str] = (),
    ) -> None:
        self.model = model
        self._reuse, self._prefetch = reuse, prefetch
        self._codec, self._step, self._seed = codec, step, seed
        device, vocab = model.decoder.device, model.decoder.shape.vocab
        num_tokens = min(vocab, codec.vocab_size) if codec is not None else vocab
        self._sampler = Sampler(sampling, num_tokens, device, token_stats)
        self._eos = codec.eos_ids if codec is not None else frozenset()
        self._table: DelimiterTable | None = None
        if codec is not None and step.step_tokens is None:
            self._table = DelimiterTable(step.delimiter.encode(), codec.token_bytes(), device)
        self._lengths = StepLengths(step, model.decoder.shape.context)
        self._demand = DemandBuilder(model.store, _segment_of, self._lengths.expected)

    def demand(self, beams: Sequence[Node]) -> KVDemand | None:
        """See `protocols.Executor`."""
        return self._demand.build(beams) if self.model.store.evicts else None

    # --- one group ---------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, work: DecodeWork) -> list[StepDecoded | StepParked]:
        """Decode the beams of a group to the end of their steps.

        Raises:
            CapacityError: if not even one beam fits; the segments of all that were under way are
                freed. LinkError: if the link has failed.
        """
        store = self.model.store
        if not self._reuse and work.grouped:
            store.evict_all()
        rows = [self._row(node) for node in work.beams]
        try:
            store.expect([self._needs(group) for group in work.upcoming])
            rows.sort(key=lambda row: len(row.tokens))  # stable: depth-first among equals
            for _, same in groupby(rows, key=lambda row: len(row.tokens)):
                self._decode_rows(list(same), work)
            return [self._finished(row) for row in rows]
        except BaseException as error:
            least = max(self._least_bytes(node) for node in work.beams)
            for row in rows:
                row.node.handles.pop(OWNER, None)
                store.free(row.segment)
            if isinstance(error, CapacityError) and least > store.device.budget.total_bytes:
                raise error.at_least(least) from None
            raise

    def _decode_rows(self, rows: list[Row], work: DecodeWork) -> None:
        """Rows that have decoded equally many tokens."""
        store = self.model.store
        beams = [row.node for row in rows]
        with store.lease(self._needs(beams)) as lease:
            parents = self._complete_parents(beams, lease)
            if work.write_back:
                store.write_back(parents)
                store.write_back(store.dirty())
            self._reserve(rows)
            if self._prefetch and work.upcoming:
                store.prefetch(self._needs(work.upcoming[0]))
            session = self.model.open_session(
                [self._path(row.node.parent) for row in rows],
                [row.segment for row in rows],
                lease=lease,
                write_back=work.write_back,
            )
            try:
                self._run(rows, session)
            finally:
                session.close()

    def _least_bytes(self, node: Node) -> int:
        """The least device budget for a node: its path with the longest step, and a block more."""
        ledger = self.model.store.device
        context = self.model.decoder.shape.context
        steps = [len(above.token_ids) for above in node.path()[:-1]]
        steps.append(row_limit(node, self._step, context).tokens)
        return (sum(map(ledger.blocks_for, steps)) + 1) * ledger.bytes_per_block

    def _reserve(self, rows: list[Row]) -> None:
        """Take the blocks that the steps are expected to fill; a longer step asks for more."""
        wanted = {row.segment: self._lengths.expected(row.node) for row in rows}
        try:
            self.model.store.reserve(wanted)
        except CapacityError:
            return  # block by block then, and beams are parked where even that does not fit

    def _run(self, rows: list[Row], session: DecodeSession) -> None:
        """Token by token until every row has stopped; stopped rows are dropped in bulk."""
        decoder = self.model.decoder
        batch = Batch(rows, session.num_rows, self._seed, decoder.device)
        stops = self._stops(batch)
        hidden: torch.Tensor | None = None
        if rows[0].tokens:  # parked before: the last token is drawn, but not forwarded
            tokens = batch.token(-1)
        else:
            hidden = torch.cat([self._hidden(row.node.parent) for row in batch.rows])
        while True:
            if hidden is not None:
                logits = decoder.logits(hidden)
                tokens, logprobs = self._sampler.sample(
                    logits, batch.keys, batch.positions, batch.greedy
                )
                batch.append(tokens.tolist(), logprobs.tolist(), self._sampler.stats(logits))
                self._stop(batch, session, stops, tokens)
            active = batch.active_rows()
            parked = session.make_room(active) if active else []
            batch.park(parked)
            active = [index for index in active if index not in parked]
            if not active:
                return
            if worth_compacting(len(active), session.num_rows):
                kept = session.keep_rows(active)
                batch.keep_rows(kept)
                stops.keep_rows(kept)
                tokens = tokens[torch.tensor(kept, device=decoder.device)]
            hidden = session.forward(tokens, batch.positions)
            # Rows that have stopped stay inside the context; what they decode is dropped.
            batch.positions.add_(1).clamp_(max=decoder.shape.context - 1)
            batch.count_overrun()

    def _stops(self, batch: Batch) -> StopDetector:
        """A detector that has seen what parked rows decoded before."""
        context, device = self.model.decoder.shape.context, self.model.decoder.device
        real = [row for row, active in zip(batch.rows, batch.active, strict=True) if active]
        limits = [row_limit(row.node, self._step, context) for row in real]
        stops = StopDetector(self._step, self._eos, self._table, limits, len(batch.rows), device)
        for index in range(len(batch.rows[0].tokens)):
            stops.feed(batch.token(index))
        return stops

    def _stop(
        self, batch: Batch, session: DecodeSession, stops: StopDetector, tokens: torch.Tensor
    ) -> None:
        stopped = {i: r for i, r in stops.feed(tokens).items() if batch.active[i]}
        if not stopped:
            return
        batch.stop(stopped)
        session.seal([i for i, reason in stopped.items() if not reason.ends_path])
        session.drop(list(stopped))
        for index, reason in stopped.items():
            row = batch.rows[index]
            self._lengths.saw(len(row.tokens))
            if reason.ends_path:  # never extended, so nobody will read its KV
                self.model.store.clear(row.segment)

    # --- parents -----------------------------------------------------------------------------

    def _complete_parents(self, beams: Sequence[Node], lease: Lease) -> list[Segment]:
        """Forward what a parent still owes: a root's prompt, or a step's last token.

        Returns the segments that have grown; those that were empty join the lease.
        """
        parents = dict.fromkeys(node.parent for node in beams if node.parent is not None)
        owing = [node for node in parents if not self._has_hidden(node)]
        for node in parents:
            node.usage["generator_reused"] += node.end
        requests: list[PrefillRequest] = []
        for node in owing:
            if node.parent is None:
                node.handles[OWNER] = GeneratorState(self.model.store.create(_name(node)))
                node.usage["generator_prefilled"] += len(node.token_ids)
                tokens: Sequence[int] = node.token_ids
            else:
                tokens = node.token_ids[-1:]
            node.usage["generator_reused"] -= len(tokens)
            path, segment = self._path(node.parent), self._state(node).segment
            requests.append(PrefillRequest(path, segment, tokens, node.end - len(tokens)))
        lease.add({request.segment: 1 for request in requests if not request.segment.length})
        for node, hidden in zip(owing, self.model.prefill(requests), strict=True):
            # A copy: the last row must not keep a whole prompt's states alive.
            self._state(node).hidden = hidden[-1:].clone()
        return [request.segment for request in requests]

    def _has_hidden(self, node: Node) -> bool:
        state = node.handles.get(OWNER)
        return state is not None and state.hidden is not None

    def _state(self, node: Node | None) -> GeneratorState:
        if node is None:
            raise AssertionError("a root has no parent state")
        state: GeneratorState = node.handles[OWNER]
        return state

    def _hidden(self, node: Node | None) -> torch.Tensor:
        hidden = self._state(node).hidden
        if hidden is None:
            raise AssertionError(f"{node!r} is not complete")
        return hidden

    def _path(self, node: Node | None) -> Path:
        if node is None:
            return ()
        states = (node.handles.get(OWNER) for node in node.path())
        return tuple(
            PathPart(state.segment, state.segment.length) for state in states if state is not None
        )

    def _needs(self, beams: Iterable[Node]) -> dict[Segment, int]:
        """Device copies of each segment that a group reads, parked steps included."""
        paths = []
        for node in beams:
            path = self._path(node.parent)
            own = _segment_of(node)
            paths.append(path if own is None else (*path, PathPart(own, own.length)))
        return copies_needed(paths, per_beam=self.model.backend.copies_per_beam)

    # --- results -----------------------------------------------------------------------------

    def _row(self, node: Node) -> Row:
        """Where a node's step stands: at its start, or where it was parked."""
        state = node.handles.get(OWNER)
        if state is not None:
            assert state.parked is not None
            row: Row = state.parked
            return row
        return Row(node, self.model.store.create(_name(node)))

    def _finished(self, row: Row) -> StepDecoded | StepParked:
        node, stored = row.node, row.segment.length
        assert node.parent is not None
        source = Source(self._path(node.parent), tuple(row.tokens[:stored]), node.start)
        row.segment.source = source
        if row.stop is None:
            node.handles[OWNER] = GeneratorState(row.segment, parked=row)
            return StepParked(node)
        node.handles[OWNER] = GeneratorState(row.segment)
        text = ""
        if self._codec is not None:
            prompt = len(node.root.token_ids)
            text = self._codec.decode(node.parent.path_token_ids()[prompt:] + row.tokens)
        stats = {name: tuple(values) for name, values in row.stats.items()}
        return StepDecoded(node, tuple(row.tokens), tuple(row.logprobs), row.stop, text, stats)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            state = node.handles.pop(OWNER, None)
            if state is not None:
                self.model.store.free(state.segment)


def _segment_of(node: Node) -> Segment | None:
    state = node.handles.get(OWNER)
    return None if state is None else state.segment


def _name(node: Node) -> str:
    return ".".join(map(str, node.lineage))


__all__ = ["OWNER", "GeneratorState", "StepDecoder"]
