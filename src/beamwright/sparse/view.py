"""The attention view of sparse decoding: rows with long paths attend to selected tokens.

A layer's tokens are selected (`SelectionQueue`) as soon as its queries are known or estimated.
Queries are estimated from the layer before, or from earlier tokens while the previous token is
computed. A row's selection depends only on its path, not on other rows of the batch or on timing.
Rows that see few tokens attend to all of them, bitwise equal to attention without `--sparse`.

A row's last queries, from which the next ones are predicted, are attached to the segment that the
row writes. These queries begin anew with each step, or continue those of the previous step. Saved
searches do not contain queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.parts import attend_few
from beamwright.attention.protocols import AttentionBackend, AttentionView, DecodeView
from beamwright.attention.tree import TreeAttention, TreeDecode
from beamwright.errors import InputError
from beamwright.kv.segments import Path, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.sparse.predict import predict_query, weigh
from beamwright.sparse.rank import LayerSelection, Pack, Selected, SelectionQueue
from beamwright.sparse.rule import WINDOW, SparseRule
from beamwright.sparse.select import SelectionPass, Selector

# Queries kept before the newest one.
#
# An iteration may compute tokens beyond a step's end. The next step's window ends where the step
# ends, so more than one window is kept.
_REMEMBERED = WINDOW + 2 * 16


@dataclass
class QueryHistory:
    """The queries of a row's newest tokens, from which the next query is predicted.

    queries: [tokens, heads, head_dim] for each layer, the newest last.
    tokens: number of the step's tokens that were computed, tokens beyond the step's end included.
        So are tokens that another row computed: a copy may begin with a part of its sibling's step
        (FlashTTS's truncation).
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def for_child(self, tokens: int) -> QueryHistory:
        """Return the memory of a child row, for a step that ended after `tokens` tokens."""
        over = max(0, self.tokens - tokens)
        held = self.queries.items()
        return QueryHistory({layer: known[: len(known) - over] for layer, known in held if
                       len(known) > over})  # fmt: skip


class SparseDecode(DecodeView):
    """Decode view, one token per row, in which rows with long paths attend to selected tokens."""

    def __init__(
        self, rule: SparseRule, rank: SelectionQueue, store: SegmentStore, paths: Sequence[Path],
        tail: Tail,
    ) -> None:  # fmt: skip
        self._rule, self._rank, self._store, self._tail = rule, rank, store, tail
        self.looks_ahead = rule.how.query == "ahead"
        self._layout, self._counts = store.pool.layout, store.counts
        self._histories = [QueryHistory() for _ in paths]
        self._live = [True] * len(paths)
        self._packs = [
            rule.pack_of(layer, self._layout.num_layers) for layer in range(self._layout.num_layers)
        ]
        self._dense: TreeDecode | None = None
        self._selector: Selector | None = None
        self._token: SelectionPass | None = None
        self._next: SelectionPass | None = None
        self._open(list(paths))

    def bind_segments(self, segments: Sequence[Segment | None]) -> None:
        """Set the segment that each row writes, and find the row's past queries; None: padding."""
        self._histories = []
        for path, segment in zip(self._paths, segments, strict=True):
            if segment is not None and segment.attention_data is None:
                before = path[-1] if path and self._rule.how.window == "path" else None
                known = None if before is None else before.segment.attention_data
                segment.attention_data = (
                    known.for_child(before.visible) if before and known else QueryHistory()
                )
                segment.attention_data.tokens = segment.length
            self._histories.append(QueryHistory() if segment is None else segment.attention_data)

    def foresee(self, layer: int, query: Tensor) -> None:
        """Start to select a layer's tokens by the estimated `query`."""
        token = self._begin_token()
        if token.classes and layer >= self._rule.full_layers and layer == self._packs[layer][0]:
            guesses = {layer: query.clone()}
            work = partial(
                self._select_tokens, token, self._packs[layer], guesses, _all_rows(query)
            )
            self._rank.push(layer, work)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if sinks is not None:
            raise InputError("--sparse does not support attention sinks")
        token, full = self._begin_token(), layer < self._rule.full_layers
        selects, pack = bool(token.classes) and not full, self._packs[layer]
        if selects and layer == pack[0]:  # after `take`, the rank no longer reads this pack's tails
            self._selections.update(self._rank.take(layer) or {})
        if self._dense is not None and (full or self._some_dense):
            context = self._dense.attend(layer, query, key_value)
        else:
            self._tail.write(layer, key_value)
            context = torch.zeros_like(query)
        selected = self._selected(token, layer, query) if selects else []
        if self._rule.how.query == "predicted":
            self._remember(layer, query)
            if not full and layer == pack[-1]:
                self._push_next(pack)
        for chosen in selected:
            context[chosen.rows] = self._attend(layer, query[chosen.rows], chosen)
        if layer + 1 == self._layout.num_layers:
            self._token = None
        return context

    def wait_for_threads(self) -> None:
        """Wait until no other thread reads the tail or the store."""
        self._rank.wait_for_work()

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these rows only, in this order. Shared segments are packed again."""
        kept, paths = rows.tolist(), self._held_paths()
        self._close()
        self._histories = [self._histories[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._open([paths[row] for row in kept])

    def set_num_rows(self, num_rows: int) -> None:
        """Treat all rows after the first `num_rows` as padding."""
        self.deactivate_rows(range(num_rows, len(self._live)))

    def deactivate_rows(self, rows: Sequence[int]) -> None:
        """Stop reading the KV of these rows. All selections made so far are discarded."""
        gone = [row for row in rows if self._live[row]]
        for row in gone:
            self._live[row], self._histories[row] = False, QueryHistory()
        if gone:
            self._forget()

    def close(self) -> None:
        self._rank.close()
        self._close()

    def _open(self, paths: list[Path]) -> None:
        self._forget()
        self._paths = paths
        self._lengths = [sum(part.visible for part in path) for path in paths]
        self._some_dense = False

    def _forget(self) -> None:
        """Discard all selections, so that the next token's selection begins anew."""
        self._rank.discard_work()
        self._selections: Pack = {}
        self._token = self._next = None

    def _held_paths(self) -> list[Path]:
        """Return all paths, with a live row's path in place of those of dropped rows.

        The KV of a dropped row may have been freed.
        """
        some = self._paths[self._live.index(True)]
        return [path if live else some for path, live in zip(self._paths, self._live, strict=True)]

    def _close(self) -> None:
        for part in (self._dense, self._selector):
            if part is not None:
                part.close()
        self._dense = self._selector = None

    # --- one token ---------------------------------------------------------------------------

    def _begin_token(self) -> SelectionPass:
        """Return the current token of all rows; begin a new one if the last one is complete."""
        if self._token is not None:
            return self._token
        early, token = self._next is not None, self._next or self._plan(0)
        self._token, self._next = token, None
        budgets = {count: len(rows) for count, rows in token.classes.items()}
        selecting = [row for rows in token.classes.values() for row in rows.tolist()]
        self._counts.sparse_tokens += len(selecting)
        self._counts.selected_tokens += sum(count * num for count, num in budgets.items())
        self._counts.visible_tokens += int(token.seen[selecting].sum()) if selecting else 0
        self._some_dense = len(selecting) < sum(self._live)
        if self._dense is None and (self._some_dense or self._rule.full_layers):
            self._dense = TreeDecode(self._store, self._held_paths(), self._tail)
        if not early and self._rule.how.query == "predicted":
            last = self._layout.num_layers - 1
            if selecting and all(last in self._histories[row].queries for row in selecting):
                for pack in dict.fromkeys(self._packs[self._rule.full_layers :]):
                    self._push(token, pack)
        return token

    def _plan(self, ahead: int) -> SelectionPass:
        """Compute how many tokens each row selects, for the current token (0) or the next (1)."""
        places = self._tail.places + ahead
        device, budgets = self._store.compute_device, dict[int, list[int]]()
        at = places.tolist()
        seen = [n + place + 1 for n, place in zip(self._lengths, at, strict=True)]
        for row, visible in enumerate(seen):
            if self._live[row] and self._rule.is_sparse(visible):
                budgets.setdefault(self._rule.budget(visible), []).append(row)
        classes = {n: torch.tensor(rows, device=device) for n, rows in budgets.items()}
        if classes and self._selector is None:
            self._selector = Selector(self._rule, self._store, self._held_paths(), self._tail)
        return SelectionPass(torch.tensor(seen, device=device), places, max(at) + 1, classes)

    def _remember(self, layer: int, query: Tensor) -> None:
        for row, memory in enumerate(self._histories):
            if self._live[row]:
                new, old = query[row].unsqueeze(0), memory.queries.get(layer)
                kept = [] if old is None else [old[-_REMEMBERED:]]
                memory.queries[layer] = torch.cat([*kept, new])
                memory.tokens += layer + 1 == self._layout.num_layers

    def _push_next(self, pack: range) -> None:
        """Start to select the next token's KV for a pack of layers.

        As in the paper, the selection runs while later layers and the next token's first layers are
        computed.
        """
        self._next = self._next or self._plan(1)
        if self._next.classes:
            self._push(self._next, pack)

    def _push(self, token: SelectionPass, pack: range) -> None:
        leading = [layer for layer in pack if self._rule.leader(layer) == layer]
        known = {layer: [each.queries.get(layer) for each in self._histories] for layer in leading}
        self._rank.push(pack[0], partial(self._select_predicted, token, pack, known))

    def _selected(self, token: SelectionPass, layer: int, query: Tensor) -> list[Selected]:
        """Return the tokens that each class of rows reads in one layer.

        Heads whose true query differs too much from the estimated one select by the true query.
        """
        pack, selection = self._packs[layer], self._selections.pop(layer, None)
        if self._rule.leader(layer) != layer:
            assert selection is not None
            return selection.selected
        if selection is None:
            if self._rule.how.query == "predicted":
                known = {layer: [each.queries.get(layer) for each in self._histories]}
                guess, foreseen = self._predicted(token, known, query)
                guess = guess[0]
            else:
                guess, foreseen = query, ~_all_rows(query)
        else:
            guess, foreseen = selection.guess, selection.foreseen
        layers = range(layer, min(layer + self._rule.how.share, pack.stop))
        if self._rule.correct is not None:
            sets = query.shape[1] if self._rule.how.each == "query" else self._layout.num_kv_heads
            near = F.cosine_similarity(guess.float(), query.float(), dim=-1)
            near = near.unflatten(1, (sets, -1)).mean(-1) >= self._rule.correct
            rows = torch.cat([*token.classes.values()])
            off = int((~near & foreseen[:, None])[rows].sum())
            self._counts.corrections += off
            if off:
                keep = near.repeat_interleave(query.shape[1] // sets, 1).unsqueeze(-1)
                guess, selection = torch.where(keep, guess, query), None
        if selection is None:
            self._selections.update(self._select_tokens(token, layers, {layer: guess}, foreseen))
            selection = self._selections.pop(layer)
        return selection.selected

    def _select_predicted(
        self, token: SelectionPass, pack: range, known: Mapping[int, Sequence[Tensor | None]]
    ) -> Pack:
        """Select tokens for a pack of layers by predicted queries.

        known: for each layer that leads others, the queries of each row's earlier tokens.
        """
        some = next(each for each in known[pack[0]] if each is not None)
        empty = some.new_zeros(len(self._paths), *some.shape[1:])
        guesses, foreseen = self._predicted(token, known, empty)
        return self._select_tokens(token, pack, dict(zip(known, guesses, strict=True)), foreseen)

    def _select_tokens(
        self, token: SelectionPass, layers: range, guesses: Mapping[int, Tensor], foreseen: Tensor
    ) -> Pack:
        """Select tokens for these layers, and fetch the selected keys and values.

        guesses: queries [rows, heads, head_dim] for each layer that leads others
            (`SparseRule.leader`).
        foreseen: mask [rows] of rows with an estimated query, see `Selector.scores`.
        """
        selector = self._selector
        assert selector is not None
        chosen: dict[int, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        slots: dict[int, list[Tensor]] = {}
        for layer in layers:
            if (leader := self._rule.leader(layer)) != layer:
                chosen[layer] = [(rows, columns, None) for rows, columns, _ in chosen[leader]]
                slots[layer] = slots[leader]
                continue
            guess = guesses[layer]
            scores = selector.scores(token, layer, guess, foreseen)
            chosen[layer], slots[layer] = [], []
            for count, rows in token.classes.items():
                columns, rest = selector.select(token, layer, count, guess, scores, foreseen)
                chosen[layer].append((rows, columns, rest))
                slots[layer].append(selector.slots(rows, columns))
        stored, by_layer = self._store.fetch(slots), {}
        for layer in layers:
            parts = zip(chosen[layer], stored[layer], strict=True)
            selected = [Selected(*each, held) for each, held in parts]
            by_layer[layer] = LayerSelection(guesses[self._rule.leader(layer)], foreseen, selected)
        return by_layer

    def _predicted(
        self, token: SelectionPass, known: Mapping[int, Sequence[Tensor | None]], query: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Predict each row's query in each layer of `known` from the queries of earlier tokens.

        query: [rows, heads, head_dim], used for rows that have no earlier queries.

        Return queries [layers, rows, heads, head_dim], and a mask of the rows with a prediction.
        """
        alike: dict[int, list[int]] = {}
        some = next(iter(known.values()))
        for row in torch.cat([*token.classes.values()]).tolist():
            if (one := some[row]) is not None:
                alike.setdefault(min(len(one), WINDOW + 1), []).append(row)
        guess = query.repeat(len(known), 1, 1, 1)
        foreseen = ~_all_rows(query)
        for count, rows in alike.items():
            held = [[of[row][-count:] for row in rows] for of in known.values()]  # type: ignore[index]
            windows = torch.stack([torch.stack(each) for each in held]).transpose(2, 3)
            index = torch.tensor(rows, device=query.device)
            guess[:, index] = predict_query(windows, self._rule.how.weigh or weigh).to(guess.dtype)
            foreseen[index] = True
        return guess, foreseen

    def _attend(self, layer: int, query: Tensor, chosen: Selected) -> Tensor:
        """Return attention outputs [rows, heads, head_dim] of rows over their selected tokens."""
        assert self._selector is not None
        own = (part[chosen.rows] for part in self._tail.read(layer))
        keys, values = self._selector.fill_tail_columns(chosen.columns, chosen.stored, own)
        grouped = query.unflatten(1, (keys.shape[1], -1))
        context, lse = attend_few(grouped, keys, values, None)
        if chosen.rest is not None:
            left_out = torch.sigmoid(chosen.rest - lse)
            self._counts.left_out += float(left_out.sum(dtype=torch.float64))
            self._counts.sparse_heads += left_out.numel()
        return context.flatten(1, 2)


def _all_rows(query: Tensor) -> Tensor:
    """Return a mask [rows] that is true for all rows of [rows, heads, head_dim]."""
    return torch.ones(len(query), dtype=torch.bool, device=query.device)


class SparseAttention(AttentionBackend):
    """Backend: tree attention, except that decoding rows with long paths attend to selected tokens.

    tested: the attention backend of `--attention`. If it runs kernels, which read whole paths, tree
        attention in plain torch is used in its place.
    threaded: True to select and fetch tokens by estimated queries on a background thread.
    """

    holds_block_numbers = True

    def __init__(
        self, tested: AttentionBackend, rule: SparseRule, *, threaded: bool = False
    ) -> None:
        self.tested = tested
        self._inner = tested if isinstance(tested, TreeAttention) else TreeAttention()
        self.name, self.tail_tokens = self._inner.name, self._inner.tail_tokens
        self._rule, self._threaded = rule, threaded

    def decode_view(self, store: SegmentStore, paths: Sequence[Path], tail: Tail) -> SparseDecode:
        rank = SelectionQueue(store.counts, threaded=self._threaded)
        return SparseDecode(self._rule, rank, store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> AttentionView:
        """Return the inner backend's view: tokens of a prefill attend to all tokens."""
        return self._inner.prefill_view(store, paths, lengths)
