"""Sparse decoding: rows with long paths attend to the tokens that their rule selects.

What a layer reads is found by a cache rank as soon as its queries are known or foreseen. A row's
selection depends on its path and its step alone, whoever is decoded beside it. Rows that see few
tokens attend as if there were no rule, in the very same bits.

What a row's last tokens leave for its next ones begins anew with each step, so it is no part of a
path: nobody copies it at a fork, and no checkpoint has to store it. Between views it waits in the
segment that the row writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.partial import attend_few
from beamwright.attention.protocols import AttentionView
from beamwright.attention.tree import TreeAttention, TreeDecode
from beamwright.counters import Counters
from beamwright.errors import InputError
from beamwright.kv.segments import Path, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.sparse.rule import WINDOW, SparseRule, asyncspade
from beamwright.sparse.select import Selector


@dataclass(frozen=True)
class Selected:
    """What rows read in one layer.

    columns [rows, kv_heads, count], see `Selector`; stored: their keys and values [2, rows,
    kv_heads, count, head_dim], but of a tail's. scores: that chose them.
    """

    rows: Tensor
    columns: Tensor
    stored: Tensor
    scores: Tensor


Work = Callable[[], list[Selected]]


class CacheRank:
    """Who finds what a layer reads: AsyncSpade's second device (section 4.1).

    Work is pushed as soon as it can be done, and taken when it is needed. threaded: done at once,
    on a thread of its own, in the order in which it was pushed; else when it is taken, which is the
    specification: what is found never depends on it. counts: what a thread took, and what was
    waited for.
    """

    def __init__(self, counts: Counters, *, threaded: bool = False) -> None:
        self._counts = counts
        self._thread = ThreadPoolExecutor(1, "cache-rank") if threaded else None
        self._work: dict[int, Work] = {}

    def push(self, layer: int, work: Work) -> None:
        """What a layer of the present token needs, if nothing was pushed for it before."""
        if layer not in self._work:
            if self._thread is not None:
                work = partial(self._wait, self._thread.submit(self._run, work))
            self._work[layer] = work

    def take(self, layer: int) -> list[Selected] | None:
        """What it needs; None where nothing was pushed."""
        work = self._work.pop(layer, None)
        return None if work is None else work()

    def close(self) -> None:
        """Forget what was pushed; nothing runs any more when it returns."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._work.clear()

    def _run(self, work: Work) -> list[Selected]:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return work()
        finally:
            self._counts.rank_s += time.perf_counter() - began

    def _wait(self, found: Future[list[Selected]]) -> list[Selected]:
        began, late = time.perf_counter(), not found.done()
        try:
            return found.result()
        finally:
            self._counts.rank_takes += 1
            if late:
                self._counts.rank_late += 1
                self._counts.rank_waited_s += time.perf_counter() - began


class SparseDecode:
    """A `DecodeView`: one token per row, of which some select what they attend to."""

    def __init__(
        self, rule: SparseRule, rank: CacheRank, store: SegmentStore, paths: Sequence[Path],
        tail: Tail,
    ) -> None:  # fmt: skip
        self._rule, self._rank, self._store, self._tail = rule, rank, store, tail
        self._layout, self._counts = store.pool.layout, store.counts
        # By layer, queries of the tokens of each row's step, the newest last [tokens, heads, dim].
        self._queries: list[dict[int, Tensor]] = [{} for _ in paths]
        self._live = [True] * len(paths)
        self._guesses: dict[int, tuple[Tensor, Tensor]] = {}
        self._begun = False
        self._dense: TreeDecode | None = None
        self._selector: Selector | None = None
        self._open(list(paths))

    @property
    def looks_ahead(self) -> bool:
        """True if `foresee` is to be called."""
        return self._rule.how.query == "ahead"

    def own(self, segments: Sequence[Segment | None]) -> None:
        """Who writes these rows, None padding the batch: each goes on with what it knew."""
        self._queries = []
        for segment in segments:
            if segment is not None and segment.memory is None:
                segment.memory = {}
            self._queries.append({} if segment is None else segment.memory)

    def foresee(self, layer: int, query: Tensor) -> None:
        """The query that a layer would have if the one before it changed nothing."""
        self._begin_token()
        if self._classes and layer >= self._rule.full_layers:
            guess, foreseen = self._guesses[layer] = query.clone(), _every(query)
            self._rank.push(layer, partial(self._find, layer, guess, foreseen))

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if sinks is not None:
            raise InputError("--sparse knows no sinks")
        self._begin_token()
        full = layer < self._rule.full_layers
        if self._dense is not None and (full or self._some_dense):
            context = self._dense.attend(layer, query, key_value)
        else:
            self._tail.write(layer, key_value)
            context = torch.zeros_like(query)
        if self._classes and not full:
            for found in self._selected(layer, query):
                context[found.rows] = self._attend(layer, query[found.rows], found)
        if self._rule.how.query == "predicted":
            for row, known in enumerate(self._queries):
                if self._live[row]:
                    new, old = query[row].unsqueeze(0), known.get(layer)
                    known[layer] = new.clone() if old is None else torch.cat([old[-WINDOW:], new])
        self._begun = layer + 1 < self._layout.num_layers
        return context

    def keep_rows(self, rows: Tensor) -> None:
        """Compaction packs anew."""
        kept, paths = rows.tolist(), self._held_paths()
        self._close()
        self._queries = [self._queries[row] for row in kept]
        self._live = [self._live[row] for row in kept]
        self._open([paths[row] for row in kept])

    def count_rows(self, num_rows: int) -> None:
        """Rows behind these pad the batch."""
        self._live[num_rows:] = [False] * (len(self._live) - num_rows)

    def drop_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._live[row], self._queries[row] = False, {}

    def close(self) -> None:
        self._rank.close()
        self._close()

    def _open(self, paths: list[Path]) -> None:
        self._paths = paths
        self._lengths = [sum(part.visible for part in path) for path in paths]
        self._classes: dict[int, Tensor] = {}
        self._some_dense = False

    def _held_paths(self) -> list[Path]:
        """A row that has left may have lost its KV: it reads what some other row reads."""
        some = self._paths[self._live.index(True)]
        return [path if live else some for path, live in zip(self._paths, self._live, strict=True)]

    def _close(self) -> None:
        for part in (self._dense, self._selector):
            if part is not None:
                part.close()
        self._dense = self._selector = None

    # --- one token ---------------------------------------------------------------------------

    def _begin_token(self) -> None:
        """Who selects how many tokens for the token that begins, if one does."""
        if self._begun:
            return
        self._begun = True
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
        device, full_layers = self._store.compute_device, self._rule.full_layers
        self._classes = {n: torch.tensor(rows, device=device) for n, rows in budgets.items()}
        selecting = [row for rows in budgets.values() for row in rows]
        self._some_dense = len(selecting) < sum(self._live)
        if self._dense is None and (self._some_dense or full_layers):
            self._dense = TreeDecode(self._store, self._held_paths(), self._tail)
        if self._classes and self._selector is None:
            self._selector = Selector(self._rule, self._store, self._held_paths(), self._tail)
        if self._selector is not None:
            self._selector.seen = torch.tensor(seen, device=device)
        # Where every row that selects has a query to predict from, all layers are foreseen.
        last = self._layout.num_layers - 1
        if selecting and all(last in self._queries[row] for row in selecting):
            for layer in range(full_layers, self._layout.num_layers):
                self._rank.push(layer, partial(self._find_predicted, layer))

    def _selected(self, layer: int, query: Tensor) -> list[Selected]:
        """What each class of rows selects, with the own queries of KV heads that turn out to have
        another than was foreseen."""
        found = self._rank.take(layer)
        if found is not None:
            guess, foreseen = self._guesses[layer]
        elif self._rule.how.query == "predicted":
            guess, foreseen = self._predicted(layer, query)
        else:
            return self._find(layer, query, ~_every(query))
        if self._rule.correct is not None:
            near = F.cosine_similarity(guess.float(), query.float(), dim=-1)
            near = near.unflatten(1, (self._layout.num_kv_heads, -1)).mean(-1) >= self._rule.correct
            rows = torch.cat([*self._classes.values()])
            off = int((~near & foreseen[:, None])[rows].sum())
            self._counts.corrections += off
            if off:
                keep = near.repeat_interleave(query.shape[1] // near.shape[1], 1).unsqueeze(-1)
                return self._find(layer, torch.where(keep, guess, query), foreseen)
        return self._find(layer, guess, foreseen) if found is None else found

    def _find_predicted(self, layer: int) -> list[Selected]:
        """Before the token's queries are known."""
        some = next(known[layer] for known in self._queries if layer in known)
        empty = some.new_zeros(len(self._paths), *some.shape[1:])
        self._guesses[layer] = self._predicted(layer, empty)
        return self._find(layer, *self._guesses[layer])

    def _find(self, layer: int, guess: Tensor, foreseen: Tensor) -> list[Selected]:
        """Select by these queries [rows, heads, head_dim], and have what is selected here.

        foreseen: rows [rows] that do not know the token's own key.
        """
        selector = self._selector
        assert selector is not None
        scores = selector.scores(layer, guess, foreseen)
        chosen, slots = [], []
        for count, rows in self._classes.items():
            own = scores[rows]
            columns = selector.select(layer, rows, guess[rows], own, count)
            chosen.append((rows, columns, own))
            slots.append(selector.slots(rows, columns))
        stored = self._store.fetch(layer, slots)
        return [
            Selected(rows, columns, held, own)
            for (rows, columns, own), held in zip(chosen, stored, strict=True)
        ]

    def _predicted(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's query [rows, heads, head_dim] from those of its step so far, and a mask of
        the rows that have any; the others have this one."""
        alike: dict[int, list[tuple[int, Tensor]]] = {}
        for row in torch.cat([*self._classes.values()]).tolist():
            known = self._queries[row].get(layer)
            if known is not None:
                alike.setdefault(len(known), []).append((row, known))
        guess, foreseen = query.clone(), ~_every(query)
        for found in alike.values():
            rows = torch.tensor([row for row, _ in found], device=query.device)
            windows = torch.stack([known for _, known in found]).transpose(1, 2)
            guess[rows] = asyncspade(windows, self._rule.how.reading).to(guess.dtype)
            foreseen[rows] = True
        return guess, foreseen

    def _attend(self, layer: int, query: Tensor, found: Selected) -> Tensor:
        """Contexts [rows, heads, head_dim] of what was selected."""
        assert self._selector is not None
        own = (part[found.rows] for part in self._tail.read(layer))
        keys, values = self._selector.with_own(found.columns, found.stored, own)
        grouped = query.unflatten(1, (self._layout.num_kv_heads, -1))
        context, lse = attend_few(grouped, keys, values, None)
        if self._rule.how.query == "own":  # the scores say how much is left out, or at most
            chosen = torch.zeros_like(found.scores[:, :, 0], dtype=torch.bool)
            chosen.scatter_(2, found.columns, value=True)
            rest = found.scores.masked_fill(chosen.unsqueeze(2), -torch.inf).logsumexp(-1)
            left_out = torch.sigmoid(rest - lse)
            self._counts.left_out += float(left_out.sum(dtype=torch.float64))
            self._counts.sparse_heads += left_out.numel()
        return context.flatten(1, 2)


def _every(query: Tensor) -> Tensor:
    """A mask of all rows of [rows, heads, head_dim]."""
    return torch.ones(len(query), dtype=torch.bool, device=query.device)


class SparseAttention:
    """`tree`, but for decoding rows with long paths.

    threaded: selections that are foreseen are found, and fetched, on a thread of their own.
    """

    copies_per_beam = False

    def __init__(self, inner: TreeAttention, rule: SparseRule, *, threaded: bool = False) -> None:
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self._inner, self._rule, self._threaded = inner, rule, threaded

    def decode_view(self, store: SegmentStore, paths: Sequence[Path], tail: Tail) -> SparseDecode:
        rank = CacheRank(store.counts, threaded=self._threaded)
        return SparseDecode(self._rule, rank, store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> AttentionView:
        """Given tokens attend to everything."""
        return self._inner.prefill_view(store, paths, lengths)
