"""TensorRowRunner: the model runner. It decodes the rows of the running batch on a device.

For each token, one *pass* runs tensor operations at fixed addresses: forward, sampling, and a copy
of the results into buffers. A pass can therefore be captured as a CUDA graph and replayed
(`graphs`). The host reads tokens one pass late, to see which rows have stopped and when to end the
iteration. It reads all other results when the iteration is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

import torch

from beamwright.config import Settings
from beamwright.counters import Progress
from beamwright.engine.batch import RunningBatch
from beamwright.engine.capacity import BatchSizeLimit, RowManager
from beamwright.engine.draft_passes import DraftPasses, why_no_drafts
from beamwright.engine.drafts import DraftProposer
from beamwright.engine.endings import StopFinder, cut_at_stop_string
from beamwright.engine.graphs import make_replay
from beamwright.engine.row import (
    OWNER,
    DecodingSettings,
    IterationWork,
    Row,
    TreeDecodingSettings,
    node_kv_path,
)
from beamwright.engine.sampling import MOST_LIKELIEST, Sampler, likeliest, samples_in_kernel
from beamwright.engine.step_results import IterationResults, PassBuffers
from beamwright.errors import InputError
from beamwright.kv.streams import send_to_device
from beamwright.models.decoder import pad_for_cuda_graph, padded_rows
from beamwright.models.load import make_free_memory_reader
from beamwright.models.prefill import PrefillRequest
from beamwright.models.prefill_passes import Replay
from beamwright.models.session import DecodeSession
from beamwright.models.tokenizer import TextCodec
from beamwright.models.tree_model import TreeModel
from beamwright.plan.blocks import attention_partial_bytes
from beamwright.plan.machines import PassCosts
from beamwright.tree import StopReason


class TensorRowRunner:
    """The `RowRunner` of a model: it runs passes, and writes sampled tokens to the rows.

    num_tokens: number of token ids that may be sampled; rows of the LM head beyond it have no text.
    token_stats: names of statistics to keep of every token's distribution (`sampling.TOKEN_STATS`).
    replay: runs captured passes; None: plain calls, with buffers that are freed with the rows.
    drafts: source of drafted tokens; None if passes compute one token per row
        (`draft_passes.why_no_drafts`).
    keeps_states: keep the hidden states that tokens are sampled from (`GeneratorState.drawn_from`).
    """

    def __init__(
        self,
        model: TreeModel,
        codec: TextCodec | None,
        token_stats: Collection[str] = (),
        replay: Replay | None = None,
        drafts: DraftProposer | None = None,
        *,
        keeps_states: bool = False,
    ) -> None:
        self._decoder, self._codec = model.decoder, codec
        device, vocab = model.decoder.device, model.decoder.shape.vocab
        self.num_tokens = min(vocab, codec.vocab_size) if codec is not None else vocab
        self._model, self._num_likeliest = model, min(MOST_LIKELIEST, self.num_tokens)
        self._sampler = Sampler(
            self.num_tokens,
            device,
            token_stats,
            model.decoder.tile_rows,
            captured=replay is not None,
            fused=samples_in_kernel(device, model.backend.name),
        )
        self._stops, self._stats = StopFinder(codec), sorted(token_stats)
        self.replay, self._keeps_memory = replay or Replay(), replay is not None
        self._session = DecodeSession(
            model.decoder, model.store, model.backend, stays=self._keeps_memory
        )
        self._drafts, self._keeps_states = drafts, keeps_states
        self._passes = DraftPasses(
            model.decoder, self._session, self._sampler, self._stops, keeps_states
        )
        self._buffers: dict[int, PassBuffers] = {}
        self._rows: list[Row | None] = []
        self._arrangement, self._launched_ahead = 0, False

    @property
    def num_rows(self) -> int:
        return self._session.num_rows

    @property
    def held_bytes(self) -> int:
        cuda_graph_bytes = self.replay.cuda_graph_bytes + self._model.cuda_graph_bytes
        return self._session.held_bytes - cuda_graph_bytes if self._keeps_memory else 0

    def max_tokens(self, running: Sequence[Row]) -> int:
        del running
        return self._session.max_tokens()

    def reply_text(self, row: Row) -> str:
        if self._codec is None:
            return ""
        assert row.node.parent is not None
        text = self._codec.extend_reply(row.node.parent.text, row.tokens)
        text = self._codec.reply_text(row.reply_ids()) if text is None else text
        if row.stop is StopReason.STOP_STRING:
            return cut_at_stop_string(text, row.node, row.decoding.step.stop_strings)
        return text

    # --- rows in the batch -------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        self._discard_launched()
        self._sample_first_tokens([row for row in joining if not row.tokens])
        places = self._places()
        paths = [node_kv_path(row.node.parent) for row in joining]
        segments = [row.segment for row in joining]
        self._session.arrange_rows([places[row] for row in staying], paths, segments)
        padding = self._session.num_rows - len(staying) - len(joining)
        self._rows = [*staying, *joining, *([None] * padding)]
        self._arrangement += 1

    @torch.inference_mode()
    def close(self) -> None:
        self._discard_launched()
        self._session.close()
        self._rows = []
        if not self._keeps_memory:
            self._buffers.clear()

    @torch.inference_mode()
    def release(self) -> None:
        self._discard_launched()
        self._session.release()
        self.replay.release()
        self._model.release()
        self._buffers.clear()
        self._rows = []

    @torch.inference_mode()
    def store(self, tokens: Mapping[Row, int]) -> None:
        places = self._places()
        self._session.copy_to_segments(
            {places[row]: n for row, n in tokens.items() if row in places}
        )

    def _places(self) -> dict[Row, int]:
        return {row: place for place, row in enumerate(self._rows) if row is not None}

    # --- tokens ------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(
        self, running: Sequence[Row], max_tokens: int, enough: int, *, goes_on: bool = False
    ) -> IterationWork:
        present = set(running)
        gone = [place for row, place in self._places().items() if row not in present]
        for place in gone:
            _count_overrun(self._rows[place], self._launched_ahead)
            self._rows[place] = None
        if gone:
            self._session.deactivate_rows(gone)
        undecided = any([row.thought is None for row in running])
        # If the next iteration can use the rows unchanged, its first pass is launched before the
        # host reads this iteration's results.
        ahead = goes_on and not (undecided or self.replay.is_plain or self._decoder.shape.states)
        ahead = ahead and self._session.max_tokens() > max_tokens
        ahead = ahead and self._session.has_room(max_tokens + 1)
        buffers = self._pass_buffers()
        if self._launched_ahead:
            self._session.advance()
        else:
            buffers.load(self._rows, self._arrangement, self._stops)
        if left := max_tokens + int(ahead) - int(self._launched_ahead):
            self._session.prepare(left)
        # If it is not known yet whether a row's step is a thought, change the number, so that the
        # next load copies the settings again: the next token decides it, and with it the step's
        # limit and where the end of the thought is forced.
        self._arrangement += undecided
        rows = self._places(), buffers.keys, buffers.sampling
        with (
            nullcontext()
            if self._drafts is None
            else self._drafts.timed_iteration(running) as drafts
        ):
            if drafts is not None:
                return self._passes.run(*rows, max_tokens, enough, drafts)
            return self._run_plain(buffers, max_tokens, enough, ahead)

    def _run_plain(
        self, buffers: PassBuffers, max_tokens: int, enough: int, ahead: bool
    ) -> IterationWork:
        """Run an iteration with one token per row and pass; `DraftPasses` gives equal tokens.

        ahead: True to launch the next iteration's first pass too, if most rows go on.
        """
        drawn, begun = IterationResults(self._rows, self._stops), self._launched_ahead
        num_done, self._launched_ahead = 0, False
        try:
            for _ in self._launch_passes(buffers, drawn, max_tokens, enough, begun):
                num_done += 1
            drawn.fetch(buffers, self.replay, num_done)
        except torch.OutOfMemoryError:
            for row in self._places():
                _count_overrun(row, num_done)
            raise
        if ahead and drawn.most_continue(num_done):
            with suppress(torch.OutOfMemoryError):  # the next iteration launches the pass instead
                buffers.switch_half()
                self._make_launch(buffers)()
                self._launched_ahead = True
        self._write_results(drawn)
        num_passes = num_done + self._launched_ahead - begun
        return IterationWork(num_passes, num_passes * self.num_rows)

    def _launch_passes(
        self,
        buffers: PassBuffers,
        drawn: IterationResults,
        max_tokens: int,
        enough: int,
        begun: bool,
    ) -> Iterator[None]:
        """Launch one pass after another, reading each pass's tokens one pass late. Yield per pass.

        begun: True if the previous iteration launched the first pass already.
        """
        fetched, sampled = None, buffers.read_results("tokens", max_tokens)
        launch, keeping = self._make_launch(buffers), self._decoder.shape.states
        places = [(n, row) for row, n in self._places().items()] if keeping else []
        for number in range(max_tokens):
            # The pass after a row's stop still forwards its last token. In later passes the row's
            # recurrent state must not change.
            self._session.stop_rows([n for n, row in places if row.stop and number > drawn.used[n]])
            if number or not begun:
                launch()
                self._session.advance()
            yield
            if fetched is not None:
                drawn.read_pass(fetched())
            if drawn.num_stopped >= enough:
                return
            if number + 1 == max_tokens:
                return  # the last tokens are read together with the other results
            fetched = self.replay.fetch(sampled[number])
            if self.replay.is_plain:
                stopped = drawn.num_stopped
                stopped += sum([row.done for row in drawn.read_pass(fetched())])
                fetched = None
                if stopped == drawn.num_awaited:
                    return  # no awaited row needs another pass

    def _make_launch(self, buffers: PassBuffers) -> Callable[[], None]:
        """Return a function that launches one pass. It is valid until the session is rearranged."""
        key, version = (self._session.tail_shape, buffers.pass_flags), self._session.num_moves
        return partial(self.replay.run, key, version, partial(self._compute_pass, buffers))

    def _discard_launched(self) -> None:
        """Discard the pass that was launched ahead, because the rows change.

        The same tokens are sampled again later.
        """
        if self._launched_ahead:
            for row in self._places():
                _count_overrun(row, 1)
        self._launched_ahead = False

    def _compute_pass(self, buffers: PassBuffers) -> None:
        """Compute one token of every row, with tensor operations only (for CUDA graphs)."""
        hidden = self._session.compute(buffers.tokens, buffers.positions)
        buffers.keep_results(hidden=hidden)
        # Stopped rows are computed too; their positions must stay inside the context.
        buffers.positions.add_(1).clamp_(max=self._decoder.shape.context - 1)
        self._sample_tokens(buffers, self._decoder.logits(hidden))

    def _sample_tokens(self, buffers: PassBuffers, logits: torch.Tensor) -> None:
        """Sample a token of every row from `logits` [rows, vocab], and store it in `buffers`."""
        tokens, logprobs = self._sampler.sample(
            logits, buffers.keys, buffers.positions, buffers.sampling, buffers.unread
        )
        buffers.keep_results(
            tokens=tokens, logprobs=logprobs, **self._sampler.stats(logits, buffers.sampling)
        )
        if buffers.wants_top:
            ids, top = likeliest(logits, self.num_tokens)
            buffers.keep_results(top_ids=ids, top_logprobs=top)
        buffers.tokens.copy_(tokens)
        buffers.index.add_(1)

    def _sample_first_tokens(self, rows: Sequence[Row]) -> None:
        """Sample the first token of joining rows, from the last hidden states of their parents."""
        if not rows:
            return
        parents = [row.node.parent for row in rows if row.node.parent is not None]
        places = {parent: place for place, parent in enumerate(dict.fromkeys(parents))}
        hidden = torch.cat([parent.handles[OWNER].hidden for parent in places])
        buffers = PassBuffers(len(rows), self._stats, hidden[:, :0], self._num_likeliest)
        buffers.load(rows, self._arrangement, self._stops)
        siblings = [places[parent] for parent in parents]
        self._sample_tokens(
            buffers, self._decoder.logits(hidden)[send_to_device(siblings, hidden.device)]
        )
        drawn = IterationResults(rows, self._stops)
        drawn.fetch(buffers, self.replay, 1)
        self._write_results(drawn)
        if self._keeps_states:
            for row, parent in zip(rows, siblings, strict=True):
                row.drawn_from.append(hidden[parent : parent + 1])

    def _write_results(self, drawn: IterationResults) -> None:
        """Append an iteration's tokens, log-probabilities and hidden states to its rows."""
        num_done, hidden = drawn.num_passes, drawn.hidden
        tokens, columns = drawn.tokens(), drawn.numbers_by_name()
        forwarded: list[tuple[Row, int, int]] = []
        for place, row in enumerate(drawn.rows):
            if row is None:
                continue
            used = drawn.used[place] if row.stop is not None else num_done
            if self._keeps_states and hidden.shape[2] and used:
                row.drawn_from.append(hidden[:used, place].clone())
            if used:
                row.append_tokens(tokens[place][:used], columns[place])
            row.top += drawn.top(place, used, row.decoding.sampling.top_logprobs)
            if row.stop is None or row.error is not None:
                continue
            if not row.stop.ends_path and used < num_done:
                forwarded.append((row, used, place))
                used += 1
            _count_overrun(row, num_done - used)
        if forwarded:
            rows, *at = zip(*forwarded, strict=True)
            numbers, places = send_to_device(at, hidden.device)
            for row, state in zip(rows, hidden[numbers, places].split(1), strict=True):
                row.hidden = state

    def _pass_buffers(self) -> PassBuffers:
        """Return the buffers for the current batch size; create them on first use."""
        if self.num_rows not in self._buffers:
            decoder, sizes = self._decoder, (self.num_rows, self._decoder.shape.hidden)
            hidden = torch.empty(sizes, dtype=decoder.dtype, device=decoder.device)
            parts = self.num_rows, self._stats, hidden, self._num_likeliest
            self._buffers[self.num_rows] = PassBuffers(*parts)
        return self._buffers[self.num_rows]


def _count_overrun(row: Row | None, num_tokens: int) -> None:
    """Count tokens that were computed after a row's stop and dropped. row: None for padding."""
    if num_tokens and row is not None:
        row.node.usage["overrun"] += num_tokens


# --- construction ---------------------------------------------------------------------------------


def make_running_batch(
    model: TreeModel,
    codec: TextCodec | None,
    settings: Settings,
    not_captured: Callable[[str], None],
    *,
    token_stats: Collection[str] = (),
    keeps_states: bool = False,
    progress: Progress | None = None,
    costs: PassCosts | None = None,
    rows_bytes: int | None = None,
    scorers: Sequence[TreeModel] = (),
) -> RunningBatch:
    """Create the generator's empty running batch.

    not_captured: called with the reason if passes cannot be captured.
    token_stats, keeps_states: see `TensorRowRunner`.
    costs: time model of a pass and of the link, for schedules.
    rows_bytes: bytes that rows may use besides KV, if the device does not report free memory.
    scorers: other models on the device. Memory of their captured passes looks free, but is not.
    """
    replay = make_replay(settings.schedule.graphs, model, not_captured)
    default = DecodingSettings(settings.sampling, settings.step, settings.search.seed)

    @torch.inference_mode()
    def prefill(requests: Sequence[PrefillRequest]) -> list[torch.Tensor]:
        # A copy, because a view would keep the hidden states of the whole prompt alive.
        return [hidden[-1:].clone() for hidden in model.prefill(requests)]

    drafts, most = None, settings.schedule.drafts
    why_not = why_no_drafts(model, replay)
    if most != "off" and why_not is None:
        drafts = DraftProposer(most)
    elif isinstance(most, int):
        raise InputError(f"--drafts {most}: {why_not}")
    decodings = TreeDecodingSettings(default, codec.thoughts if codec is not None else None)
    rows = TensorRowRunner(model, codec, token_stats, replay, drafts, keeps_states=keeps_states)
    return RunningBatch(
        rows,
        model.store,
        prefill,
        RowManager(model.store, decodings, model.decoder.shape.context),
        settings.schedule,
        _working_memory(
            (model, *scorers),
            costs,
            rows_bytes,
            padded_rows if replay is None else pad_for_cuda_graph,
        ),
        progress,
    )


def _working_memory(
    models: Sequence[TreeModel],
    costs: PassCosts | None,
    rows_bytes: int | None,
    pad: Callable[[int], int],
) -> BatchSizeLimit:
    """Create the limit of the batch size from memory besides KV.

    models: the generator, then the verifiers' models. pad: returns a batch size with padding.
    """
    model, *scorers = models
    shape, pool = model.decoder.shape, model.store.pool

    def row_bytes(step_tokens: int) -> int:
        layouts, tail_tokens = pool.layouts, model.backend.tail_tokens
        if model.backend.writes_blocks:
            beside = sum(attention_partial_bytes(shape.heads, each.head_dim) for each in layouts)
        else:
            # Rearranging rows copies the tails that stay, so a tail exists twice for a moment.
            tokens = min(1 << max(4, (step_tokens - 1).bit_length()), tail_tokens)
            beside = 2 * tokens * sum(each.read_bytes_per_token for each in layouts)
        return beside + shape.working_bytes_per_row(pool.layout.dtype.itemsize)

    free = make_free_memory_reader(model.decoder.device)

    def free_now() -> int:
        all_bytes = free() if free is not None else rows_bytes or 0
        return all_bytes - sum(scorer.cuda_graph_bytes for scorer in scorers)

    is_known = free is not None or rows_bytes is not None
    return BatchSizeLimit(free_now if is_known else None, row_bytes, costs, pad)
