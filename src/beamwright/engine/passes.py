"""Passes over the tokens that rows of a batch get next: one of each, and those that drafts foresaw.

A draft is computed as a row of the same pass, behind the row's last token: it sees what it would
see, and its logits have the bits that they would have. The token that a row draws at a position
does not depend on when it is drawn (`noise`), so it is the draft or it is not; what stands behind
the first that is not is dropped.

Rows whose paths have equal tokens, cut into steps alike, would compute the same bits: one of them
is computed for all, its KV is written to each, and each draws its own token, until they part.

The host looks at every pass, and rows that are done leave at once: a plain path beside the captured
one of `tensor_rows`, which is the specification. Knows no text: who drafts says what is tried.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from beamwright.engine.drafts import Drafts
from beamwright.engine.endings import StopFinder
from beamwright.engine.row import Ran, Row, awaited
from beamwright.engine.sampling import RowSampling, Sampler, likeliest
from beamwright.models.decoder import Decoder, padded_rows
from beamwright.models.packed import Replay
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from beamwright.plan.machines import PassCosts
from beamwright.tree import Node

_PAYS = 0.75  # of what a pass over all rows takes


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


class EqualTexts:
    """Numbers of paths, one for all whose tokens are equal step by step: so is their KV."""

    def __init__(self) -> None:
        self._new = count()
        self._of: WeakKeyDictionary[Node, int] = WeakKeyDictionary()
        self._trees: WeakKeyDictionary[Node, dict[tuple[int, tuple[int, ...]], int]] = (
            WeakKeyDictionary()
        )

    def number(self, node: Node) -> int:
        """Of the path to a complete node, itself included."""
        unknown, above = list[Node](), node
        while above not in self._of and above.parent is not None:
            unknown.append(above)
            above = above.parent
        found = self._of.setdefault(above, next(self._new))
        known = self._trees.setdefault(node.root, {})
        for each in reversed(unknown):
            found = known.setdefault((found, each.token_ids), next(self._new))
            self._of[each] = found
        return found

    def of_rows(self, rows: Iterable[Row]) -> dict[Row, int]:
        """Of the paths to these rows, with their steps so far."""
        known = dict[tuple[int, tuple[int, ...]], int]()
        found = dict[Row, int]()
        for row in rows:
            assert row.node.parent is not None
            text = self.number(row.node.parent), tuple(row.tokens)
            found[row] = known.setdefault(text, next(self._new))
        return found


@dataclass
class DistinctPasses:
    """Runs an iteration of the rows of a session, with or without drafts.

    texts: which rows are equal; None where each is computed on its own copy of its path. costs: of
    a pass: where rows cost little, looking at every pass costs more than it saves.
    keeps_states: see `TensorRows`.
    """

    decoder: Decoder
    session: DecodeSession
    sampler: Sampler
    stops: StopFinder
    texts: EqualTexts | None
    costs: PassCosts
    keeps_states: bool = False

    def run(
        self,
        places: Mapping[Row, int],
        keys: Tensor,
        sampling: RowSampling,
        max_tokens: int,
        enough: int,
        drafts: Drafts | None = None,
    ) -> Ran:
        """Passes until a row has got `max_tokens`, or `enough` of those that count are done.

        Without drafts none, or no more, where too few rows are equal to make a pass cheaper.
        keys, sampling: of each place.
        """
        if drafts is None and (self.texts is None or not self._cheaper(1, len(places))):
            return Ran(0, 0)
        counting, left = awaited([*places]), dict.fromkeys(places, max_tokens)
        texts = {**places} if self.texts is None else self.texts.of_rows(places)
        num_passes = num_rows = num_equal = 0
        while min(left.values(), default=0) and sum(row.done for row in counting) < enough:
            num_distinct = len({texts[row] for row in left})
            if drafts is None and not self._cheaper(num_distinct, len(left)):
                break
            began = time.perf_counter()
            one = self._pass(left, texts, places, drafts)
            hidden = self.session.forward_some(one.computed, one.written)
            self._draw(one, hidden, keys, sampling)
            used = {row: self._accept(one, row, hidden) for row in left}
            self.session.advance_by({places[row]: count for row, count in used.items()})
            if drafts is not None:
                spent_s = time.perf_counter() - began
                drafts.note(one.drafted, used, len(hidden), spent_s)
            num_passes, num_rows = num_passes + 1, num_rows + len(hidden)
            num_equal += one.num_equal(used)
            left = {row: n - used[row] for row, n in left.items() if not row.done}
            if self.texts is not None:
                _part(texts, left, used)
        return Ran(num_passes, num_rows, num_equal)

    def _cheaper(self, *num_rows: int) -> bool:
        """Whether a pass over the first number of rows is, by enough."""
        sizes = (padded_rows(count, self.decoder.least_rows) for count in num_rows)
        first_s, other_s = map(self.costs.seconds, sizes)
        return first_s < _PAYS * other_s

    def _pass(
        self,
        left: Mapping[Row, int],
        texts: Mapping[Row, int],
        places: Mapping[Row, int],
        drafts: Drafts | None,
    ) -> _Pass:
        """What is forwarded next. left: tokens that each row may still get in this iteration."""
        rooms = {row: min(n, row.forwards_left) - 1 for row, n in left.items()}
        first, drafted = dict[int, Row](), dict[Row, list[int]]()
        for row in left:
            first.setdefault(texts[row], row)
        if drafts is not None:
            equal = Counter(texts[row] for row in left)
            some = {row: rooms[row] for row in first.values()}
            drafted = drafts.draft(some, self.decoder.least_rows, [*equal.values()])
        of_all = {row: drafted.get(first[texts[row]], ())[: max(0, rooms[row])] for row in left}
        return _Pass(of_all, drafted, texts, places)

    def _draw(self, one: _Pass, hidden: Tensor, keys: Tensor, sampling: RowSampling) -> None:
        """What each token of a pass leads to, for each row that has it."""
        columns = [one.rows, one.positions, one.places]
        index, positions, computed = torch.tensor(columns, device=hidden.device)
        drawn_at = (positions + 1).clamp_(max=self.decoder.shape.context - 1)
        logits, how = self.decoder.logits(hidden), sampling.picked(index)
        read = logits[: len(one.rows)]
        if len(one.rows) > len(one.computed):
            read = logits.index_select(0, computed)
        tokens, logprobs = self.sampler.sample(read, keys[index], drawn_at, how)
        one.tokens = tokens.tolist()
        stats = {name: values[computed] for name, values in self.sampler.stats(logits).items()}
        values = {"logprobs": logprobs, **stats}
        one.values = {name: numbers.tolist() for name, numbers in values.items()}
        if any(row.decoding.sampling.top_logprobs for row in one.drafts):
            ids, top = likeliest(logits, self.sampler.num_tokens)
            pairs = zip(ids[computed].tolist(), top[computed].tolist(), strict=True)
            one.top = [list(zip(*pair, strict=True)) for pair in pairs]

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
            row.drawn_from.append(hidden[one.places[first:end]])
        row.add(drawn, {name: values[first:end] for name, values in one.values.items()})
        if count := row.decoding.sampling.top_logprobs:
            row.top += [tuple(top[:count]) for top in one.top[first:end]]
        if used > len(drawn) and row.error is None:  # its last token, which has stopped it
            at = one.places[first + used - 1]
            row.hidden = hidden[at : at + 1].clone()
        row.node.usage["drafted"] += len(draft)
        row.node.usage["draft_accepted"] += used - 1
        return used


def _part(texts: dict[Row, int], left: Iterable[Row], used: Mapping[Row, int]) -> None:
    """Rows that have drawn other tokens than those beside them are equal no more."""
    known = dict[tuple[int, tuple[int, ...]], int]()
    for row in left:
        drawn = texts[row], tuple(row.tokens[len(row.tokens) - used[row] :])
        texts[row] = known.setdefault(drawn, len(known))


class _Pass:
    """One token of every row, and its drafts behind it; those of equal rows once.

    computed, written: as `DecodeSession.forward_some` wants them. drafted: by the row that stands
    for those equal to it.
    rows, positions, places: of each token of each row, its place in the batch, its position, and
    which of those computed it is. first: of each row, which of these is its own token.
    tokens, values, top: what each token of each row leads to, once that is known.
    """

    tokens: list[int]
    values: dict[str, list[float]]
    top: list[list[tuple[int, float]]]

    def __init__(
        self,
        drafts: Mapping[Row, Sequence[int]],
        drafted: Mapping[Row, Sequence[int]],
        texts: Mapping[Row, int],
        places: Mapping[Row, int],
    ) -> None:
        self.drafts, self.drafted, self.first = drafts, drafted, dict[Row, int]()
        self.rows, self.positions, self.places = list[int](), list[int](), list[int]()
        self.computed = list[tuple[int, int, int, int]]()
        self.written = list[tuple[int, int, int]]()
        known = dict[tuple[int, tuple[int, ...]], int]()
        for row, draft in drafts.items():
            self.first[row], place = len(self.rows), places[row]
            start = row.node.start + row.forwarded
            for ahead, token in enumerate((row.tokens[-1], *draft)):
                at = known.setdefault((texts[row], tuple(draft[:ahead])), len(known))
                if at == len(self.computed):
                    self.computed.append((place, ahead, token, start + ahead))
                self.written.append((at, place, ahead))
                self.rows.append(place)
                self.positions.append(start + ahead)
                self.places.append(at)

    def num_equal(self, used: Mapping[Row, int]) -> int:
        """Of the tokens that rows have used, those beyond the first of each that was computed."""
        spans = (self.places[self.first[row] :][:count] for row, count in used.items())
        computed = [*chain(*spans)]
        return len(computed) - len({*computed})
