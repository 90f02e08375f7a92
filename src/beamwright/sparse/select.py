"""Selector: which tokens rows read in a layer, by scores of what is stored and of their tails.

A row's own path decides what it selects. Columns are `PathIndex`'s: of stored tokens, then of the
tail's places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from beamwright.attention.partial import round_up
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.sparse.choose import choose, probabilities
from beamwright.sparse.index import COLUMN_MULTIPLE, PathIndex, bounded, page_bounds
from beamwright.sparse.memory import RowMemory
from beamwright.sparse.rule import CANDIDATES, RECENT, SINKS, SparseRule


class Selector:
    """Of a batch of rows on these paths.

    seen: tokens that each row sees, that of the present token included; set before each token.
    """

    def __init__(
        self, rule: SparseRule, store: SegmentStore, paths: Sequence[Path], tail: Tail
    ) -> None:
        self._rule, self._store, self._tail = rule, store, tail
        self._kv_heads = store.pool.layout.num_kv_heads
        self.index = PathIndex(store, paths)
        lengths = [sum(part.visible for part in path) for path in paths]
        self.stored = torch.tensor(lengths, device=store.compute_device)
        self.seen = self.stored

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The column of each row's present token."""
        return self.index.num_columns + self._tail.places[rows]

    def oldest_recent(self, rows: torch.Tensor) -> torch.Tensor:
        """The column of the oldest of those that were always selected for the token before."""
        position, first = self.seen[rows] - 1 - RECENT, self.stored[rows]
        return torch.where(position >= first, self.index.num_columns + position - first, position)

    def scores(self, layer: int, guess: torch.Tensor, foreseen: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, group, columns] of stored tokens and of the tail's."""
        pages = self._rule.how.scores != "keys"
        stored = self.index.scores(layer, guess, pages=pages)
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

    def select(
        self,
        layer: int,
        rows: torch.Tensor,
        query: torch.Tensor,
        scores: torch.Tensor | None,
        count: int,
        held: Sequence[RowMemory],
    ) -> torch.Tensor:
        """Columns [rows, kv_heads, count] of so many tokens of each of these rows.

        query [rows, heads, head_dim], scores [rows, kv_heads, group, columns]: of these rows.
        held: what their tokens before have left.
        """
        rule = self._rule
        positions, seen = self._positions(rows)
        forced = seen & ((positions < SINKS) | (positions >= (self.seen[rows] - RECENT)[:, None]))
        if scores is None:  # a window: the newest
            wanted = positions.float().unsqueeze(1).expand(-1, self._kv_heads, -1)
            return choose(wanted.clamp_min(0), seen, forced & (positions < SINKS), count)
        if rule.how.evicts:
            return self._evicting(layer, rows, scores, count, held)
        if rule.how.scores == "both":
            return self._best_of_pages(layer, rows, query, scores, (seen, forced), count)
        return choose(probabilities(scores), seen, forced, count)

    def _positions(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The position in its path of each column [rows, columns], and whether it has a token."""
        num_stored = self.index.num_columns
        num_own = round_up(self._tail.num_tokens, COLUMN_MULTIPLE)
        columns = torch.arange(num_stored + num_own, device=rows.device)
        stored, seen = self.stored[rows][:, None], self.seen[rows][:, None]
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
        # Where the keys are: of these, too, nothing crosses the link to be scored.
        home = self._store.pool.storage.device
        stored = self._store.read(layer, self.index.slots(rows, candidates))[:1]
        own, at = self._tail.read(layer)[0][rows].to(home), candidates.to(home)
        (keys,) = self.with_own(at, stored, [own])
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
        self,
        layer: int,
        rows: torch.Tensor,
        scores: torch.Tensor,
        count: int,
        held: Sequence[RowMemory],
    ) -> torch.Tensor:
        """TOVA: the best of those that were selected for the token before, and of newer ones."""
        positions, seen = self._positions(rows)
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
        for memory, each, visible in zip(held, selected, self.seen[rows].tolist(), strict=True):
            memory.keep(layer, each, visible)
        return columns

    def with_own(
        self, columns: torch.Tensor, stored: torch.Tensor, own: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Stored keys, or keys and values, and in the tail's columns those of the tail."""
        at = columns - self.index.num_columns
        is_own = (at >= 0).unsqueeze(-1)
        at = at.clamp(0, self._tail.num_tokens - 1).unsqueeze(-1)
        at = at.expand(-1, -1, -1, stored.shape[-1])
        pairs = zip(own, stored, strict=True)
        return [torch.where(is_own, mine.gather(2, at), old) for mine, old in pairs]
