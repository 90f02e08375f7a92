"""Sparse decoding: rows with long paths attend to the tokens that their rule selects.

This is the specification: what a token selects is found, and attended to, within its own step. A
row's selection depends on its path and its step alone, whoever is decoded beside it. Rows that see
few tokens attend as if there were no rule, in the very same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from beamwright.attention.partial import attend_few
from beamwright.attention.tree import TreeAttention, TreeDecode
from beamwright.kv import Path, Segment, SegmentStore, SparseCounts, Tail
from beamwright.protocols import AttentionView
from beamwright.sparse.choose import choose, probabilities
from beamwright.sparse.index import COLUMN_MULTIPLE, PathIndex, bounded, page_bounds
from beamwright.sparse.memory import RowMemory, memories
from beamwright.sparse.predict import PREDICTORS
from beamwright.sparse.rotary import Rotary
from beamwright.sparse.rule import CANDIDATES, RECENT, SINKS, SparseRule


class SparseDecode:
    """A `DecodeView`: one token per row, of which some select what they attend to."""

    def __init__(
        self,
        rule: SparseRule,
        rotary: Rotary,
        store: SegmentStore,
        paths: Sequence[Path],
        tail: Tail,
    ) -> None:
        self._rule, self._rotary, self._store, self._tail = rule, rotary, store, tail
        self._kv_heads = store.pool.layout.num_kv_heads
        self._counts: SparseCounts = store.counts.sparse
        self._memories = [RowMemory() for _ in paths]
        self._live = [True] * len(paths)
        self._ahead: dict[int, torch.Tensor] = {}
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
        self._ahead[layer] = query

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            self._begin_token()
        full = layer < self._rule.full_layers
        if self._dense is not None and (full or self._some_dense):
            context = self._dense.attend(layer, query, key_value)
        else:
            self._tail.write(layer, key_value)
            context = torch.zeros_like(query)
        if self._classes and not full:
            guess = self._guess(layer, query)
            scores = self._scores(layer, guess) if self._rule.how.query != "none" else None
            for count, rows in self._classes.items():
                own = None if scores is None else scores[rows]
                context[rows] = self._attend(layer, rows, query[rows], own, count)
        if self._rule.how.query in PREDICTORS:
            self._remember(layer, query)
        return context

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Compaction packs anew."""
        kept, paths = rows.tolist(), self._held_paths()
        self._close()
        self._memories = [self._memories[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._open([paths[row] for row in kept])

    def count_rows(self, num_rows: int) -> None:
        """Rows behind these pad the batch."""
        self._live[num_rows:] = [False] * (len(self._live) - num_rows)

    def drop_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._live[row] = False
            self._memories[row] = RowMemory()

    def close(self) -> None:
        self._close()

    # --- rows --------------------------------------------------------------------------------

    def _open(self, paths: list[Path]) -> None:
        self._paths = paths
        self._lengths = [sum(part.visible for part in path) for path in paths]
        self._index: PathIndex | None = None
        self._classes: dict[int, torch.Tensor] = {}
        self._some_dense = False

    def _held_paths(self) -> list[Path]:
        """A row that has left may have lost its KV: it reads what some other row reads."""
        some = self._paths[self._live.index(True)]
        return [path if live else some for path, live in zip(self._paths, self._live, strict=True)]

    def _close(self) -> None:
        if self._dense is not None:
            self._dense.close()
        if self._index is not None:
            self._index.close()
        self._dense = self._index = None

    def _begin_token(self) -> None:
        """Who selects how many tokens for the token that begins."""
        self._ahead = {}
        places = self._tail.places.tolist()
        seen = [length + place + 1 for length, place in zip(self._lengths, places, strict=True)]
        budgets: dict[int, list[int]] = {}
        for row, visible in enumerate(seen):
            if self._live[row] and self._rule.is_sparse(visible):
                budgets.setdefault(self._rule.budget(visible), []).append(row)
                self._counts.tokens += 1
                self._counts.visible_tokens += visible
                self._counts.selected_tokens += self._rule.budget(visible)
        device = self._store.compute_device
        self._classes = {n: torch.tensor(rows, device=device) for n, rows in budgets.items()}
        self._some_dense = sum(map(len, budgets.values())) < sum(self._live)
        self._seen = torch.tensor(seen, device=device)
        if self._dense is None and (self._some_dense or self._rule.full_layers):
            self._dense = TreeDecode(self._store, self._held_paths(), self._tail)
        if self._classes and self._index is None:
            self._index = PathIndex(self._store, self._held_paths())
            self._stored = torch.tensor(self._lengths, device=device)

    # --- what is scored with -----------------------------------------------------------------

    def _guess(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """What every row scores its tokens with [rows, heads, head_dim]."""
        how = self._rule.how.query
        guess = query
        if how == "ahead":
            guess = self._ahead.get(layer, query)
        elif how in PREDICTORS:
            guess = self._predicted(layer, query)
        if self._rule.correct is not None and guess is not query:
            near = F.cosine_similarity(guess.float(), query.float(), dim=-1)
            near = near.unflatten(1, (self._kv_heads, -1)).mean(-1) >= self._rule.correct
            group = query.shape[1] // self._kv_heads
            keep = near.repeat_interleave(group, 1).unsqueeze(-1)
            live = torch.tensor(self._live, device=near.device)
            self._counts.corrections += int((~near[live]).sum())
            guess = torch.where(keep, guess, query)
        return guess

    def _predicted(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Each row's query from those of its step so far; its own where there is none."""
        rule, guess = self._rule, query.clone()
        alike: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for rows in self._classes.values():
            for row in rows.tolist():
                known = self._memories[row].window(layer, rule.lag, rule.window + 1)
                if known is not None:
                    alike.setdefault(len(known), []).append((row, known))
        for found in alike.values():
            rows = torch.tensor([row for row, _ in found], device=query.device)
            windows = torch.stack([known for _, known in found]).transpose(1, 2)
            predicted = PREDICTORS[rule.how.query](windows)
            if rule.frame == "pre":
                predicted = self._rotary.turn(predicted, self._seen[rows] - 1)
            guess[rows] = predicted.to(guess.dtype)
        return guess

    def _remember(self, layer: int, query: torch.Tensor) -> None:
        rule = self._rule
        values = query
        if rule.frame == "pre":
            values = self._rotary.turn_back(query, self._seen - 1)
        for row, memory in enumerate(self._memories):
            if self._live[row]:
                memory.push(layer, values[row], rule.window + rule.lag)

    # --- what is selected --------------------------------------------------------------------

    def _scores(self, layer: int, guess: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, group, columns] of stored tokens and of the tail's."""
        assert self._index is not None
        pages = self._rule.how.scores != "keys"
        stored = self._index.scores(layer, guess, pages=pages)
        keys, _ = self._tail.read(layer)
        grouped = guess.unflatten(1, (self._kv_heads, -1))
        places = torch.arange(keys.shape[2], device=keys.device)
        unseen = places > self._tail.places[:, None]
        if pages:
            own = bounded(grouped, *page_bounds(keys, ~unseen))
        else:
            own = grouped @ keys.transpose(-1, -2)
        own = (own * guess.shape[-1] ** -0.5).masked_fill(unseen[:, None, None], -torch.inf)
        own = F.pad(own, (0, -own.shape[-1] % COLUMN_MULTIPLE), value=-torch.inf)
        return torch.cat([stored, own], -1)

    def _attend(
        self,
        layer: int,
        rows: torch.Tensor,
        query: torch.Tensor,
        scores: torch.Tensor | None,
        count: int,
    ) -> torch.Tensor:
        """Contexts of rows that select so many tokens each."""
        rule, grouped = self._rule, query.unflatten(1, (self._kv_heads, -1))
        positions, seen = self._positions(rows)
        forced = seen & ((positions < SINKS) | (positions >= (self._seen[rows] - RECENT)[:, None]))
        if scores is None:  # a window: the newest
            wanted = positions.float().unsqueeze(1).expand(-1, self._kv_heads, -1)
            columns = choose(wanted.clamp_min(0), seen, forced & (positions < SINKS), count)
        elif rule.how.evicts:
            columns = self._evicting(layer, rows, scores, seen, count)
        elif rule.how.scores == "both":
            columns = self._best_of_pages(layer, rows, grouped, scores, (seen, forced), count)
        else:
            columns = choose(probabilities(scores), seen, forced, count)
        keys, values = self._taken(layer, rows, columns)
        context, lse = attend_few(grouped, keys, values, None)
        if scores is not None and rule.how.bounds_rest:
            self._count_rest(scores, columns, lse)
        return context.flatten(1, 2)

    def _positions(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The position in its path of each column [rows, columns], and whether it has a token."""
        assert self._index is not None
        num_stored, num_own = self._index.num_columns, self._tail.num_tokens
        num_own += -num_own % COLUMN_MULTIPLE
        columns = torch.arange(num_stored + num_own, device=rows.device)
        stored, seen = self._stored[rows][:, None], self._seen[rows][:, None]
        own = columns - num_stored + stored
        positions = torch.where(columns < num_stored, columns, own)
        there = (columns < stored) | ((columns >= num_stored) & (own < seen))
        return torch.where(there, positions, -1), there

    def _best_of_pages(
        self,
        layer: int,
        rows: torch.Tensor,
        query: torch.Tensor,
        bounds: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor],
        count: int,
    ) -> torch.Tensor:
        """Bounds choose candidates, their keys' own scores among them."""
        seen, forced = masks
        most = min(CANDIDATES * count, bounds.shape[-1])  # those of a row that sees fewer are none
        candidates = choose(probabilities(bounds), seen, forced, most)
        keys, _ = self._taken(layer, rows, candidates)
        missing = -most % COLUMN_MULTIPLE
        keys = F.pad(keys, (0, 0, 0, missing))
        scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        there, sure = (
            F.pad(mask[:, None].expand_as(bounds[:, :, 0]).gather(2, candidates), (0, missing))
            for mask in (seen, forced)
        )
        scores = scores.masked_fill(~there.unsqueeze(2), -torch.inf)
        found = choose(probabilities(scores), there, sure, count)
        return candidates.gather(2, found)

    def _evicting(
        self, layer: int, rows: torch.Tensor, scores: torch.Tensor, seen: torch.Tensor, count: int
    ) -> torch.Tensor:
        """TOVA: the best of those that were selected for the token before, and of newer ones."""
        positions, _ = self._positions(rows)
        held = [self._memories[row] for row in rows.tolist()]
        left = torch.stack(
            [
                memory.left(layer, self._kv_heads, at)
                for memory, at in zip(held, positions, strict=True)
            ]
        )
        left &= seen[:, None]
        wanted = probabilities(scores.masked_fill(~left.unsqueeze(2), -torch.inf))
        columns = choose(wanted, left, torch.zeros_like(seen), count)
        selected = positions[:, None].expand_as(wanted).gather(2, columns)
        for memory, each, visible in zip(held, selected, self._seen[rows].tolist(), strict=True):
            memory.keep(layer, each, visible)
        return columns

    def _taken(
        self, layer: int, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, count, head_dim] of selected columns."""
        assert self._index is not None
        stored = self._index.take(layer, rows, columns)
        num_stored = self._index.num_columns
        at = (
            (columns - num_stored)
            .clamp(0, self._tail.num_tokens - 1)
            .unsqueeze(-1)
            .expand(*columns.shape, stored.shape[-1])
        )
        is_own = (columns >= num_stored).unsqueeze(-1)
        own = (part[rows].gather(2, at) for part in self._tail.read(layer))
        keys, values = (
            torch.where(is_own, mine, old) for mine, old in zip(own, stored, strict=True)
        )
        return keys, values

    def _count_rest(self, scores: torch.Tensor, columns: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention that is left out, at most: what the scores say of everything else."""
        chosen = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter_(
            2, columns, value=True
        )
        rest = scores.masked_fill(chosen.unsqueeze(2), -torch.inf).logsumexp(-1)
        left_out = torch.sigmoid(rest - lse)
        self._counts.left_out += float(left_out.sum(dtype=torch.float64))
        self._counts.num_heads += left_out.numel()


class SparseAttention:
    """`tree`, but for decoding rows with long paths."""

    copies_per_beam = False

    def __init__(self, inner: TreeAttention, rule: SparseRule, rotary: Rotary) -> None:
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self._inner, self.rule, self._rotary = inner, rule, rotary

    def decode_view(self, store: SegmentStore, paths: Sequence[Path], tail: Tail) -> SparseDecode:
        return SparseDecode(self.rule, self._rotary, store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> AttentionView:
        """Given tokens attend to everything."""
        view: Any = self._inner.prefill_view(store, paths, lengths)
        found: AttentionView = view
        return found
