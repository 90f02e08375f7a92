"""Speculative decoding passes: each verifies the drafted tokens of every row (`drafts`).

A drafted token is computed as one more row of the same pass, after the row's last token. It attends
to what it would see in a pass of its own, so its logits are bitwise equal. The token that a row
samples at a position does not depend on the pass (`noise`). So a drafted token is accepted if it
equals the sampled token, and everything after the first rejected one is dropped.

The host reads the tokens of every pass, and rows that are done leave at once. The passes of
`tensor_rows`, with one token per row, are the specification.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beamwright.engine.drafts import DraftProposer
from beamwright.engine.endings import StopFinder
from beamwright.engine.row import IterationWork, Row, filter_open_rows
from beamwright.engine.sampling import RowSampling, Sampler, likeliest
from beamwright.models.decoder import Decoder
from beamwright.models.prefill_passes import Replay
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel


def why_no_drafts(model: TreeModel, replay: Replay | None) -> str | None:
    """Return why a pass can compute only one token per row (no drafts); None if it can take more.

    Attention must support several tokens per row (`sets_query_rows`). Kernels, layer-wise streaming
    and sparse decoding do not: their work lists, transfers and selections assume one token per row.
    """
    if model.decoder.shape.states:
        return "needs a model without recurrent layers"
    if not model.backend.sets_query_rows:
        return "needs attention in plain torch over whole paths on the device"
    if replay is not None and not replay.is_plain:
        return "cannot be combined with CUDA graphs"
    return None


@dataclass
class DraftPasses:
    """Runner of iterations with drafts.

    keeps_states: keep the hidden states that tokens are sampled from, see `TensorRowRunner`.
    """

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
        drafts: DraftProposer,
    ) -> IterationWork:
        """Run passes until a row has got `max_tokens` tokens, or `enough` open rows are done.

        places: each row's place in the batch. keys, sampling: random keys and settings by place.
        """
        counting, left = filter_open_rows([*places]), dict.fromkeys(places, max_tokens)
        num_passes = num_rows = 0
        while min(left.values(), default=0) and sum(row.done for row in counting) < enough:
            began = time.perf_counter()
            rooms = {row: min(n, row.forwards_left) - 1 for row, n in left.items()}
            drafted = drafts.propose_drafts(rooms, self.decoder.least_rows)
            one = _Pass(drafted, places)
            hidden = self.session.forward_some(one.computed, one.written)
            self._sample_tokens(one, hidden, keys, sampling)
            used = {row: self._accept_drafts(one, row, hidden) for row in left}
            self.session.advance({places[row]: count for row, count in used.items()})
            drafts.record_pass(drafted, used, len(hidden), time.perf_counter() - began)
            num_passes, num_rows = num_passes + 1, num_rows + len(hidden)
            left = {row: n - used[row] for row, n in left.items() if not row.done}
        return IterationWork(num_passes, num_rows)

    def _sample_tokens(
        self, one: _Pass, hidden: Tensor, keys: Tensor, sampling: RowSampling
    ) -> None:
        """Sample the token that follows each token of the pass, with its statistics."""
        index, positions = torch.tensor([one.rows, one.positions], device=hidden.device)
        drawn_at = (positions + 1).clamp_(max=self.decoder.shape.context - 1)
        logits, how = self.decoder.logits(hidden), sampling.select_rows(index)
        read = logits[: len(one.rows)]
        tokens, logprobs = self.sampler.sample(read, keys[index], drawn_at, how)
        one.tokens = tokens.tolist()
        values = {"logprobs": logprobs, **self.sampler.stats(logits, how)}
        one.values = {name: each[: len(read)].tolist() for name, each in values.items()}
        if any(row.decoding.sampling.top_logprobs for row in one.drafts):
            ids, top = (each.tolist() for each in likeliest(read, self.sampler.num_tokens))
            one.top = [list(zip(*pair, strict=True)) for pair in zip(ids, top, strict=True)]

    def _accept_drafts(self, one: _Pass, row: Row, hidden: Tensor) -> int:
        """Append sampled tokens to a row up to the first rejected draft.

        Return how many tokens of the pass count: the row's last token and the accepted drafts.
        """
        draft, first, drawn, used = one.drafts[row], one.first[row], list[int](), 1
        while row.stop is None and used > len(drawn):
            drawn.append(one.tokens[first + len(drawn)])
            row.stop = self.stops.find_reason(row, drawn)
            foreseen = draft[used - 1] if used <= len(draft) else None
            used += drawn[-1] == foreseen and (row.stop is None or not row.stop.ends_path)
        end = first + len(drawn)
        if self.keeps_states:
            row.drawn_from.append(hidden[first:end])
        row.append_tokens(drawn, {name: values[first:end] for name, values in one.values.items()})
        if count := row.decoding.sampling.top_logprobs:
            row.top += [tuple(top[:count]) for top in one.top[first:end]]
        if used > len(drawn) and row.error is None:  # the token that stopped the row is forwarded
            row.hidden = hidden[first + used - 1 : first + used].clone()
        row.node.usage["drafted"] += len(draft)
        row.node.usage["draft_accepted"] += used - 1
        return used


class _Pass:
    """The tokens of one pass: each row's last token, followed by its drafted tokens.

    computed, written: arguments of `DecodeSession.forward_some`.
    rows, positions: for each token, its row's place in the batch and its position.
    first: for each row, the index of its last token in the pass.
    tokens, values, top: results for each token, set after sampling.
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
