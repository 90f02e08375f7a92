"""Bursts: tokens of a batch in a row, without the host in between. Results as token by token.

A token is one step of tensor operations at fixed addresses: forward pass, sampling, stop detection,
what was drawn appended to buffers. The host looks at the stop codes one step behind, to learn that
a burst is not worth going on with, and reads everything when it is over. A burst ends at the
latest where a row's next block begins: there the host knows all that the plain loop knows, so
saving, parking and flushing happen between bursts exactly as they do between its tokens.

Tokens that a row draws after its step's end are dropped and counted; `DecodeSession.seal` is told
how many there are, so their KV is never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from beamwright.models import DecodeSession, FixedBackend, FixedBuffers, TreeModel
from beamwright.runtime.batch import Batch, worth_compacting
from beamwright.runtime.replay import CudaGraphReplay, EagerReplay, Replay
from beamwright.runtime.sampling import Sampler
from beamwright.runtime.stops import StopDetector, StopState, StopWords


@dataclass(frozen=True)
class Drawn:
    """What one step of a burst drew, a value per row; codes: of `StopWords`."""

    tokens: list[int]
    logprobs: list[float]
    codes: list[int]


class StepBuffers:
    """Everything that a step of `num_rows` rows reads and writes beside KV; never moved.

    Results are [step, row]; `index` [1] is the next step's place in them.
    """

    def __init__(self, num_rows: int, num_steps: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens, self.positions = zeros(num_rows), zeros(num_rows)
        self.keys = zeros(num_rows, 2, dtype=torch.int32)
        self.greedy = zeros(num_rows, dtype=torch.bool)
        self.stops = StopState(matched=zeros(num_rows), left=zeros(num_rows))
        self.index = zeros(1)
        self.drawn = zeros(num_steps, num_rows)
        self.logprobs = zeros(num_steps, num_rows, dtype=torch.float32)
        self.codes = zeros(num_steps, num_rows, dtype=torch.uint8)

    def load(self, batch: Batch, stops: StopDetector, tokens: torch.Tensor) -> None:
        """Begin a burst with this batch, whose newest tokens are these."""
        self.tokens.copy_(tokens)
        self.positions.copy_(batch.positions)
        self.keys.copy_(batch.keys)
        if batch.greedy is None:
            self.greedy.zero_()
        else:
            self.greedy.copy_(batch.greedy)
        self.stops.matched.copy_(stops.state.matched)
        self.stops.left.copy_(stops.state.left)
        self.index.zero_()

    def store(self, batch: Batch, stops: StopDetector) -> torch.Tensor:
        """The burst is over: bring the batch up to date; returns its newest tokens."""
        batch.positions.copy_(self.positions)
        stops.state.matched.copy_(self.stops.matched)
        stops.state.left.copy_(self.stops.left)
        return self.tokens.clone()

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor, codes: torch.Tensor) -> None:
        """What a step drew [rows]."""
        self.tokens.copy_(tokens)
        self.drawn.index_copy_(0, self.index, tokens.unsqueeze(0))
        self.logprobs.index_copy_(0, self.index, logprobs.unsqueeze(0))
        self.codes.index_copy_(0, self.index, codes.unsqueeze(0))
        self.index.add_(1)

    def read(self, num_steps: int) -> list[Drawn]:
        """The first steps' results; waits for the device."""
        lists = (each[:num_steps].tolist() for each in (self.drawn, self.logprobs, self.codes))
        return [Drawn(*step) for step in zip(*lists, strict=True)]


class Bursts:
    """Decodes bursts with one model, whatever the batch; holds its buffers between groups."""

    def __init__(
        self, model: TreeModel, sampler: Sampler, words: StopWords, replay: Replay
    ) -> None:
        self.buffers = FixedBuffers(model.decoder, model.backend, model.store)
        self.replay = replay
        self._decoder, self._sampler, self._words = model.decoder, sampler, words
        self._num_steps = model.store.pool.block_tokens
        self._steps: dict[int, StepBuffers] = {}

    def expect(self, num_tokens: int) -> FixedBuffers:
        """The buffers for a session whose steps will have about so many tokens."""
        self.buffers.tail.expect(num_tokens)
        return self.buffers

    def run(
        self, batch: Batch, session: DecodeSession, stops: StopDetector, tokens: torch.Tensor
    ) -> tuple[list[Drawn], torch.Tensor]:
        """Some tokens, at least one, up to the next block: what was drawn, and the newest tokens.

        The burst is shorter if all rows have stopped, or so many that it is time to compact.

        Raises:
            OutOfMemoryError: the tokens so far are counted as overrun, as they are lost.
        """
        session.prepare()
        buffers = self._step_buffers(session.num_rows)
        buffers.load(batch, stops, tokens)
        active = batch.active_rows()
        left = stops.most_tokens(active) - len(batch.rows[active[0]].tokens)
        most = min(session.tokens_to_block, max(1, left))
        num_done = 0
        try:
            for _ in self._tokens(buffers, session, active, most):
                num_done += 1
        except torch.OutOfMemoryError:
            for row in active:
                batch.rows[row].node.usage["overrun"] += num_done
            raise
        return buffers.read(num_done), buffers.store(batch, stops)

    def release(self) -> None:
        """Give all memory back, captured steps included."""
        self.replay.release()
        self.buffers.release()
        self._steps.clear()

    # --- inside ------------------------------------------------------------------------------

    def _tokens(
        self, buffers: StepBuffers, session: DecodeSession, active: list[int], most: int
    ) -> Iterator[None]:
        """Launches token after token, and looks at what each drew one step late."""
        going, behind = set(active), None
        step = partial(self._step, buffers, session)
        for number in range(most):
            self.replay.run(session.tail_shape, self.buffers.num_moves, step)
            session.advance()
            yield
            before, behind = behind, self.replay.fetch(buffers.codes[number])
            if before is None:
                continue
            going -= {row for row, code in enumerate(before()) if code}
            if not going or worth_compacting(len(going), session.num_rows):
                return

    def _step(self, buffers: StepBuffers, session: DecodeSession) -> None:
        """One token of every row. Tensor operations only: this is what is captured."""
        hidden = session.compute(buffers.tokens, buffers.positions)
        # Rows that have stopped stay inside the context; what they decode is dropped.
        buffers.positions.add_(1).clamp_(max=self._decoder.shape.context - 1)
        tokens, logprobs = self._sampler.sample(
            self._decoder.logits(hidden), buffers.keys, buffers.positions, buffers.greedy
        )
        buffers.append(tokens, logprobs, self._words.observe(tokens, buffers.stops))

    def _step_buffers(self, num_rows: int) -> StepBuffers:
        known = self._steps.get(num_rows)
        if known is None:
            known = StepBuffers(num_rows, self._num_steps, self._decoder.device)
            self._steps[num_rows] = known
        return known


def make_replay(graphs: str, model: TreeModel) -> Replay | None:
    """How `--graphs` runs bursts with this model; None: token by token.

    Layer-wise streaming waits for a transfer inside a step, so it has none.
    """
    if graphs == "off" or model.store.streams_layers:
        return None
    device = model.decoder.device
    if device.type == "cuda" and isinstance(model.backend, FixedBackend):
        return CudaGraphReplay(device)
    return EagerReplay() if graphs == "on" else None
