"""Passes over the tokens that rows of a batch get next: one of each, and those that drafts foresaw.

A draft is computed as a row of the same pass, behind the row's last token: it sees what it would
see, and its logits have the bits that they would have. The token that a row draws at a position
does not depend on when it is drawn (`noise`), so it is the draft or it is not; what stands behind
the first that is not is dropped.

The host looks at every pass, and rows that are done leave at once: a plain path beside the captured
one of `tensor_rows`, which is the specification. Knows no text: who drafts says what is tried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beamwright.engine.drafts import Drafts
from beamwright.engine.endings import StopFinder
from beamwright.engine.row import Ran, Row, awaited
from beamwright.engine.sampling import RowSampling, Sampler, likeliest
from beamwright.models.decoder import Decoder
from beamwright.models.packed import Replay
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel


def why_one_token_each(model: TreeModel, replay: Replay | None) -> str | None:
    """What keeps a model to one token of every row in a pass; None where nothing does.

    A view has to say that it can. Kernels, layers that are streamed and sparse decoding cannot:
    their work lists, transfers and selections are of one token of every row.
    """
    if model.decoder.shape.states:
        return "needs layers whose KV can be dropped, not recurrent ones"
    if not model.backend.spreads:
        return "needs attention in plain torch over whole paths on the device"
    if replay is not None and not replay.is_plain:
        return "not with steps that are captured as CUDA graphs"
    return None


@dataclass
class DraftPasses:
    """Runs an iteration of the rows of a session with drafts. keeps_states: see `TensorRows`."""

    decoder: Decoder
    session: DecodeSession
    sampler: Sampler
    stops: StopFinder
    keeps_states: bool = False

    def run(
        self,
        places: Mapping[Row, int],
        keys: Tensor,
        sampling: RowSampling,
        max_tokens: int,
        enough: int,
        drafts: Drafts,
    ) -> Ran:
        """Passes until a row has got `max_tokens`, or `enough` of those that count are done.

        keys, sampling: of each place.
        """
        counting, left = awaited([*places]), dict.fromkeys(places, max_tokens)
        num_passes = num_rows = 0
        while min(left.values(), default=0) and sum(row.done for row in counting) < enough:
            began = time.perf_counter()
            rooms = {row: min(n, row.forwards_left) - 1 for row, n in left.items()}
            drafted = drafts.draft(rooms, self.decoder.least_rows)
            one = _Pass(drafted, places)
            hidden = self.session.forward_some(one.computed, one.written)
            self._draw(one, hidden, keys, sampling)
            used = {row: self._accept(one, row, hidden) for row in left}
            self.session.advance({places[row]: count for row, count in used.items()})
            drafts.note(drafted, used, len(hidden), time.perf_counter() - began)
            num_passes, num_rows = num_passes + 1, num_rows + len(hidden)
            left = {row: n - used[row] for row, n in left.items() if not row.done}
        return Ran(num_passes, num_rows)

    def _draw(self, one: _Pass, hidden: Tensor, keys: Tensor, sampling: RowSampling) -> None:
        """What each token of a pass leads to."""
        index, positions = torch.tensor([one.rows, one.positions], device=hidden.device)
        drawn_at = (positions + 1).clamp_(max=self.decoder.shape.context - 1)
        logits, how = self.decoder.logits(hidden), sampling.picked(index)
        read = logits[: len(one.rows)]
        tokens, logprobs = self.sampler.sample(read, keys[index], drawn_at, how)
        one.tokens = tokens.tolist()
        values = {"logprobs": logprobs, **self.sampler.stats(logits)}
        one.values = {name: each[: len(read)].tolist() for name, each in values.items()}
        if any(row.decoding.sampling.top_logprobs for row in one.drafts):
            ids, top = (each.tolist() for each in likeliest(read, self.sampler.num_tokens))
            one.top = [list(zip(*pair, strict=True)) for pair in zip(ids, top, strict=True)]

    def _accept(self, one: _Pass, row: Row, hidden: Tensor) -> int:
        """Give a row what it has drawn; returns how many of its tokens are forwarded now."""
        draft, first, drawn, used = one.drafts[row], one.first[row], list[int](), 1
        while row.stop is None and used > len(drawn):
            drawn.append(one.tokens[first + len(drawn)])
            row.stop = self.stops.reason(row, drawn)
            foreseen = draft[used - 1] if used <= len(draft) else None
            used += drawn[-1] == foreseen and (row.stop is None or not row.stop.ends_path)
        end = first + len(drawn)
        if self.keeps_states:
            row.drawn_from.append(hidden[first:end])
        row.add(drawn, {name: values[first:end] for name, values in one.values.items()})
        if count := row.decoding.sampling.top_logprobs:
            row.top += [tuple(top[:count]) for top in one.top[first:end]]
        if used > len(drawn) and row.error is None:  # its last token, which has stopped it
            row.hidden = hidden[first + used - 1 : first + used].clone()
        row.node.usage["drafted"] += len(draft)
        row.node.usage["draft_accepted"] += used - 1
        return used


class _Pass:
    """One token of every row, and its drafts behind it.

    computed, written: as `DecodeSession.forward_some` wants them. rows, positions: of each token,
    its place in the batch and its position. first: of each row, which of these is its own token.
    tokens, values, top: what each token leads to, once that is known.
    """

    tokens: list[int]
    values: dict[str, list[float]]
    top: list[list[tuple[int, float]]]

    def __init__(self, drafts: Mapping[Row, Sequence[int]], places: Mapping[Row, int]) -> None:
        self.drafts, self.first = drafts, dict[Row, int]()
        self.computed = list[tuple[int, int, int, int]]()
        for row, draft in drafts.items():
            self.first[row], start = len(self.computed), row.node.start + row.forwarded
            self.computed += [
                (places[row], ahead, token, start + ahead)
                for ahead, token in enumerate((row.tokens[-1], *draft))
            ]
        self.rows = [place for place, *_ in self.computed]
        self.positions = [position for *_, position in self.computed]
        self.written = [(at, each[0], each[1]) for at, each in enumerate(self.computed)]
