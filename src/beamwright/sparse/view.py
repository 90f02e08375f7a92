"""Sparse decoding: rows with long paths attend to the tokens that their rule selects.

What a layer reads is found by a cache rank (`rank`), as soon as its queries are known or foreseen.
A row's selection depends on its path and its step alone, whoever is decoded beside it. Rows that
see few tokens attend as if there were no rule, in the very same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from beamwright.attention.partial import attend_few
from beamwright.attention.tree import TreeAttention, TreeDecode
from beamwright.kv.segments import Path, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.protocols import AttentionView
from beamwright.sparse.rank import CacheRank, ThreadRank
from beamwright.sparse.rule import PREDICTORS, Rotary, SparseRule
from beamwright.sparse.select import RowMemory, Selector, memories


@dataclass(frozen=True)
class Selected:
    """What rows read in one layer.

    columns [rows, kv_heads, count], see `PathIndex`; stored: their keys and values [2, rows,
    kv_heads, count, head_dim], but of a tail's. scores: that chose them, if there were any.
    """

    columns: torch.Tensor
    stored: torch.Tensor
    scores: torch.Tensor | None


class SparseDecode:
    """A `DecodeView`: one token per row, of which some select what they attend to."""

    def __init__(
        self,
        rule: SparseRule,
        rotary: Rotary,
        rank: CacheRank,
        store: SegmentStore,
        paths: Sequence[Path],
        tail: Tail,
    ) -> None:
        self._rule, self._rotary, self._store, self._tail = rule, rotary, store, tail
        self._kv_heads = store.pool.layout.num_kv_heads
        self._counts = store.counts
        self._memories = [RowMemory() for _ in paths]
        self._live = [True] * len(paths)
        self._guesses: dict[int, torch.Tensor] = {}
        self._rank, self._begun = rank, False
        self._dense: TreeDecode | None = None
        self._open(list(paths))

    @property
    def looks_ahead(self) -> bool:
        """True if `foresee` is to be called."""
        return self._rule.how.query == "ahead"

    def own(self, segments: Sequence[Segment | None]) -> None:
        """Who writes these rows: each goes on with what it knew."""
        self._memories = memories(segments)

    def foresee(self, layer: int, query: torch.Tensor) -> None:
        """The query that a layer would have if the one before it changed nothing."""
        self._begin_token()
        if self._classes and layer >= self._rule.full_layers:
            guess = self._guesses[layer] = query.clone()
            self._rank.push(layer, partial(self._find, layer, guess, _all(guess)))

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        self._begin_token()
        full = layer < self._rule.full_layers
        if self._dense is not None and (full or self._some_dense):
            context = self._dense.attend(layer, query, key_value)
        else:
            self._tail.write(layer, key_value)
            context = torch.zeros_like(query)
        if self._classes and not full:
            late = self._rule.late == "previous" and self._rank.is_late(layer)
            if late and layer in self._last:
                read = self._once_more(layer)
            else:
                read = self._found(layer, query)
            if self._rule.late == "previous":
                self._last[layer] = read
            for rows, found in read:
                context[rows] = self._attend(layer, rows, query[rows], found)
        if self._rule.how.query in PREDICTORS:
            self._remember(layer, query)
        self._begun = layer + 1 < self._store.pool.layout.num_layers
        if not self._begun:
            self._counts.sparse_forward_s += time.perf_counter() - self._began_s
            self._counts.sparse_forward_s -= self._counts.rank_waited_s - self._waited_s
        return context

    def settle(self) -> None:
        """What was dropped and is still being found is waited for."""
        self._rank.settle()

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Compaction packs anew."""
        kept, paths = rows.tolist(), self._held_paths()
        self.settle()
        self._close()
        self._memories = [self._memories[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._open([paths[row] for row in kept])

    def count_rows(self, num_rows: int) -> None:
        """Rows behind these pad the batch."""
        self._live[num_rows:] = [False] * (len(self._live) - num_rows)

    def drop_rows(self, rows: Sequence[int]) -> None:
        self.settle()  # their KV may be freed
        for row in rows:
            self._live[row] = False
            self._memories[row] = RowMemory()

    def close(self) -> None:
        self._rank.close()
        self._close()

    # --- rows --------------------------------------------------------------------------------

    def _open(self, paths: list[Path]) -> None:
        self._paths = paths
        self._lengths = [sum(part.visible for part in path) for path in paths]
        self._selector: Selector | None = None
        self._classes: dict[int, torch.Tensor] = {}
        self._budgets: dict[int, list[int]] = {}
        self._last: dict[int, list[tuple[torch.Tensor, Selected]]] = {}
        self._some_dense = False

    def _held_paths(self) -> list[Path]:
        """A row that has left may have lost its KV: it reads what some other row reads."""
        some = self._paths[self._live.index(True)]
        return [path if live else some for path, live in zip(self._paths, self._live, strict=True)]

    def _close(self) -> None:
        if self._dense is not None:
            self._dense.close()
        if self._selector is not None:
            self._selector.index.close()
        self._dense = self._selector = None

    def _begin_token(self) -> None:
        """Who selects how many tokens for the token that begins, if one does."""
        if self._begun:
            return
        self._begun = True
        self._began_s, self._waited_s = time.perf_counter(), self._counts.rank_waited_s
        self._guesses = {}
        places = self._tail.places.tolist()
        seen = [length + place + 1 for length, place in zip(self._lengths, places, strict=True)]
        budgets: dict[int, list[int]] = {}
        for row, visible in enumerate(seen):
            if self._live[row] and self._rule.is_sparse(visible):
                budgets.setdefault(self._rule.budget(visible), []).append(row)
                self._counts.sparse_tokens += 1
                self._counts.visible_tokens += visible
                self._counts.selected_tokens += self._rule.budget(visible)
        if budgets != self._budgets:
            self._budgets, self._last = budgets, {}
        device = self._store.compute_device
        self._classes = {n: torch.tensor(rows, device=device) for n, rows in budgets.items()}
        self._some_dense = sum(map(len, budgets.values())) < sum(self._live)
        self._seen = torch.tensor(seen, device=device)
        if self._dense is None and (self._some_dense or self._rule.full_layers):
            self._dense = TreeDecode(self._store, self._held_paths(), self._tail)
        if self._classes and self._selector is None:
            self._selector = Selector(self._rule, self._store, self._held_paths(), self._tail)
        if self._selector is not None:
            self._selector.seen = self._seen
        if self._classes and self._knows_all():
            for layer in range(self._rule.full_layers, self._store.pool.layout.num_layers):
                self._rank.push(layer, partial(self._foreseen, layer))

    # --- what is scored with -----------------------------------------------------------------

    def _found(self, layer: int, query: torch.Tensor) -> list[tuple[torch.Tensor, Selected]]:
        """What each class of rows selects."""
        found: list[tuple[torch.Tensor, Selected]] | None = self._rank.take(layer)
        if found is not None:
            guess, foreseen = self._guesses[layer], _all(query)
        elif self._rule.how.query in PREDICTORS:
            guess, foreseen = self._predicted(layer, query)
        else:
            guess, foreseen = query, ~_all(query)
        corrected = self._corrected(guess, query, foreseen)
        if found is None or corrected is not guess:
            return self._find(layer, corrected, foreseen)
        return found

    def _once_more(self, layer: int) -> list[tuple[torch.Tensor, Selected]]:
        """What the token before read, with the own key in the place of the oldest recent one."""
        assert self._selector is not None
        self._rank.drop(layer)
        again = []
        for rows, found in self._last[layer]:
            own, oldest = self._selector.own(rows), self._selector.oldest_recent(rows)
            columns = torch.where(
                found.columns == oldest[:, None, None], own[:, None, None], found.columns
            )
            again.append((rows, Selected(columns, found.stored, None)))
        return again

    def _corrected(
        self, guess: torch.Tensor, query: torch.Tensor, foreseen: torch.Tensor
    ) -> torch.Tensor:
        """With the own queries of KV heads that turn out to be another; the guess where none is."""
        if self._rule.correct is None or guess is query:
            return guess
        near = F.cosine_similarity(guess.float(), query.float(), dim=-1)
        near = near.unflatten(1, (self._kv_heads, -1)).mean(-1) >= self._rule.correct
        rows = torch.cat([*self._classes.values()])
        off = int((~near & foreseen[:, None])[rows].sum())
        self._counts.corrections += off
        keep = near.repeat_interleave(query.shape[1] // self._kv_heads, 1).unsqueeze(-1)
        return torch.where(keep, guess, query) if off else guess

    def _foreseen(self, layer: int) -> list[tuple[torch.Tensor, Selected]]:
        """Before the token's queries are known."""
        guess, foreseen = self._predicted(layer)
        self._guesses[layer] = guess
        return self._find(layer, guess, foreseen)

    def _find(
        self, layer: int, guess: torch.Tensor, foreseen: torch.Tensor
    ) -> list[tuple[torch.Tensor, Selected]]:
        """Select by these queries [rows, heads, head_dim], and have what is selected here.

        foreseen: rows [rows] that do not know the token's own key.
        """
        assert self._selector is not None
        scores = None
        if self._rule.how.query != "none":
            scores = self._selector.scores(layer, guess, foreseen)
        chosen, slots = [], []
        for count, rows in self._classes.items():
            own = None if scores is None else scores[rows]
            held = [self._memories[row] for row in self._budgets[count]]
            columns = self._selector.select(layer, rows, guess[rows], own, count, held)
            chosen.append((rows, columns, own))
            slots.append(self._selector.index.slots(rows, columns))
        stored = self._store.fetch(layer, slots)
        return [
            (rows, Selected(columns, held, own))
            for (rows, columns, own), held in zip(chosen, stored, strict=True)
        ]

    def _knows_all(self) -> bool:
        """True if every row that selects has a query to predict from."""
        rule, last = self._rule, self._store.pool.layout.num_layers - 1
        return rule.how.query in PREDICTORS and all(
            self._memories[row].window(last, rule.lag, 1) is not None
            for rows in self._classes.values()
            for row in rows.tolist()
        )

    def _predicted(
        self, layer: int, query: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's query [rows, heads, head_dim] from those of its step so far, and a mask of
        the rows that have any; the others have their own."""
        rule = self._rule
        alike: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for rows in self._classes.values():
            for row in rows.tolist():
                known = self._memories[row].window(layer, rule.lag, rule.window + 1)
                if known is not None:
                    alike.setdefault(len(known), []).append((row, known))
        if query is None:
            some = next(iter(alike.values()))[0][1]
            query = some.new_zeros(len(self._paths), *some.shape[1:])
        guess, foreseen = query.clone(), torch.zeros_like(query[:, 0, 0], dtype=torch.bool)
        for found in alike.values():
            rows = torch.tensor([row for row, _ in found], device=query.device)
            windows = torch.stack([known for _, known in found]).transpose(1, 2)
            predicted = PREDICTORS[rule.how.query](windows)
            if rule.frame == "pre":
                predicted = self._rotary.turn(predicted, self._seen[rows] - 1)
            guess[rows] = predicted.to(guess.dtype)
            foreseen[rows] = True
        return guess, foreseen

    def _remember(self, layer: int, query: torch.Tensor) -> None:
        rule = self._rule
        values = query
        if rule.frame == "pre":
            values = self._rotary.turn_back(query, self._seen - 1)
        for row, memory in enumerate(self._memories):
            if self._live[row]:
                memory.push(layer, values[row], rule.window + rule.lag)

    # --- what is selected --------------------------------------------------------------------

    def _attend(
        self, layer: int, rows: torch.Tensor, query: torch.Tensor, found: Selected
    ) -> torch.Tensor:
        """Contexts [rows, heads, head_dim] of what was selected."""
        grouped = query.unflatten(1, (self._kv_heads, -1))
        own = (part[rows] for part in self._tail.read(layer))
        assert self._selector is not None
        keys, values = self._selector.with_own(found.columns, found.stored, own)
        context, lse = attend_few(grouped, keys, values, None)
        if found.scores is not None and self._rule.how.bounds_rest:
            self._count_rest(found.scores, found.columns, lse)
        return context.flatten(1, 2)

    def _count_rest(self, scores: torch.Tensor, columns: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention that is left out, at most: what the scores say of everything else."""
        chosen = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter_(
            2, columns, value=True
        )
        rest = scores.masked_fill(chosen.unsqueeze(2), -torch.inf).logsumexp(-1)
        left_out = torch.sigmoid(rest - lse)
        self._counts.left_out += float(left_out.sum(dtype=torch.float64))
        self._counts.sparse_heads += left_out.numel()


def _all(query: torch.Tensor) -> torch.Tensor:
    """A mask of all rows of [rows, heads, head_dim]."""
    return torch.ones(len(query), dtype=torch.bool, device=query.device)


class SparseAttention:
    """`tree`, but for decoding rows with long paths.

    threaded: selections that are foreseen are found, and fetched, on a thread of their own.
    """

    copies_per_beam = False

    def __init__(
        self, inner: TreeAttention, rule: SparseRule, rotary: Rotary, *, threaded: bool = False
    ) -> None:
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self._inner, self.rule, self._rotary, self._threaded = inner, rule, rotary, threaded

    def decode_view(self, store: SegmentStore, paths: Sequence[Path], tail: Tail) -> SparseDecode:
        rank = ThreadRank(store.counts) if self._threaded else CacheRank()
        return SparseDecode(self.rule, self._rotary, rank, store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> AttentionView:
        """Given tokens attend to everything."""
        return self._inner.prefill_view(store, paths, lengths)
