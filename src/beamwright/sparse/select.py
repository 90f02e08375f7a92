"""Selector: selects the tokens that each row of a batch attends to in a layer, by their scores.

What a row selects depends only on its own path. The keys of a segment are scored once for all rows
whose paths contain it.

A column is a token's index within its row. Columns first cover the row's path, padded to the
longest path of the batch, then the row's tail (its newest tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.buckets import Entry, Hold, LayerSource, SharedSegments
from beamwright.attention.parts import KEY_MULTIPLE, round_up
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail
from beamwright.plan.sparse import RECENT, SINKS
from beamwright.sparse.rule import CANDIDATES, PAGE, SparseRule

_COLUMN_MULTIPLE = (
    32  # fills vector registers of any CPU, so that elementwise functions round in one way
)
_FORCED = 2**31 - 1  # larger than the bits of any float, so forced columns are chosen first
_STEPS = 15  # steps between the smallest and the largest number of 4 bits


def probabilities(scores: Tensor) -> Tensor:
    """Return the softmax of each query head, averaged over the heads of a KV head.

    scores: [rows, kv_heads, group, columns], -inf where a row has no token.

    Return float32 [rows, kv_heads, columns]. Sums are computed in float64, because their last bits
    depend on the number of columns. Rounding to float32 removes these bits.
    """
    scores = scores.float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    return weights.div_(total).mean(2)


def top_columns(wanted: Tensor, seen: Tensor, forced: Tensor, count: int) -> Tensor:
    """Return the `count` columns with the largest values [rows, kv_heads, count], ascending.

    Of equal values, later columns are preferred.

    wanted: the values [rows, kv_heads, columns], float32 and not negative.
    seen: mask, broadcastable to `wanted`, of columns that a row may select: at least `count`.
    forced: mask of columns that a row must select: at most `count`.
    """
    # Floats that are not negative have the order of their bits as integers. With the column in the
    # low half, no two keys are equal.
    keys = wanted.contiguous().view(torch.int32).long().masked_fill(forced, _FORCED)
    keys = keys.masked_fill(~seen, -1)
    columns = torch.arange(wanted.shape[-1], device=wanted.device)
    best = ((keys << 32) + columns).topk(count, -1, sorted=False).values
    return (best & 0xFFFFFFFF).sort(-1).values


def page_bounds(keys: Tensor, seen: Tensor, page: int) -> Tensor:
    """Return the minimum and maximum of each dimension over each page of `page` keys (Quest).

    keys: [..., tokens, head_dim].
    seen: mask [..., tokens] of tokens that exist, for pages that are only partly filled.

    Return [..., pages, 2 * head_dim], minima first. Pages without a token have zeros.
    """
    pages, inside = keys.unflatten(-2, (-1, page)), seen.unflatten(-1, (-1, page)).unsqueeze(-1)
    least = pages.masked_fill(~inside, torch.inf).amin(-2)
    most = pages.masked_fill(~inside, -torch.inf).amax(-2)
    return torch.cat([least, most], -1).masked_fill(~inside.any(-2), 0.0)


def score_bounds(query: Tensor, bounds: Tensor, times: int) -> Tensor:
    """Return an upper bound on the product of a query with any key of a page (Quest).

    query: [items, kv_heads, rows, head_dim]. bounds: see `page_bounds`.

    Return [items, kv_heads, rows, pages * times]: each bound is repeated `times` times.
    """
    either = torch.cat([query.clamp_max(0), query.clamp_min(0)], -1).to(bounds.dtype)
    pages = bounds.shape[-2]
    if missing := -pages % KEY_MULTIPLE:  # a GEMM over whole vectors always rounds in one way
        bounds = F.pad(bounds, (0, 0, 0, missing))
    scores = (either @ bounds.transpose(-1, -2))[..., :pages].to(query.dtype)
    return scores if times == 1 else scores.repeat_interleave(times, -1)


def quantise_bounds(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise page bounds to 4 bits each, rounding outwards.

    The scale of a dimension is the range of its bounds over all pages, in `_STEPS` steps.
    bounds: [..., pages, 2 * head_dim].

    Return bytes [..., pages, head_dim], each with a minimum and a maximum, and the lowest value
    and step length of each dimension [..., 2, 2 * head_dim].
    """
    bounds = bounds.to(torch.promote_types(bounds.dtype, torch.float32))
    low = bounds.amin(-2, keepdim=True)
    step = (bounds.amax(-2, keepdim=True) - low) / _STEPS
    step = step.clamp_min(torch.finfo(bounds.dtype).tiny)
    least, most = ((bounds - low) / step).chunk(2, -1)
    down, up = (e.clamp(0, _STEPS).to(torch.uint8) for e in (least.floor(), most.ceil()))
    return up << 4 | down, torch.cat([low, step], -2)


def dequantise_bounds(both: Tensor, scale: Tensor) -> Tensor:
    """Dequantise the two results of `quantise_bounds` to bounds [..., pages, 2 * head_dim]."""
    low, step = scale.split(1, -2)
    bounds: Tensor = low + step * torch.cat([both & _STEPS, both >> 4], -1)
    return bounds


class _Keys(LayerSource):
    """Layer source of keys alone: [entry, kv_head, token, head_dim] for each layer."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._data = torch.stack([_keys_of(store, each, num_tokens) for each in entries], 1)

    def layer(self, number: int) -> Tensor:
        return self._data[number]


class _Pages(LayerSource):
    """Layer source of page bounds alone: [entry, kv_head, page, 2 * head_dim] for each layer.

    Quest's bounds are kept in full precision, others in 4 bits. A segment's bounds depend on its
    own tokens only.
    """

    def __init__(
        self, page: int, store: SegmentStore, entries: Sequence[Entry], num_tokens: int
    ) -> None:
        held, scales = list[Tensor](), list[Tensor]()
        for entry in entries:
            whole = round_up(entry.num_tokens, page)
            keys = _keys_of(store, entry, whole)
            seen = torch.arange(whole, device=keys.device) < entry.num_tokens
            bounds = page_bounds(keys, seen, page)
            if page == PAGE:
                bounds, scale = quantise_bounds(bounds)
                scales.append(scale)
            num_pages = round_up(num_tokens // page, KEY_MULTIPLE)
            held.append(F.pad(bounds, (0, 0, 0, num_pages - whole // page)))
        self._held = torch.stack(held, 1)
        self._scales = torch.stack(scales, 1) if scales else None

    def layer(self, number: int) -> Tensor:
        held = self._held[number]
        return held if self._scales is None else dequantise_bounds(held, self._scales[number])


def _keys_of(store: SegmentStore, entry: Entry, num_tokens: int) -> Tensor:
    """Return keys [layers, kv_heads, num_tokens, head_dim], padded with zeros to `num_tokens`."""
    part = entry.parts[0]
    keys = store.keys_of(part.segment, part.visible).transpose(1, 2)
    return F.pad(keys, (0, 0, 0, num_tokens - part.visible))


@dataclass(frozen=True)
class SelectionPass:
    """A decode iteration for which tokens are selected: one token of every row.

    seen: number of tokens that each row sees, this one included [rows].
    places: this token's index in each row's tail [rows]. The tail may not contain it yet.
    num_places: the largest of `places`, plus one.
    classes: the indices of rows by the number of tokens that these rows select.
    masks: results of `Selector._masks` for each class, computed once for all layers.
    """

    seen: Tensor
    places: Tensor
    num_places: int
    classes: Mapping[int, Tensor]
    masks: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


class Selector:
    """Selector of tokens for a batch of rows with the given paths.

    Tokens are selected for sets of heads: for each KV head, or for each query head if the rule says
    so. First, units are scored. A unit is one token, or a page of `_unit` tokens. In the best
    pages, single keys are scored afterwards.
    """

    def __init__(
        self, rule: SparseRule, store: SegmentStore, paths: Sequence[Path], tail: Tail
    ) -> None:
        self._rule, self._store, self._tail = rule, store, tail
        self._kv_heads, self._pages = store.pool.layout.num_kv_heads, rule.how.scores != "keys"
        self._unit = rule.how.page if rule.how.scores == "both" else 1
        self._home = store.pool.storage.device  # the device on which keys are scored
        lengths = [sum(part.visible for part in path) for path in paths]
        self._num_columns = round_up(max(lengths), _COLUMN_MULTIPLE)
        self._stored = torch.tensor(lengths, device=store.compute_device)
        hold = cast("Hold", partial(_Pages, rule.how.page) if self._pages else _Keys)
        self._shared = SharedSegments(store, paths, hold)
        self._queries = [self._shared.query_index(rows, 1) for rows in self._shared.slots.rows]
        self._locate(paths)

    def close(self) -> None:
        """Release the packed copies of the segments."""
        self._shared.close()

    def _locate(self, paths: Sequence[Path]) -> None:
        """Build the indices from scores and tokens of the shared segments to those of each row.

        `_sources` and `_places` map scores of all buckets to [row, unit]. `_in_pool` is each
        column's slot in the pool. `_columns` [rows, units * unit] has the columns of each unit,
        and -1 where a page is not full.
        """
        starts, total, unit = list[int](), 0, self._unit
        for bucket, rows in zip(self._shared.buckets, self._shared.slots.rows, strict=True):
            (items, slots), units = rows.shape, bucket.mask.shape[-1] // unit
            starts += [total + slot * units for slot in range(items * slots)]
            total += items * slots * units
        sizes = [[-(-part.visible // unit) for part in path] for path in paths]
        self._num_units = round_up(max(map(sum, sizes)), _COLUMN_MULTIPLE)
        sources, places = [], []
        in_pool = torch.zeros(len(paths), self._num_columns, dtype=torch.long)
        columns = torch.full((len(paths), self._num_units * unit), -1)
        for row, (path, slots_of) in enumerate(zip(paths, self._shared.slots.parts, strict=True)):
            at = begin = 0
            for part, slot, size in zip(path, slots_of, sizes[row], strict=False):
                sources.append(torch.arange(starts[slot], starts[slot] + size))
                places.append(row * self._num_units + torch.arange(begin, begin + size))
                own = torch.arange(at, at + part.visible)
                in_pool[row, own] = self._store.slots_of(part.segment, 0, part.visible)
                columns[row, begin * unit : begin * unit + part.visible] = own
                at, begin = at + part.visible, begin + size
        self._sources = torch.cat(sources).to(self._home)
        self._places = torch.cat(places).to(self._home)
        self._in_pool = in_pool.to(self._store.compute_device)
        self._columns = columns.to(self._store.compute_device)

    def slots(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the slots of these columns in the pool, for `SegmentStore.read`.

        Columns of the tail are not in the pool. They get the slot of another token of the row.
        """
        at = columns.masked_fill(columns >= self._num_columns, 0)
        return self._in_pool[rows].unsqueeze(1).expand(-1, at.shape[1], -1).gather(2, at)

    # --- scores ------------------------------------------------------------------------------

    def scores(self, token: SelectionPass, layer: int, guess: Tensor, foreseen: Tensor) -> Tensor:
        """Return the scores [rows, sets, group, units] of all units; -inf where a row has no token.

        A page's score is the upper bound on the scores of its keys.

        guess: queries [rows, heads, head_dim], true or estimated.
        foreseen: mask [rows] of rows with an estimated query. For these the token's own key is not
            scored, since it is not known when the query is estimated.
        """
        keys, _ = self._tail.read(layer)
        grouped = guess.unflatten(1, (self._kv_heads, -1))
        places = torch.arange(keys.shape[2], device=keys.device)
        unseen = places > (token.places - foreseen.long())[:, None]
        if self._pages:
            page = self._rule.how.page
            own = score_bounds(
                grouped, page_bounds(keys, ~unseen[:, None], page), page // self._unit
            )
            unseen = unseen[:, :: self._unit]
        else:
            own = grouped @ keys.transpose(-1, -2)
        own = (own * guess.shape[-1] ** -0.5).masked_fill(unseen[:, None, None], -torch.inf)
        missing = self._num_own(token) // self._unit - own.shape[-1]
        own = F.pad(own, (0, missing), value=-torch.inf)
        scores = torch.cat([self._stored_scores(layer, guess), own], -1)
        return scores if self._rule.how.each == "kv" else scores.flatten(1, 2).unsqueeze(2)

    def _stored_scores(self, layer: int, query: Tensor) -> Tensor:
        rows, heads, head_dim = query.shape
        kv_heads = self._kv_heads
        group = heads // kv_heads
        flat = query.reshape(rows * kv_heads, group * head_dim).to(self._home)
        scores_by_bucket = []
        for bucket, (index, real) in zip(self._shared.buckets, self._queries, strict=True):
            chosen = flat.index_select(0, index.to(self._home))
            queries = chosen.view(len(bucket.mask), kv_heads, -1, head_dim)
            held = bucket.layers.layer(layer)
            if self._pages:
                scored = score_bounds(queries, held, self._rule.how.page // self._unit)
            else:
                scored = queries @ held.transpose(-1, -2)
            scored = scored[:, :, : real * group, : bucket.mask.shape[-1] // self._unit]
            scored = scored.unflatten(2, (real, group))
            # [item, slot, unit, kv_head * group]: scores that move together are contiguous.
            scores_by_bucket.append(scored.permute(0, 2, 4, 1, 3).reshape(-1, heads))
        out = flat.new_full((rows * self._num_units, heads), -torch.inf)
        picked = torch.cat(scores_by_bucket).index_select(0, self._sources)
        out.index_copy_(0, self._places, picked * head_dim**-0.5)
        scores = out.view(rows, self._num_units, kv_heads, group).permute(0, 2, 3, 1)
        return scores.to(query.device)

    # --- selections --------------------------------------------------------------------------

    def select(
        self, token: SelectionPass, layer: int, count: int, guess: Tensor, scores: Tensor,
        foreseen: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Select `count` tokens for each row of the class that selects that number.

        guess, scores, foreseen: see `scores`; they contain all rows.

        Return columns [rows, sets, count], and the log-sum-exp of the scores of all tokens that
        were not selected [rows, sets, group]. Pages whose keys were not scored enter the sum with
        their upper bound. The log-sum-exp is None if queries are estimated.
        """
        rows = token.classes[count]
        query, scores, foreseen = guess[rows], scores[rows], foreseen[rows]
        if count not in token.masks:
            token.masks[count] = self._masks(token, rows)
        columns, seen, forced = token.masks[count]
        if self._unit == 1:
            chosen = top_columns(probabilities(scores), seen[..., 0], forced[..., 0], count)
            return chosen, self._rest(scores, chosen)
        most = min(CANDIDATES * count // self._unit, scores.shape[-1])
        units = top_columns(probabilities(scores), seen.any(-1), forced.any(-1), most)
        some = torch.arange(len(rows), device=rows.device)[:, None, None], 0, units
        columns, seen, forced = (each[some].flatten(2) for each in (columns, seen, forced))
        newest = (self._num_columns + token.places[rows])[:, None, None]
        known = seen & ~((columns == newest) & foreseen[:, None, None])
        keys = self._scores_of(layer, rows, query, columns, known)
        seen, forced = (F.pad(e, (0, keys.shape[-1] - e.shape[-1])) for e in (seen, forced))
        chosen = top_columns(probabilities(keys), seen, forced, count)
        bound, rest = self._rest(scores, units), self._rest(keys, chosen)
        if bound is not None and rest is not None:
            rest = torch.logaddexp(bound + math.log(self._unit), rest)
        return columns.gather(2, chosen), rest

    def _rest(self, scores: Tensor, chosen: Tensor) -> Tensor | None:
        """Return the log-sum-exp [rows, sets, group] of all scores except those of `chosen`.

        Return None if queries are estimated. chosen: units [rows, sets, count].
        """
        if self._rule.how.query != "own":
            return None
        taken = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter_(2, chosen, value=True)
        return scores.masked_fill(taken.unsqueeze(2), -torch.inf).logsumexp(-1)

    def _num_own(self, token: SelectionPass) -> int:
        """Return the number of columns for tail tokens, the token that is planned next included."""
        most = max(self._tail.num_tokens, token.num_places)
        return round_up(most, _COLUMN_MULTIPLE * self._unit)

    def _masks(self, token: SelectionPass, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the columns of each unit, a mask of visible ones, and a mask of forced ones.

        Each is [rows, 1, units, unit]. Rows always select their first and their newest tokens.
        """
        last = self._num_columns + self._num_own(token)
        own = torch.arange(self._num_columns, last, device=rows.device)
        columns = torch.cat([self._columns[rows], own.expand(len(rows), -1)], 1)
        stored, visible = self._stored[rows][:, None], token.seen[rows][:, None]
        behind = columns - self._num_columns
        positions = torch.where(behind >= 0, behind + stored, columns)
        seen = (columns >= 0) & (positions < visible)
        forced = seen & ((positions < SINKS) | (positions >= visible - RECENT))
        parts = columns.clamp_min(0), seen, forced
        columns, seen, forced = (e.unflatten(1, (1, -1, self._unit)) for e in parts)
        return columns, seen, forced

    def _scores_of(
        self, layer: int, rows: Tensor, query: Tensor, columns: Tensor, known: Tensor
    ) -> Tensor:
        """Return the scores of single keys [rows, sets, group, columns + padding].

        columns: [rows, sets, count], the columns whose keys are scored.
        known: mask like `columns`; the score is -inf where it is false.
        """
        # Keys are scored on the device that stores them, so that none crosses the link.
        stored = self._store.read(layer, self.slots(rows, columns), slice(1))
        own, at = self._tail.read(layer)[0][rows].to(self._home), columns.to(self._home)
        (keys,) = self.fill_tail_columns(at, stored, [own])
        missing = -columns.shape[-1] % _COLUMN_MULTIPLE
        grouped = query.to(self._home).unflatten(1, (keys.shape[1], -1))
        scores: Tensor = grouped @ F.pad(keys, (0, 0, 0, missing)).transpose(-1, -2)
        scores = (scores * query.shape[-1] ** -0.5).to(query.device)
        hidden = ~F.pad(known, (0, missing))
        return scores.masked_fill_(hidden.unsqueeze(2), -torch.inf)

    def fill_tail_columns(
        self, columns: Tensor, stored: Tensor, own: Iterable[Tensor]
    ) -> list[Tensor]:
        """Replace stored keys, or keys and values, by the tail's in columns of the tail.

        columns: [rows, sets, count].
        stored: [..., rows, sets, count, head_dim].
        own: keys, or keys and values, of the tail [rows, kv_heads, tokens, head_dim].
        """
        if (group := columns.shape[1] // self._kv_heads) > 1:
            own = [mine.repeat_interleave(group, 1) for mine in own]
        at = columns - self._num_columns
        is_own = (at >= 0).unsqueeze(-1)
        at = at.clamp(0, self._tail.num_tokens - 1).unsqueeze(-1)
        at = at.expand(-1, -1, -1, stored.shape[-1])
        pairs = zip(own, stored, strict=True)
        return [torch.where(is_own, mine.gather(2, at), old) for mine, old in pairs]
