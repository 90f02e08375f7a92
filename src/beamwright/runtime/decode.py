"""Decode a group of beams to the end of their step: the plain token loop of one executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from beamwright.config import SamplingSettings, StepSettings
from beamwright.kv import Path, PathPart, Segment
from beamwright.models import PrefillRequest, TextCodec, TreeModel
from beamwright.models.decoder import padded_rows
from beamwright.protocols import StepDecoded
from beamwright.runtime.sampling import Sampler, lineage_key, stack_keys
from beamwright.runtime.stops import DelimiterTable, StopDetector, row_limit
from beamwright.tree import Node, StopReason

OWNER = "generator"
_COMPACT_BELOW = 0.75


@dataclass
class GeneratorState:
    """What a node holds: its segment, and the final hidden state [1, embed_dim] of its last token.

    The last token of a step is forwarded when the node is extended, so `hidden` is None until
    then and the segment is one token short of the node.
    """

    segment: Segment
    hidden: torch.Tensor | None = None


@dataclass
class _Row:
    node: Node
    segment: Segment
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None


class StepDecoder:
    """Writes the next step of open nodes. Owns the `generator` handles."""

    def __init__(
        self,
        model: TreeModel,
        codec: TextCodec | None,
        sampling: SamplingSettings,
        step: StepSettings,
        seed: int,
    ) -> None:
        self.model = model
        self._codec, self._step, self._seed = codec, step, seed
        device, vocab = model.decoder.device, model.decoder.shape.vocab
        num_tokens = min(vocab, codec.vocab_size) if codec is not None else vocab
        self._sampler = Sampler(sampling, num_tokens, device)
        self._eos = codec.eos_ids if codec is not None else frozenset()
        self._table: DelimiterTable | None = None
        if codec is not None and step.step_tokens is None:
            self._table = DelimiterTable(step.delimiter.encode(), codec.token_bytes(), device)

    # --- one group ---------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, beams: Sequence[Node]) -> list[StepDecoded]:
        """Decode `beams` to the end of their steps.

        Raises:
            CapacityError: if the KV budget cannot hold them; their new segments are freed.
        """
        self._complete_parents(beams)
        rows = [_Row(node, self.model.store.create()) for node in beams]
        try:
            self._run(rows)
        except BaseException:
            for row in rows:
                self.model.store.free(row.segment)
            raise
        return [self._finished(row) for row in rows]

    def _run(self, rows: list[_Row]) -> None:
        """Token by token until every row has stopped; stopped rows are dropped in bulk."""
        model, device = self.model, self.model.decoder.device
        session = model.open_session(
            [self._path(row.node.parent) for row in rows], [row.segment for row in rows]
        )
        try:
            batch = _Batch(rows, session.num_rows, self._seed, device)
            limits = [row_limit(row.node, self._step, model.decoder.shape.context) for row in rows]
            stops = StopDetector(
                self._step, self._eos, self._table, limits, session.num_rows, device
            )
            hidden = torch.cat([self._hidden(row.node.parent) for row in batch.rows])
            while True:
                tokens, logprobs = self._sampler.sample(
                    model.decoder.logits(hidden), batch.keys, batch.positions
                )
                batch.append(tokens.tolist(), logprobs.tolist())
                stopped = {i: r for i, r in stops.feed(tokens).items() if batch.active[i]}
                if stopped:
                    batch.stop(stopped)
                    # A path that has ended is never extended, so nobody will read its KV.
                    session.seal([i for i, reason in stopped.items() if not reason.ends_path])
                    session.drop(list(stopped))
                    active = batch.active_rows()
                    if not active:
                        return
                    if _worth_compacting(len(active), session.num_rows):
                        kept = session.keep_rows(active)
                        batch.keep_rows(kept)
                        stops.keep_rows(kept)
                        tokens = tokens[torch.tensor(kept, device=device)]
                hidden = session.forward(tokens, batch.positions)
                # Rows that have stopped stay inside the context; what they decode is dropped.
                batch.positions.add_(1).clamp_(max=model.decoder.shape.context - 1)
                batch.count_overrun()
        finally:
            session.close()

    # --- parents -----------------------------------------------------------------------------

    def _complete_parents(self, beams: Sequence[Node]) -> None:
        """Forward what a parent still owes: a root's prompt, or a step's last token."""
        parents = dict.fromkeys(node.parent for node in beams if node.parent is not None)
        owing = [node for node in parents if not self._has_hidden(node)]
        for node in parents:
            node.usage["generator_reused"] += node.end
        requests: list[PrefillRequest] = []
        for node in owing:
            if node.parent is None:
                node.handles[OWNER] = GeneratorState(self.model.store.create())
                node.usage["generator_prefilled"] += len(node.token_ids)
                tokens: Sequence[int] = node.token_ids
            else:
                tokens = node.token_ids[-1:]
            node.usage["generator_reused"] -= len(tokens)
            path, segment = self._path(node.parent), self._state(node).segment
            requests.append(PrefillRequest(path, segment, tokens, node.end - len(tokens)))
        for node, hidden in zip(owing, self.model.prefill(requests), strict=True):
            # A copy: the last row must not keep a whole prompt's states alive.
            self._state(node).hidden = hidden[-1:].clone()

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
        states = (self._state(ancestor) for ancestor in node.path())
        return tuple(PathPart(state.segment, state.segment.length) for state in states)

    # --- results -----------------------------------------------------------------------------

    def _finished(self, row: _Row) -> StepDecoded:
        node = row.node
        if row.stop is None or node.parent is None:
            raise AssertionError(f"{node!r} has not stopped")
        node.handles[OWNER] = GeneratorState(row.segment)
        text = ""
        if self._codec is not None:
            prompt = len(node.root.token_ids)
            text = self._codec.decode(node.parent.path_token_ids()[prompt:] + row.tokens)
        return StepDecoded(node, tuple(row.tokens), tuple(row.logprobs), row.stop, text)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            state = node.handles.pop(OWNER, None)
            if state is not None:
                self.model.store.free(state.segment)


class _Batch:
    """The rows of the present batch; padding repeats the first row and is never active."""

    def __init__(self, rows: list[_Row], num_rows: int, seed: int, device: torch.device) -> None:
        padding = num_rows - len(rows)
        self.rows = [*rows, *([rows[0]] * padding)]
        self.active = [True] * len(rows) + [False] * padding
        self._is_padding = [False] * len(rows) + [True] * padding
        keys = [lineage_key(seed, row.node.lineage) for row in self.rows]
        self.keys = stack_keys(keys, device)
        self.positions = torch.tensor([row.node.start for row in self.rows], device=device)

    def append(self, tokens: list[int], logprobs: list[float]) -> None:
        for row, active, token, logprob in zip(
            self.rows, self.active, tokens, logprobs, strict=True
        ):
            if active:
                row.tokens.append(token)
                row.logprobs.append(logprob)

    def stop(self, stopped: dict[int, StopReason]) -> None:
        for index, reason in stopped.items():
            self.rows[index].stop = reason
            self.active[index] = False

    def active_rows(self) -> list[int]:
        return [index for index, active in enumerate(self.active) if active]

    def count_overrun(self) -> None:
        """Real rows that have stopped and are still in the batch decode a token for nothing."""
        for row, active, padding in zip(self.rows, self.active, self._is_padding, strict=True):
            if not active and not padding:
                row.node.usage["overrun"] += 1

    def keep_rows(self, kept: list[int]) -> None:
        self.rows = [self.rows[index] for index in kept]
        self.active = [self.active[index] for index in kept]
        self._is_padding = [self._is_padding[index] for index in kept]
        index = torch.tensor(kept, device=self.keys.device)
        self.keys, self.positions = self.keys[index], self.positions[index]


def _worth_compacting(num_active: int, num_rows: int) -> bool:
    return padded_rows(num_active) <= _COMPACT_BELOW * num_rows


__all__ = ["OWNER", "GeneratorState", "StepDecoder"]
