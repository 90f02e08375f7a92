"""Selector: which tokens rows read in a layer, by scores of what is stored and of their tails.

A row's own path decides what it selects. What its last tokens leave for its next ones begins anew
with each step, so it is no part of a path: nobody copies it at a fork, and no checkpoint has to
store it. Between views it waits in the segment that the row writes.
Columns are `PathIndex`'s: of stored tokens, then of the tail's places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from beamwright.attention.partial import round_up
from beamwright.kv.segments import Path, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.sparse.index import COLUMN_MULTIPLE, PathIndex, bounded, page_bounds
from beamwright.sparse.rule import CANDIDATES, RECENT, SINKS, SparseRule

_FORCED = 2**31 - 1


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Softmax for each head, averaged over the heads of a group.

    scores [rows, kv_heads, group, columns], -inf where a row has no token; returns float32
    [rows, kv_heads, columns]. Sums are in float64: their last bits, which follow the number of
    columns, are rounded away.
    """
    scores = scores.float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    return weights.div_(total).mean(2)


def choose(
    wanted: torch.Tensor, seen: torch.Tensor, forced: torch.Tensor, count: int
) -> torch.Tensor:
    """The `count` columns with the largest values, in order; of equal ones the later.

    wanted [rows, kv_heads, columns], float32 and not negative; seen, forced: masks [rows, columns]
    or [rows, kv_heads, columns] of what a row may and must select, at least and at most `count`.
    Returns [rows, kv_heads, count].
    """
    seen, forced = (
        mask if mask.dim() == 3 else mask[:, None].expand_as(wanted) for mask in (seen, forced)
    )
    # Floats that are not negative are ordered like their bits: no two keys are equal.
    keys = wanted.contiguous().view(torch.int32).long().masked_fill(forced, _FORCED)
    keys = keys.masked_fill(~seen, -1)
    columns = torch.arange(wanted.shape[-1], device=wanted.device)
    best = ((keys << 32) + columns).topk(count, -1, sorted=False).values
    return (best & 0xFFFFFFFF).sort(-1).values


@dataclass
class RowMemory:
    """Of one row, by layer.

    queries: of its step's tokens, the newest last [count, heads, head_dim].
    kept: the positions [kv_heads, count] that are not evicted, of the first so many.
    """

    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def push(self, layer: int, query: torch.Tensor, most: int) -> None:
        """Note a token's query [heads, head_dim]; `most` are kept."""
        known = self.queries.get(layer)
        new = query.unsqueeze(0)
        joined = new.clone() if known is None else torch.cat([known[-most + 1 :], new])
        self.queries[layer] = joined

    def window(self, layer: int, lag: int, most: int) -> torch.Tensor | None:
        """Queries [count, heads, head_dim] up to that of `lag` tokens before; None without any."""
        known = self.queries.get(layer)
        count = 0 if known is None else len(known) - (lag - 1)
        if known is None or count <= 0:
            return None
        return known[max(0, count - most) : count]

    def keep(self, layer: int, positions: torch.Tensor, visible: int) -> None:
        """Of so many tokens these positions [kv_heads, count] are not evicted."""
        self.kept[layer] = positions, visible

    def left(self, layer: int, kv_heads: int, positions: torch.Tensor) -> torch.Tensor:
        """Which of these positions [columns] are not evicted [kv_heads, columns]."""
        if layer not in self.kept:
            return positions.new_ones((kv_heads, len(positions)), dtype=torch.bool)
        kept, visible = self.kept[layer]
        alive = positions.new_zeros((kv_heads, int(positions.max()) + 1), dtype=torch.bool)
        alive.scatter_(1, kept, value=True)
        alive[:, visible:] = True
        return alive[:, positions.clamp_min(0)]


def memories(segments: Sequence[Segment | None]) -> list[RowMemory]:
    """Of the rows that write these segments; None pads the batch."""
    found = []
    for segment in segments:
        if segment is None:
            found.append(RowMemory())
            continue
        if segment.memory is None:
            segment.memory = RowMemory()
        found.append(segment.memory)
    return found


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
