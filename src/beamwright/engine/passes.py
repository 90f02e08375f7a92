"""Passes over a batch of which each row gets one token, and as many more as its drafts foresaw.

A draft is computed as a row of the same pass, behind the row's last token: it sees what it would
see, and its logits have the bits that they would have. The token that a row draws at a position
does not depend on when it is drawn (`noise`), so it is the draft or it is not; what stands behind
the first that is not is dropped. The host looks at every pass, and rows that are done leave at
once: a plain path beside the captured one of `tensor_rows`, which is the specification.

Knows no text and no costs: who drafts says what is tried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from beamwright.engine.drafts import Drafts
from beamwright.engine.graphs import Replay
from beamwright.engine.row import Ran, Row, StopFinder, awaited
from beamwright.engine.sampling import RowSampling, Sampler, likeliest
from beamwright.models.decoder import Decoder
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel


def why_no_drafts(model: TreeModel, replay: Replay | None) -> str | None:
    """What keeps rows of a model from several tokens in a pass; None where nothing does.

    A view has to say that it can. Kernels, layers that are streamed and sparse decoding cannot:
    their work lists, transfers and selections are of one token of every row.
    """
    if not getattr(model.backend, "spreads", False):
        return "needs attention in plain torch over whole paths on the device"
    if replay is not None and not replay.is_plain:
        return "not with steps that are captured as CUDA graphs"
    return None


class DraftedPasses:
    """Runs an iteration of the rows of a session."""

    def __init__(
        self,
        decoder: Decoder,
        session: DecodeSession,
        sampler: Sampler,
        stops: StopFinder,
        drafts: Drafts,
    ) -> None:
        self._decoder, self._session, self._sampler = decoder, session, sampler
        self._stops, self.drafts = stops, drafts

    def run(
        self,
        places: Mapping[Row, int],
        keys: torch.Tensor,
        sampling: RowSampling,
        max_tokens: int,
        enough: int,
    ) -> Ran:
        """Passes until a row has got `max_tokens`, or `enough` of those that count are done.

        keys, sampling: of each place.
        """
        counting, left = awaited([*places]), dict.fromkeys(places, max_tokens)
        num_passes = num_rows = 0
        while min(left.values(), default=0) and sum(row.done for row in counting) < enough:
            rooms = {row: min(n, row.forwards_left) - 1 for row, n in left.items()}
            began = time.perf_counter()
            one = _Pass(self.drafts.draft(rooms, self._decoder.least_rows), places)
            hidden = self._session.forward_some(*one.inputs)
            self._draw(one, hidden, keys, sampling)
            used = {row: self._accept(one, row, hidden) for row in left}
            self._session.advance_by({places[row]: count for row, count in used.items()})
            spent_s = time.perf_counter() - began
            self.drafts.note(one.drafts, used, len(hidden), spent_s)
            num_passes, num_rows = num_passes + 1, num_rows + len(hidden)
            left = {row: n - used[row] for row, n in left.items() if not row.done}
        return Ran(num_passes, num_rows)

    def _draw(
        self, one: _Pass, hidden: torch.Tensor, keys: torch.Tensor, sampling: RowSampling
    ) -> None:
        """What each token of a pass leads to."""
        rows, _, _, at = one.inputs
        padding, unread = len(hidden) - len(rows), range(len(rows), len(hidden))
        columns = [[*column, *[column[0]] * padding] for column in (rows, at)]
        index, positions = torch.tensor(columns, device=hidden.device)
        drawn_at = (positions + 1).clamp_(max=self._decoder.shape.context - 1)
        logits, how = self._decoder.logits(hidden), sampling.picked(index)
        tokens, logprobs = self._sampler.sample(logits, keys[index], drawn_at, how, unread)
        one.tokens = tokens.tolist()
        values = {"logprobs": logprobs, **self._sampler.stats(logits)}
        one.values = {name: numbers.tolist() for name, numbers in values.items()}
        if any(row.decoding.sampling.top_logprobs for row in one.drafts):
            ids, top = likeliest(logits, self._sampler.num_tokens)
            pairs = zip(ids.tolist(), top.tolist(), strict=True)
            one.top = [list(zip(*pair, strict=True)) for pair in pairs]

    def _accept(self, one: _Pass, row: Row, hidden: torch.Tensor) -> int:
        """Give a row what it has drawn; returns how many of its tokens are forwarded now."""
        draft, first, drawn, used = one.drafts[row], one.first[row], list[int](), 1
        while row.stop is None and used > len(drawn):
            drawn.append(one.tokens[first + len(drawn)])
            row.stop = self._stops.reason(row, drawn)
            foreseen = draft[used - 1] if used <= len(draft) else None
            used += drawn[-1] == foreseen and (row.stop is None or not row.stop.ends_path)
        end = first + len(drawn)
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

    inputs: row, tokens ahead, token and position of each, as `DecodeSession.forward_some` wants
    them. first: of each row, which of them is its own token. tokens, values, top: what each leads
    to, once that is known.
    """

    tokens: list[int]
    values: dict[str, list[float]]
    top: list[list[tuple[int, float]]]

    def __init__(self, drafts: Mapping[Row, Sequence[int]], places: Mapping[Row, int]) -> None:
        self.drafts, self.first = drafts, dict[Row, int]()
        rows, ahead, tokens, at = list[int](), list[int](), list[int](), list[int]()
        for row, draft in drafts.items():
            self.first[row], count = len(rows), 1 + len(draft)
            start = row.node.start + row.forwarded
            rows += [places[row]] * count
            ahead += range(count)
            tokens += [row.tokens[-1], *draft]
            at += range(start, start + count)
        self.inputs = rows, ahead, tokens, at
