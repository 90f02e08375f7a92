"""Sparse decoding: rows with long paths attend to the tokens that their rule selects.

What a layer reads is found by a cache rank (`rank`), as soon as its queries are known or foreseen.
A row's selection depends on its path and its step alone, whoever is decoded beside it. Rows that
see few tokens attend as if there were no rule, in the very same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from beamwright.attention.partial import attend_few, round_up
from beamwright.attention.tree import TreeAttention, TreeDecode
from beamwright.kv import Path, Segment, SegmentStore, SparseCounts, Tail
from beamwright.protocols import AttentionView
from beamwright.sparse.choose import choose, probabilities
from beamwright.sparse.index import COLUMN_MULTIPLE, PathIndex, bounded, page_bounds
from beamwright.sparse.memory import RowMemory, memories
from beamwright.sparse.predict import PREDICTORS
from beamwright.sparse.rank import CacheRank, InlineRank, ThreadRank
from beamwright.sparse.rotary import Rotary
from beamwright.sparse.rule import CANDIDATES, RECENT, SINKS, SparseRule


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
        self._counts: SparseCounts = store.counts.sparse
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
            self._counts.forward_s += time.perf_counter() - self._began_s
            self._counts.forward_s -= self._counts.waited_s - self._waited_s
        return context

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Compaction packs anew."""
        kept, paths = rows.tolist(), self._held_paths()
        self._rank.settle()
        self._close()
        self._memories = [self._memories[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._open([paths[row] for row in kept])

    def count_rows(self, num_rows: int) -> None:
        """Rows behind these pad the batch."""
        self._live[num_rows:] = [False] * (len(self._live) - num_rows)

    def drop_rows(self, rows: Sequence[int]) -> None:
        self._rank.settle()  # their KV may be freed
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
        self._index: PathIndex | None = None
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
        if self._index is not None:
            self._index.close()
        self._dense = self._index = None

    def _begin_token(self) -> None:
        """Who selects how many tokens for the token that begins, if one does."""
        if self._begun:
            return
        self._begun = True
        self._began_s, self._waited_s = time.perf_counter(), self._counts.waited_s
        self._guesses = {}
        places = self._tail.places.tolist()
        seen = [length + place + 1 for length, place in zip(self._lengths, places, strict=True)]
        budgets: dict[int, list[int]] = {}
        for row, visible in enumerate(seen):
            if self._live[row] and self._rule.is_sparse(visible):
                budgets.setdefault(self._rule.budget(visible), []).append(row)
                self._counts.tokens += 1
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
        if self._classes and self._index is None:
            self._index = PathIndex(self._store, self._held_paths())
            self._stored = torch.tensor(self._lengths, device=device)
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
        assert self._index is not None
        self._rank.drop(layer)
        first_own, again = self._index.num_columns, []
        for rows, found in self._last[layer]:
            own = first_own + self._tail.places[rows]
            oldest = self._seen[rows] - 1 - RECENT
            behind = oldest - self._stored[rows]
            left = torch.where(behind >= 0, first_own + behind, oldest)
            columns = torch.where(
                found.columns == left[:, None, None], own[:, None, None], found.columns
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
        scores = None
        if self._rule.how.query != "none":
            scores = self._scores(layer, guess, foreseen)
        assert self._index is not None
        chosen, slots = [], []
        for count, rows in self._classes.items():
            own = None if scores is None else scores[rows]
            columns = self._select(layer, rows, guess[rows], own, count)
            chosen.append((rows, columns, own))
            slots.append(self._index.slots(rows, columns))
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

    def _scores(self, layer: int, guess: torch.Tensor, foreseen: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, group, columns] of stored tokens and of the tail's."""
        assert self._index is not None
        pages = self._rule.how.scores != "keys"
        stored = self._index.scores(layer, guess, pages=pages)
        keys, _ = self._tail.read(layer)
        grouped = guess.unflatten(1, (self._kv_heads, -1))
        places = torch.arange(keys.shape[2], device=keys.device)
        unseen = places > (self._tail.places - foreseen.long())[:, None]
        if pages:
            own = bounded(grouped, *page_bounds(keys, ~unseen))
        else:
            own = grouped @ keys.transpose(-1, -2)
        own = (own * guess.shape[-1] ** -0.5).masked_fill(unseen[:, None, None], -torch.inf)
        own = F.pad(own, (0, -own.shape[-1] % COLUMN_MULTIPLE), value=-torch.inf)
        return torch.cat([stored, own], -1)

    def _select(
        self,
        layer: int,
        rows: torch.Tensor,
        query: torch.Tensor,
        scores: torch.Tensor | None,
        count: int,
    ) -> torch.Tensor:
        """Columns [rows, kv_heads, count] of so many tokens of each of these rows."""
        rule = self._rule
        positions, seen = self._positions(rows)
        forced = seen & ((positions < SINKS) | (positions >= (self._seen[rows] - RECENT)[:, None]))
        if scores is None:  # a window: the newest
            wanted = positions.float().unsqueeze(1).expand(-1, self._kv_heads, -1)
            return choose(wanted.clamp_min(0), seen, forced & (positions < SINKS), count)
        if rule.how.evicts:
            return self._evicting(layer, rows, scores, seen, count)
        if rule.how.scores == "both":
            return self._best_of_pages(layer, rows, query, scores, (seen, forced), count)
        return choose(probabilities(scores), seen, forced, count)

    def _attend(
        self, layer: int, rows: torch.Tensor, query: torch.Tensor, found: Selected
    ) -> torch.Tensor:
        """Contexts [rows, heads, head_dim] of what was selected."""
        grouped = query.unflatten(1, (self._kv_heads, -1))
        own = (part[rows] for part in self._tail.read(layer))
        keys, values = self._with_own(found.columns, found.stored, own)
        context, lse = attend_few(grouped, keys, values, None)
        if found.scores is not None and self._rule.how.bounds_rest:
            self._count_rest(found.scores, found.columns, lse)
        return context.flatten(1, 2)

    def _positions(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The position in its path of each column [rows, columns], and whether it has a token."""
        assert self._index is not None
        num_stored = self._index.num_columns
        num_own = round_up(self._tail.num_tokens, COLUMN_MULTIPLE)
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
        assert self._index is not None
        # Where the keys are: of these, too, nothing crosses the link to be scored.
        home = self._store.pool.storage.device
        stored = self._store.read(layer, self._index.slots(rows, candidates))[:1]
        own, at = self._tail.read(layer)[0][rows].to(home), candidates.to(home)
        (keys,) = self._with_own(at, stored, [own])
        missing = -most % COLUMN_MULTIPLE
        keys = F.pad(keys, (0, 0, 0, missing))
        grouped = query.to(home).unflatten(1, (self._kv_heads, -1))
        scores = grouped @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores.to(query.device)
        there, sure, scored = (
            F.pad(mask.expand_as(bounds[:, :, 0]).gather(2, candidates), (0, missing))
            for mask in (seen[:, None], forced[:, None], bounds[:, :, 0] > -torch.inf)
        )
        scores = scores.masked_fill(~scored.unsqueeze(2), -torch.inf)
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

    def _with_own(
        self, columns: torch.Tensor, stored: torch.Tensor, own: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Stored keys, or keys and values, and in the tail's columns those of the tail."""
        assert self._index is not None
        at = columns - self._index.num_columns
        is_own = (at >= 0).unsqueeze(-1)
        at = at.clamp(0, self._tail.num_tokens - 1).unsqueeze(-1)
        at = at.expand(-1, -1, -1, stored.shape[-1])
        pairs = zip(own, stored, strict=True)
        return [torch.where(is_own, mine.gather(2, at), old) for mine, old in pairs]

    def _count_rest(self, scores: torch.Tensor, columns: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention that is left out, at most: what the scores say of everything else."""
        chosen = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter_(
            2, columns, value=True
        )
        rest = scores.masked_fill(chosen.unsqueeze(2), -torch.inf).logsumexp(-1)
        left_out = torch.sigmoid(rest - lse)
        self._counts.left_out += float(left_out.sum(dtype=torch.float64))
        self._counts.num_heads += left_out.numel()


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
        rank: CacheRank = ThreadRank(store.counts.sparse) if self._threaded else InlineRank()
        return SparseDecode(self.rule, self._rotary, rank, store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> AttentionView:
        """Given tokens attend to everything."""
        return self._inner.prefill_view(store, paths, lengths)
