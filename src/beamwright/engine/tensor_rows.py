"""TensorRows: the rows of the running batch on a device. Knows no queue and no residency.

A token is one step of tensor operations at fixed addresses: forward pass, sampling, stop detection,
what was drawn appended to buffers. The host looks at the stop codes one step behind, to learn that
an iteration is not worth going on with, and reads everything when it is over. So a step can be
captured as a CUDA graph and replayed (`graphs`); called plainly it does the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from beamwright.engine.chains import last_hidden
from beamwright.engine.graphs import EagerReplay, Replay
from beamwright.engine.likeliest import LikeliestBuffers
from beamwright.engine.paths import path_to
from beamwright.engine.row import Row, awaited
from beamwright.engine.row_sampling import RowSampling, Ways
from beamwright.engine.running import ITERATION_TOKENS
from beamwright.engine.sampling import Sampler, draws_in_kernel, stack_keys
from beamwright.engine.stop_strings import StopStrings, text_before
from beamwright.engine.stops import StopWords, stop_reason
from beamwright.errors import NotFiniteError
from beamwright.models import DecodeSession, TextCodec, TreeModel
from beamwright.sections import StepSettings
from beamwright.tree import StopReason


class StepBuffers:
    """Everything that a step of `num_rows` rows reads and writes beside KV; never moved.

    hidden: final hidden states [rows, embed_dim] for their shape, type and device.
    Results are [step, row]; `index` [1] is the next step's place in them.
    captured: shapes do not depend on who is in the batch.
    """

    def __init__(
        self,
        num_rows: int,
        words: StopWords,
        stats: Collection[str],
        hidden: torch.Tensor,
        *,
        captured: bool = False,
    ) -> None:
        device = hidden.device

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._words, self._arrangement = words, -1
        self.keys = zeros(num_rows, 2, dtype=torch.int32)
        self.sampling = RowSampling(num_rows, device)
        self._moving = zeros(4, num_rows)
        self.tokens, self.positions, state, left = self._moving
        self.stops = words.new_state(state, left)
        self.index = zeros(1)
        size = (ITERATION_TOKENS, num_rows)
        self.drawn, self.logprobs = zeros(*size), zeros(*size, dtype=torch.float32)
        self.codes = zeros(*size, dtype=torch.uint8)
        self.hidden = hidden.new_zeros(ITERATION_TOKENS, *hidden.shape)
        self.stats = {name: zeros(*size, dtype=torch.float32) for name in stats}
        self.likeliest = LikeliestBuffers(*size, everyone=captured)

    def load(self, rows: Sequence[Row | None], arrangement: int) -> None:
        """Begin an iteration with these rows; None pads the batch.

        arrangement: another number wherever the rows are others than before.
        """
        real = [row or _first(rows) for row in rows]
        if arrangement != self._arrangement:
            self._load_rows(real)
            top = [row.decoding.sampling.top_logprobs if row else 0 for row in rows]
            self.likeliest.load(top, self.keys.device)
            self._arrangement = arrangement
        moving = [
            [row.tokens[-1] if row.tokens else 0 for row in real],
            [row.node.start + row.forwarded for row in real],
            [self._words.first_state(row.decoding.step) + row.matched for row in real],
            [row.tokens_left for row in real],
        ]
        self._moving.copy_(torch.tensor(moving))
        self.index.zero_()

    def _load_rows(self, rows: Sequence[Row]) -> None:
        """What stays the same as long as a row runs."""
        self.keys.copy_(stack_keys([row.key for row in rows], self.keys.device))
        self.sampling.load([row.decoding.sampling for row in rows], [r.node.greedy for r in rows])
        self._words.load([row.decoding.step for row in rows], self.stops)

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor, codes: torch.Tensor) -> None:
        """What a step drew [rows]."""
        self.tokens.copy_(tokens)
        self.drawn.index_copy_(0, self.index, tokens.unsqueeze(0))
        self.logprobs.index_copy_(0, self.index, logprobs.unsqueeze(0))
        self.codes.index_copy_(0, self.index, codes.unsqueeze(0))
        self.index.add_(1)

    @property
    def ways(self) -> tuple[Ways, bool, bool]:
        """What a step computes at all, and a captured one always will."""
        return self.sampling.ways, self.stops.delimited, self.likeliest.asked

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """What the tokens of this step lead to [rows, embed_dim]."""
        self.hidden.index_copy_(0, self.index, hidden.unsqueeze(0))

    def keep(self, stats: Mapping[str, torch.Tensor]) -> None:
        """Statistics of the token that is drawn next [rows]."""
        for name, values in stats.items():
            self.stats[name].index_copy_(0, self.index, values.unsqueeze(0))


class TensorRows:
    """The `Rows` of a model: tokens in tensors, KV in a `DecodeSession`.

    token_stats: names of what is kept of every token's distribution (`sampling.TOKEN_STATS`).
    replay: how steps are run; None for plain calls whose memory goes with the rows.
    """

    def __init__(
        self,
        model: TreeModel,
        codec: TextCodec | None,
        token_stats: Collection[str] = (),
        replay: Replay | None = None,
    ) -> None:
        self._decoder, self._codec = model.decoder, codec
        device, vocab = model.decoder.device, model.decoder.shape.vocab
        self._num_tokens = min(vocab, codec.vocab_size) if codec is not None else vocab
        self._sampler = Sampler(
            self._num_tokens,
            device,
            token_stats,
            model.decoder.tile_rows,
            captured=replay is not None,
            fused=draws_in_kernel(device, model.backend.name),
        )
        eos = codec.eos_ids if codec is not None else frozenset()
        self._words = StopWords(eos, codec.token_bytes if codec is not None else None, device)
        self._strings = StopStrings(codec)
        self._stats = sorted(token_stats)
        self.replay: Replay = replay or EagerReplay()
        self._stays = replay is not None
        self._session = DecodeSession(model.decoder, model.store, model.backend, stays=self._stays)
        self._buffers: dict[int, StepBuffers] = {}
        self._rows: list[Row | None] = []
        self._unread: frozenset[int] = frozenset()
        self._arrangement = 0

    @property
    def num_rows(self) -> int:
        return self._session.num_rows

    @property
    def held_bytes(self) -> int:
        return self._session.held_bytes - self.replay.idle_bytes if self._stays else 0

    def learn_begun(self, row: Row) -> None:
        row.matched = self._words.matched(row.decoding.step, row.tokens)

    def max_tokens(self, running: Sequence[Row]) -> int:
        del running
        return self._session.max_tokens()

    def text(self, row: Row) -> str:
        if self._codec is None:
            return ""
        text = self._codec.decode(row.reply_ids())
        if row.stop is StopReason.STOP_STRING:
            return text_before(text, row.decoding.step.stop_strings)
        return text

    # --- who is in the batch -----------------------------------------------------------------

    def learn(self, step: StepSettings) -> None:
        """Look up beforehand what ends steps of these settings."""
        self._words.learn([step])

    @torch.inference_mode()
    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        self._draw_first([row for row in joining if not row.tokens])
        places = self._places()
        paths = [path_to(row.node.parent) for row in joining]
        segments = [row.segment for row in joining]
        self._session.arrange([places[row] for row in staying], paths, segments)
        padding = self._session.num_rows - len(staying) - len(joining)
        self._rows = [*staying, *joining, *([None] * padding)]
        self._arrangement += 1

    @torch.inference_mode()
    def close(self) -> None:
        self._session.close()
        self._rows = []
        if not self._stays:
            self._buffers.clear()

    @torch.inference_mode()
    def release(self) -> None:
        self._session.release()
        self.replay.release()
        self._buffers.clear()
        self._rows = []

    @torch.inference_mode()
    def store(self, tokens: Mapping[Row, int]) -> None:
        places = self._places()
        self._session.store({places[row]: n for row, n in tokens.items() if row in places})

    def _places(self) -> dict[Row, int]:
        return {row: place for place, row in enumerate(self._rows) if row is not None}

    # --- tokens ------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, running: Sequence[Row], max_tokens: int, enough: int) -> int:
        present = set(running)
        gone = [place for row, place in self._places().items() if row not in present]
        if gone:
            for place in gone:
                self._rows[place] = None
            self._session.drop(gone)
            self._arrangement += 1
        self._unread = frozenset(n for n, row in enumerate(self._rows) if row is None)
        buffers = self._step_buffers(self.num_rows)
        buffers.load(self._rows, self._arrangement)
        self._session.prepare(max_tokens)
        num_done = 0
        try:
            for _ in self._tokens(buffers, max_tokens, enough):
                num_done += 1
        except torch.OutOfMemoryError:
            for row in running:
                row.node.usage["overrun"] += num_done
            raise
        self._take(self._rows, buffers, num_done)
        return num_done

    def _tokens(self, buffers: StepBuffers, max_tokens: int, enough: int) -> Iterator[None]:
        """Launches token after token, and looks at what each drew one step late."""
        places = self._places()
        counting = awaited([*places])
        live = {places[row] for row in counting}
        going = {places[row] for row in counting if row.stop is None}
        behind = None
        step = partial(self._step, buffers)
        key = (self._session.tail_shape, buffers.ways)
        version = self._session.num_moves + self._words.num_moves
        for number in range(max_tokens):
            self.replay.run(key, version, step)
            self._session.advance()
            yield
            before, behind = behind, self.replay.fetch(buffers.codes[number])
            if before is not None:
                going -= _stopped(before())
            if len(live) - len(going) >= enough:
                return
            if self.replay.is_plain and not going - self._ended(behind()):
                return  # nobody would get anything of another token

    def _ended(self, codes: Sequence[int]) -> set[int]:
        """Places of the rows whose paths end with these codes."""
        stopped = [(place, self._rows[place]) for place in _stopped(codes)]
        return {n for n, row in stopped if row and stop_reason(codes[n], row.limit).ends_path}

    def _step(self, buffers: StepBuffers) -> None:
        """One token of every row. Tensor operations only: this is what is captured."""
        hidden = self._session.compute(buffers.tokens, buffers.positions)
        buffers.keep_hidden(hidden)
        # Rows that have stopped stay inside the context; what they decode is dropped.
        buffers.positions.add_(1).clamp_(max=self._decoder.shape.context - 1)
        self._draw(buffers, self._decoder.logits(hidden), self._unread)

    def _draw(
        self, buffers: StepBuffers, logits: torch.Tensor, unread: Collection[int] = ()
    ) -> None:
        """A token of every row from what its last one leads to [rows, vocab]."""
        drawn = self._sampler.sample(
            logits, buffers.keys, buffers.positions, buffers.sampling, unread
        )
        buffers.keep(self._sampler.stats(logits))
        buffers.likeliest.keep(logits, self._num_tokens, buffers.index)
        buffers.append(*drawn, self._words.observe(drawn[0], buffers.stops))

    def _draw_first(self, rows: Sequence[Row]) -> None:
        """The first token of these rows' steps, from what their parents' last tokens lead to."""
        if not rows:
            return
        hidden = torch.cat([last_hidden(row.node.parent) for row in rows])
        buffers = StepBuffers(len(rows), self._words, self._stats, hidden[:, :0])
        buffers.load(rows, self._arrangement)
        self._draw(buffers, self._decoder.logits(hidden))
        self._take(rows, buffers, 1)

    def _take(self, rows: Sequence[Row | None], buffers: StepBuffers, num_done: int) -> None:
        """Write what an iteration drew to the rows."""
        columns = [buffers.drawn, buffers.logprobs, buffers.codes, *buffers.stats.values()]
        tokens, logprobs, codes, *stats = (each[:num_done].T.tolist() for each in columns)
        top = buffers.likeliest.found(num_done)
        states = buffers.stops.state.tolist()
        forwarded: list[tuple[Row, int, int]] = []
        for place, row in enumerate(rows):
            if row is None:
                continue
            before = len(row.tokens)
            if row.stop is None:
                mine = [values[place] for values in stats]
                self._strings.mark(row, tokens[place], codes[place])
                _extend(row, tokens[place], logprobs[place], codes[place], self._stats, mine)
                if place in top:
                    row.top += top[place][: len(row.tokens) - before]
                row.matched = states[place] - self._words.first_state(row.decoding.step)
            if row.stop is None:
                continue
            used = len(row.tokens) - before
            if not row.stop.ends_path and used < num_done:
                forwarded.append((row, used, place))
                used += 1
            row.node.usage["overrun"] += num_done - used
        _keep_hidden(forwarded, buffers.hidden)

    def _step_buffers(self, num_rows: int) -> StepBuffers:
        known = self._buffers.get(num_rows)
        if known is None:
            embedding = self._decoder.weights.embedding
            hidden = embedding.new_empty(num_rows, embedding.shape[1])
            known = StepBuffers(num_rows, self._words, self._stats, hidden, captured=self._stays)
            self._buffers[num_rows] = known
        return known


def _extend(
    row: Row,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    codes: Sequence[int],
    names: Sequence[str],
    stats: Sequence[Sequence[float]],
) -> None:
    """Add tokens to a row up to the one that ends its step."""
    for number, code in enumerate(codes):
        if not math.isfinite(logprobs[number]):
            row.error = _no_distribution(row)
            return
        row.tokens.append(tokens[number])
        row.logprobs.append(logprobs[number])
        for name, values in zip(names, stats, strict=True):
            row.stats.setdefault(name, []).append(values[number])
        if code:
            row.stop = stop_reason(code, row.limit)
            return


def _keep_hidden(forwarded: Sequence[tuple[Row, int, int]], hidden: torch.Tensor) -> None:
    """Give these rows the states of their last tokens, each from its place [step, row]."""
    if not forwarded:
        return
    rows, steps, places = zip(*forwarded, strict=True)
    for row, state in zip(rows, hidden[list(steps), list(places)].split(1), strict=True):
        row.hidden = state.clone()  # a row must not keep the others' alive


def _stopped(codes: Sequence[int]) -> set[int]:
    return {place for place, code in enumerate(codes) if code} if any(codes) else set()


def _no_distribution(row: Row) -> NotFiniteError:
    place = f"problem {row.node.problem_id}, step {row.node.depth}, token {len(row.tokens) + 1}"
    return NotFiniteError(
        f"the generator's logits are NaN or infinite: {place} "
        "(a damaged checkpoint, or an overflow: try another --dtype)"
    )


def _first(rows: Sequence[Row | None]) -> Row:
    return next(row for row in rows if row is not None)
