"""Decode a group of beams to the end of their step: the plain token loop of one executor.

A group's KV is leased first, so all of it is on the device; what the next group needs is fetched
meanwhile, and new KV goes home block by block (LBS section 4). A beam for which no block can be
found is parked and goes on in a later group, with the same random stream and the same sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import groupby

import torch

from beamwright.config import SamplingSettings, StepSettings
from beamwright.errors import CapacityError, DeviceMemoryError
from beamwright.kv import PathPart, Segment, Source, copies_needed
from beamwright.models import TextCodec, TreeModel
from beamwright.models.device_memory import is_out_of_memory
from beamwright.models.session import DecodeSession
from beamwright.progress import Progress
from beamwright.protocols import DecodeWork, ScheduleView, StepDecoded, StepParked
from beamwright.runtime.batch import Batch, Row, worth_compacting
from beamwright.runtime.bursts import Bursts, make_replay
from beamwright.runtime.chains import (
    OWNER,
    Chains,
    GeneratorState,
    last_hidden,
    path_to,
    segment_name,
    segment_of,
)
from beamwright.runtime.demand import DemandBuilder
from beamwright.runtime.expect import StepLengths
from beamwright.runtime.room import WorkingRoom
from beamwright.runtime.sampling import Sampler
from beamwright.runtime.stops import DelimiterTable, StopDetector, StopWords, row_limit
from beamwright.tree import Node, StopReason


class StepDecoder:
    """Writes the next step of open nodes. Owns the `generator` handles.

    token_stats: names of what is kept of every token's distribution (`sampling.TOKEN_STATS`).
    graphs: `auto`, `on` or `off`, see `bursts`; statistics are taken token by token whatever it is.
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
        graphs: str = "off",
        progress: Progress | None = None,
    ) -> None:
        self.model, self._progress = model, progress or Progress()
        self._chains = Chains(model, self._progress)
        self._room = WorkingRoom.of(model)
        self._reuse, self._prefetch = reuse, prefetch
        self._codec, self._step, self._seed = codec, step, seed
        device, vocab = model.decoder.device, model.decoder.shape.vocab
        num_tokens = min(vocab, codec.vocab_size) if codec is not None else vocab
        self._sampler = Sampler(sampling, num_tokens, device, token_stats, model.decoder.tile_rows)
        self._eos = codec.eos_ids if codec is not None else frozenset()
        self._table: DelimiterTable | None = None
        if codec is not None and step.step_tokens is None:
            self._table = DelimiterTable(step.delimiter.encode(), codec.token_bytes(), device)
        replay = None if token_stats else make_replay(graphs, model)
        words = StopWords(step, self._eos, self._table, device)
        self._bursts = Bursts(model, self._sampler, words, replay) if replay is not None else None
        self._lengths = StepLengths(step, model.decoder.shape.context)
        self._demand = DemandBuilder(model.store, segment_of, self._lengths.expected)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """See `protocols.Executor`."""
        demand = self._demand.build(beams) if self.model.store.evicts else None
        longest = max(map(self._lengths.expected, beams), default=1)
        held_bytes = self._bursts.buffers.tail.num_bytes if self._bursts is not None else 0
        return ScheduleView(beams, demand, self._room.max_rows(longest, held_bytes))

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
        """Rows that have decoded equally many tokens.

        Where the device has no working memory for all of them, those that have not stopped begin
        again, half of them at a time: their random streams are their own, so the tree is the same.
        """
        if self._attempt(rows, work):
            return
        if len(rows) == 1:
            raise DeviceMemoryError("one beam's step cannot be decoded")
        self._room.failed(len(rows))
        left = [row for row in rows if row.stop is None]
        for row in left:
            row.restart()
            self.model.store.clear(row.segment)
        half = -(-len(rows) // 2)
        for first in range(0, len(left), half):
            self._decode_rows(left[first : first + half], work)

    def _attempt(self, rows: list[Row], work: DecodeWork) -> bool:
        """False if the device's memory does not suffice; nothing is held then."""
        try:
            self._decode_together(rows, work)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._bursts is not None:
                self._bursts.release()
            return False
        return True

    def _decode_together(self, rows: list[Row], work: DecodeWork) -> None:
        store = self.model.store
        beams = [row.node for row in rows]
        with store.lease(self._needs(beams)) as lease:
            parents = self._chains.complete(beams, lease)
            if work.write_back:
                store.write_back(parents)
                store.write_back(store.dirty())
            self._reserve(rows)
            if self._prefetch and work.upcoming:
                store.prefetch(self._needs(work.upcoming[0]))
            longest = max(map(self._lengths.expected, beams))
            session = self.model.open_session(
                [path_to(row.node.parent) for row in rows],
                [row.segment for row in rows],
                lease=lease,
                write_back=work.write_back,
                fixed=self._bursts.expect(longest) if self._bursts is not None else None,
            )
            try:
                self._run(rows, session)
            finally:
                session.close()

    def _least_bytes(self, node: Node) -> int:
        """The least device budget for a node: its path with the longest step, and a block more."""
        ledger = self.model.store.device
        steps = [len(above.token_ids) for above in node.path()[:-1]]
        steps.append(row_limit(node, self._step, self.model.decoder.shape.context).tokens)
        return (sum(map(ledger.blocks_for, steps)) + 1) * ledger.bytes_per_block

    def _reserve(self, rows: list[Row]) -> None:
        """Take the blocks that the steps are expected to fill; a longer step asks for more."""
        wanted = {row.segment: self._lengths.expected(row.node) for row in rows}
        with suppress(CapacityError):  # block by block then; where not even that fits, it is parked
            self.model.store.reserve(wanted)

    def _run(self, rows: list[Row], session: DecodeSession) -> None:
        """Token by token until every row has stopped; stopped rows are dropped in bulk."""
        device = self.model.decoder.device
        batch = Batch(rows, session.num_rows, self._seed, device, self._progress)
        stops = self._stops(batch)
        if rows[0].tokens:  # parked before: the last token is drawn, but not forwarded
            tokens = batch.token(-1)
        else:
            hidden = torch.cat([last_hidden(row.node.parent) for row in batch.rows])
            tokens = self._draw(batch, session, stops, hidden)
        while True:
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
                tokens = tokens[torch.tensor(kept, device=tokens.device)]
            advance = self._next_token if self._bursts is None else self._next_tokens
            tokens = advance(batch, session, stops, tokens)

    def _next_token(
        self, batch: Batch, session: DecodeSession, stops: StopDetector, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Forward the newest token of every row and draw the next."""
        hidden = session.forward(tokens, batch.positions)
        # Rows that have stopped stay inside the context; what they decode is dropped.
        batch.positions.add_(1).clamp_(max=self.model.decoder.shape.context - 1)
        batch.count_overrun()
        return self._draw(batch, session, stops, hidden)

    def _next_tokens(
        self, batch: Batch, session: DecodeSession, stops: StopDetector, tokens: torch.Tensor
    ) -> torch.Tensor:
        """The same up to the next block, with the host a step behind (see `bursts`)."""
        assert self._bursts is not None
        drawn, tokens = self._bursts.run(batch, session, stops, tokens)
        for number, step in enumerate(drawn):
            batch.count_overrun()
            batch.append(step.tokens, step.logprobs, {})
            surplus = len(drawn) - 1 - number
            self._stop(batch, session, stops.reasons(step.codes), surplus)
        return tokens

    def _draw(
        self, batch: Batch, session: DecodeSession, stops: StopDetector, hidden: torch.Tensor
    ) -> torch.Tensor:
        """A token of every row [rows], given to those that have not stopped."""
        logits = self.model.decoder.logits(hidden)
        tokens, logprobs = self._sampler.sample(logits, batch.keys, batch.positions, batch.greedy)
        batch.append(tokens.tolist(), logprobs.tolist(), self._sampler.stats(logits))
        self._stop(batch, session, stops.feed(tokens))
        return tokens

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
        self,
        batch: Batch,
        session: DecodeSession,
        reasons: dict[int, StopReason],
        surplus: int = 0,
    ) -> None:
        """Complete the steps of these rows. surplus: tokens that they have decoded since."""
        stopped = {i: reason for i, reason in reasons.items() if batch.active[i]}
        if not stopped:
            return
        batch.stop(stopped)
        session.seal([i for i, reason in stopped.items() if not reason.ends_path], surplus=surplus)
        session.drop(list(stopped))
        for index, reason in stopped.items():
            row = batch.rows[index]
            self._lengths.saw(len(row.tokens))
            if reason.ends_path:  # never extended, so nobody will read its KV
                self.model.store.clear(row.segment)

    # --- what is needed ----------------------------------------------------------------------

    def _needs(self, beams: Iterable[Node]) -> dict[Segment, int]:
        """Device copies of each segment that a group reads, parked steps included."""
        paths = []
        for node in beams:
            path = path_to(node.parent)
            own = segment_of(node)
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
        return Row(node, self.model.store.create(segment_name(node)))

    def _finished(self, row: Row) -> StepDecoded | StepParked:
        node, stored = row.node, row.segment.length
        assert node.parent is not None
        source = Source(path_to(node.parent), tuple(row.tokens[:stored]), node.start)
        row.segment.source = source
        if row.stop is None:
            node.handles[OWNER] = GeneratorState(row.segment, parked=row)
            return StepParked(node)
        node.handles[OWNER] = GeneratorState(row.segment)
        text = ""
        if self._codec is not None:
            before = node.parent.path_token_ids()[node.replies_to.end :]
            text = self._codec.decode(before + row.tokens)
        stats = {name: tuple(values) for name, values in row.stats.items()}
        return StepDecoded(node, tuple(row.tokens), tuple(row.logprobs), row.stop, text, stats)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            state = node.handles.pop(OWNER, None)
            if state is not None:
                self.model.store.free(state.segment)


__all__ = ["OWNER", "GeneratorState", "StepDecoder"]
