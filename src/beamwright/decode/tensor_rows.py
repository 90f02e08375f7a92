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

from beamwright.config import SamplingSettings, StepSettings
from beamwright.decode.chains import last_hidden
from beamwright.decode.graphs import EagerReplay, Replay
from beamwright.decode.paths import path_to
from beamwright.decode.row import Row
from beamwright.decode.running import ITERATION_TOKENS
from beamwright.decode.sampling import Sampler, lineage_key, stack_keys
from beamwright.decode.stops import DelimiterTable, StopState, StopWords, stop_reason
from beamwright.errors import NotFiniteError
from beamwright.models import DecodeSession, TextCodec, TreeModel


class StepBuffers:
    """Everything that a step of `num_rows` rows reads and writes beside KV; never moved.

    Results are [step, row]; `index` [1] is the next step's place in them.
    """

    def __init__(self, num_rows: int, stats: Collection[str], device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens, self.positions = zeros(num_rows), zeros(num_rows)
        self.keys = zeros(num_rows, 2, dtype=torch.int32)
        self.greedy = zeros(num_rows, dtype=torch.bool)
        self.any_greedy = False
        self.stops = StopState(matched=zeros(num_rows), left=zeros(num_rows))
        self.index = zeros(1)
        size = (ITERATION_TOKENS, num_rows)
        self.drawn, self.logprobs = zeros(*size), zeros(*size, dtype=torch.float32)
        self.codes = zeros(*size, dtype=torch.uint8)
        self.stats = {name: zeros(*size, dtype=torch.float32) for name in stats}

    def load(self, rows: Sequence[Row | None], seed: int) -> None:
        """Begin an iteration with these rows; None pads the batch."""
        real = [row or _first(rows) for row in rows]
        newest = [row.tokens[-1] if row.tokens else 0 for row in real]
        device = self.tokens.device
        self.tokens.copy_(torch.tensor(newest))
        self.positions.copy_(torch.tensor([row.node.start + row.forwarded for row in real]))
        self.keys.copy_(stack_keys([lineage_key(seed, r.node.lineage) for r in real], device))
        greedy = [row.node.greedy for row in real]
        self.any_greedy = any(greedy)
        self.greedy.copy_(torch.tensor(greedy))
        self.stops.matched.copy_(torch.tensor([row.matched for row in real]))
        self.stops.left.copy_(torch.tensor([row.tokens_left for row in real]))
        self.index.zero_()

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor, codes: torch.Tensor) -> None:
        """What a step drew [rows]."""
        self.tokens.copy_(tokens)
        self.drawn.index_copy_(0, self.index, tokens.unsqueeze(0))
        self.logprobs.index_copy_(0, self.index, logprobs.unsqueeze(0))
        self.codes.index_copy_(0, self.index, codes.unsqueeze(0))
        self.index.add_(1)

    def keep(self, stats: Mapping[str, torch.Tensor]) -> None:
        """Statistics of the token that is drawn next [rows]."""
        for name, values in stats.items():
            self.stats[name].index_copy_(0, self.index, values.unsqueeze(0))


class TensorRows:
    """See `row.Rows`.

    token_stats: names of what is kept of every token's distribution (`sampling.TOKEN_STATS`).
    replay: how steps are run; None for plain calls whose memory goes with the rows.
    """

    def __init__(
        self,
        model: TreeModel,
        codec: TextCodec | None,
        sampling: SamplingSettings,
        step: StepSettings,
        seed: int,
        token_stats: Collection[str] = (),
        replay: Replay | None = None,
    ) -> None:
        self._decoder, self._codec, self._seed = model.decoder, codec, seed
        device, vocab = model.decoder.device, model.decoder.shape.vocab
        num_tokens = min(vocab, codec.vocab_size) if codec is not None else vocab
        self._sampler = Sampler(sampling, num_tokens, device, token_stats, model.decoder.tile_rows)
        eos = codec.eos_ids if codec is not None else frozenset()
        table = None
        if codec is not None and step.step_tokens is None:
            table = DelimiterTable(step.delimiter.encode(), codec.token_bytes(), device)
        self._words = StopWords(step, eos, table, device)
        self._stats = sorted(token_stats)
        self.replay: Replay = replay or EagerReplay()
        self._stays = replay is not None
        self._session = DecodeSession(model.decoder, model.store, model.backend, stays=self._stays)
        self._buffers: dict[int, StepBuffers] = {}
        self._rows: list[Row | None] = []

    @property
    def num_rows(self) -> int:
        """See `Rows`."""
        return self._session.num_rows

    @property
    def held_bytes(self) -> int:
        """See `Rows`."""
        return self._session.held_bytes if self._stays else 0

    def most_tokens(self, running: Sequence[Row]) -> int:
        """See `Rows`."""
        del running
        return self._session.most_tokens()

    def text(self, row: Row) -> str:
        """See `Rows`."""
        if self._codec is None:
            return ""
        assert row.node.parent is not None
        before = row.node.parent.path_token_ids()[row.node.replies_to.end :]
        return self._codec.decode(before + row.tokens)

    # --- who is in the batch -----------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        """See `Rows`."""
        self._draw_first([row for row in joining if not row.tokens])
        place = {row: number for number, row in enumerate(self._rows) if row is not None}
        kept = [place[row] for row in staying]
        paths = [path_to(row.node.parent) for row in joining]
        self._session.arrange(kept, paths, [row.segment for row in joining])
        self._set_rows([*staying, *joining])

    @torch.inference_mode()
    def compact(self, staying: Sequence[Row]) -> None:
        """See `Rows`."""
        place = {row: number for number, row in enumerate(self._rows) if row is not None}
        self._session.arrange([place[row] for row in staying])
        self._set_rows(staying)

    @torch.inference_mode()
    def close(self) -> None:
        """See `Rows`."""
        self._session.close()
        self._rows = []
        if not self._stays:
            self._buffers.clear()

    @torch.inference_mode()
    def release(self) -> None:
        """See `Rows`."""
        self._session.release()
        self.replay.release()
        self._buffers.clear()
        self._rows = []

    @torch.inference_mode()
    def store(self, tokens: Mapping[Row, int]) -> None:
        """See `Rows`."""
        place = {row: number for number, row in enumerate(self._rows) if row is not None}
        self._session.store({place[row]: count for row, count in tokens.items() if row in place})

    def _set_rows(self, rows: Sequence[Row]) -> None:
        self._rows = [*rows, *([None] * (self._session.num_rows - len(rows)))]

    # --- tokens ------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, running: Sequence[Row], most: int, enough: int) -> int:
        """See `Rows`."""
        present = set(running)
        gone = [i for i, row in enumerate(self._rows) if row is not None and row not in present]
        for place in gone:
            self._rows[place] = None
        self._session.drop(gone)
        buffers = self._step_buffers(self.num_rows)
        buffers.load(self._rows, self._seed)
        self._session.prepare(most)
        num_done = 0
        try:
            for _ in self._tokens(buffers, most, enough):
                num_done += 1
        except torch.OutOfMemoryError:
            for row in running:
                row.node.usage["overrun"] += num_done
            raise
        self._take(buffers, num_done)
        return num_done

    def _tokens(self, buffers: StepBuffers, most: int, enough: int) -> Iterator[None]:
        """Launches token after token, and looks at what each drew one step late."""
        live = {place for place, row in enumerate(self._rows) if row is not None}
        going, behind = set(live), None
        step = partial(self._step, buffers)
        key = (self._session.tail_shape, buffers.any_greedy)
        for number in range(most):
            self.replay.run(key, self._session.num_moves, step)
            self._session.advance()
            yield
            before, behind = behind, self.replay.fetch(buffers.codes[number])
            if before is not None:
                going -= {place for place, code in enumerate(before()) if code}
            if len(live) - len(going) >= enough:
                return
            if self.replay.is_plain and not going - {p for p, c in enumerate(behind()) if c}:
                return  # nobody would get anything of another token

    def _step(self, buffers: StepBuffers) -> None:
        """One token of every row. Tensor operations only: this is what is captured."""
        hidden = self._session.compute(buffers.tokens, buffers.positions)
        # Rows that have stopped stay inside the context; what they decode is dropped.
        buffers.positions.add_(1).clamp_(max=self._decoder.shape.context - 1)
        logits = self._decoder.logits(hidden)
        greedy = buffers.greedy if buffers.any_greedy else None
        drawn = self._sampler.sample(logits, buffers.keys, buffers.positions, greedy)
        buffers.keep(self._sampler.stats(logits))
        buffers.append(*drawn, self._words.observe(drawn[0], buffers.stops))

    def _take(self, buffers: StepBuffers, num_done: int) -> None:
        """Write what an iteration drew to the rows."""
        columns = [buffers.drawn, buffers.logprobs, buffers.codes, *buffers.stats.values()]
        tokens, logprobs, codes, *stats = (each[:num_done].T.tolist() for each in columns)
        matched = buffers.stops.matched.tolist()
        for place, row in enumerate(self._rows):
            if row is None:
                continue
            mine = [values[place] for values in stats]
            _extend(row, tokens[place], logprobs[place], codes[place], self._stats, mine)
            row.matched = matched[place]

    def _draw_first(self, rows: Sequence[Row]) -> None:
        """The first token of these rows' steps, from what their parents' last tokens lead to."""
        if not rows:
            return
        hidden = torch.cat([last_hidden(row.node.parent) for row in rows])
        logits = self._decoder.logits(hidden)
        buffers = StepBuffers(len(rows), self._stats, logits.device)
        buffers.load(rows, self._seed)
        greedy = buffers.greedy if buffers.any_greedy else None
        drawn = self._sampler.sample(logits, buffers.keys, buffers.positions, greedy)
        buffers.keep(self._sampler.stats(logits))
        buffers.append(*drawn, self._words.observe(drawn[0], buffers.stops))
        before, self._rows = self._rows, list(rows)
        self._take(buffers, 1)
        self._rows = before

    def _step_buffers(self, num_rows: int) -> StepBuffers:
        known = self._buffers.get(num_rows)
        if known is None:
            known = StepBuffers(num_rows, self._stats, self._decoder.device)
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
    """Add tokens to a row up to the one that ends its step; those behind it are overrun."""
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
            row.node.usage["overrun"] += len(codes) - number - 1
            return


def _no_distribution(row: Row) -> NotFiniteError:
    place = f"problem {row.node.problem_id}, step {row.node.depth}, token {len(row.tokens) + 1}"
    return NotFiniteError(
        f"the generator's logits are NaN or infinite: {place} "
        "(a damaged checkpoint, or an overflow: try another --dtype)"
    )


def _first(rows: Sequence[Row | None]) -> Row:
    return next(row for row in rows if row is not None)
