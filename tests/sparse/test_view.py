"""Rows that select their tokens, against a row at a time in plain products."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from beamwright.attention.parts import attend_few
from beamwright.counters import Counters
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.segments import PathPart
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import RowTails
from beamwright.plan.sparse import RECENT, SINKS
from beamwright.sparse.predict import predict_query, weigh
from beamwright.sparse.rank import SelectionQueue
from beamwright.sparse.rule import CANDIDATES, METHODS, SparseRule
from beamwright.sparse.select import (
    dequantise_bounds,
    page_bounds,
    quantise_bounds,
    score_bounds,
)
from beamwright.sparse.view import SparseDecode

LAYERS, KV_HEADS, GROUP, DIM, TOKENS = 2, 2, 2, 16, 20
HEADS = KV_HEADS * GROUP
LAYOUT = KVLayout(LAYERS, KV_HEADS, DIM, torch.float64)
RULE = SparseRule("exact", select=24, first=0)


class Batch:
    """Eight rows behind shared and own segments, with what each has been given so far."""

    def __init__(self, seed=0, lengths=(40, 13, 5, 70)):
        torch.manual_seed(seed)
        self.store = SegmentStore(BlockPool([LAYOUT], ByteBudget(2**22)))
        self.held = {}
        root, *others = (self._segment(n) for n in lengths)
        rng = random.Random(seed)
        self.paths = [
            tuple(PathPart(s, s.length) for s in (root, *rng.sample(others, rng.randrange(4))))
            for _ in range(8)
        ]
        self.own = [self.store.create() for _ in self.paths]
        self.keys = [
            torch.cat([self.held[part.segment] for part in path]) for path in self.paths
        ]  # [tokens, layers, 2, kv_heads, dim]

    def _segment(self, length):
        segment = self.store.create()
        values = torch.randn(length, LAYERS, 2, KV_HEADS, DIM, dtype=LAYOUT.dtype)
        self.store.append([segment], [values])
        self.held[segment] = values
        return segment

    def tail(self):
        tail = RowTails(self.store, 64)
        tail.arrange([], 8)
        tail.set_lengths([0] * 8, TOKENS)
        return tail


def drawn(token, layer, what):
    """A token's queries, or its keys and values, the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * token + 10 * layer + len(what))
    shape = (8, 2, KV_HEADS, DIM) if what == "key_value" else (8, HEADS, DIM)
    scale = 1.0 if what == "key_value" else 2.0
    return scale * torch.randn(shape, generator=generator, dtype=LAYOUT.dtype)


def decoded(batch, rule, rank=None):
    """Contexts [token][layer] of a batch."""
    tail, rank = batch.tail(), rank or SelectionQueue(batch.store.counts)
    view = SparseDecode(rule, rank, batch.store, batch.paths, tail)
    view.bind_segments(batch.own)
    found = []
    for token in range(TOKENS):
        contexts = []
        for layer in range(LAYERS):
            query = drawn(token, layer, "query")
            if view.looks_ahead and layer + 1 < LAYERS:  # as a decoder does
                view.foresee(layer + 1, drawn(token, layer + 1, "ahead"))
            contexts.append(view.attend(layer, query, drawn(token, layer, "key_value")))
        found.append(contexts)
        tail.advance()
    view.close()
    return found


def four_bits(values, rounded):
    """Bounds [pages, dim] of one segment, in fifteen steps of each dimension, outwards."""
    low = values.amin(0)
    step = (values.amax(0) - low).clamp_min(1e-300) / 15
    return low + step * rounded((values - low) / step).clamp(0, 15)


class Oracle:
    """One row, everything by hand."""

    def __init__(self, rule, keys, row, ends):
        self.rule, self.row, self.all, self.ends = rule, row, keys, ends
        self.queries = {layer: [] for layer in range(LAYERS)}
        self.sets = HEADS if rule.how.each == "query" else KV_HEADS
        self.group = HEADS // self.sets

    def token(self, token, layer, fresh):
        """The context [heads, dim] of a token."""
        rule = self.rule
        if layer == 0:
            self.all = torch.cat([self.all, fresh.unsqueeze(0)])
        self.all[-1, layer] = fresh[layer]
        query = drawn(token, layer, "query")[self.row]
        keys, values = self.all[:, layer, 0], self.all[:, layer, 1]
        seen = len(keys)
        out = torch.zeros(HEADS, DIM, dtype=LAYOUT.dtype)
        selected = [range(seen)] * self.sets
        if rule.is_sparse(seen) and layer >= rule.full_layers:
            if rule.leader(layer) == layer:
                guess, foreseen = self._guess(token, layer, query)
                self.last = self._selected(guess, foreseen, keys, seen)
            selected = self.last
        for head in range(HEADS):
            at = sorted(selected[head // self.group])
            scores = keys[at, head // GROUP] @ query[head] / math.sqrt(DIM)
            out[head] = scores.softmax(-1) @ values[at, head // GROUP]
        self.queries[layer].append(query)
        return out

    def _guess(self, token, layer, query):
        how, rule, guess = self.rule.how.query, self.rule, None
        known = self.queries[layer]
        if how == "ahead" and layer:
            guess = drawn(token, layer, "ahead")[self.row]
        elif how == "predicted" and known:
            guess = predict_query(torch.stack(known[-17:], 1), rule.how.weigh or weigh)
        if guess is None:
            return query, False
        if rule.correct is None:
            return guess, True
        near = torch.cosine_similarity(guess, query, -1).view(self.sets, -1).mean(-1)
        keep = (near >= rule.correct).repeat_interleave(self.group)[:, None]
        return torch.where(keep, guess, query), True

    def _selected(self, guess, foreseen, keys, seen):
        rule, budget = self.rule, self.rule.budget(seen)
        forced = {*range(SINKS), *range(seen - RECENT, seen)}
        known = set(range(seen)) - ({seen - 1} if foreseen else set())
        found = []
        for head in range(self.sets):
            if rule.how.scores == "keys":
                shares = self._shares(guess, keys, head, known)
            elif rule.how.scores == "pages":
                shares = self._page_shares(guess, keys, head, len(known))
            else:
                # A page by its first token: the best ones, then their keys.
                pages, shares = self._pages(seen), self._page_shares(guess, keys, head, len(known))
                of_pages = {first: shares.get(first, 0.0) for first in pages}
                sure = {first for first, page in pages.items() if forced & {*page}}
                best = self._best(of_pages, sure, CANDIDATES * budget // rule.how.page)
                some = {at for first in best for at in pages[first]}
                shares = self._shares(guess, keys, head, some & known)
            shares.setdefault(seen - 1, 0.0)
            found.append(self._best(shares, forced, budget))
        return found

    def _softmaxed(self, scores, left):
        """By position; scores [group, tokens]."""
        masked = torch.full_like(scores, -torch.inf)
        masked[:, sorted(left)] = scores[:, sorted(left)]
        shares = masked.float().softmax(-1).mean(0)
        return {position: float(shares[position]) for position in left}

    def _shares(self, query, keys, head, left):
        mine = query[head * self.group : (head + 1) * self.group]
        return self._softmaxed(mine @ keys[:, self._kv(head)].T / math.sqrt(DIM), left)

    def _kv(self, head):
        """The KV head of a set."""
        return head * KV_HEADS // self.sets

    def _pages(self, seen):
        """Positions, by the first one."""
        ends, size = [*self.ends, seen], self.rule.how.page
        return {
            start: range(start, min(start + size, end))
            for first, end in zip([0, *self.ends], ends, strict=True)
            for start in range(first, end, size)
        }

    def _page_shares(self, query, keys, head, seen):
        """Pages begin with each segment, and with the tail."""
        scores = torch.zeros(self.group, seen, dtype=LAYOUT.dtype)
        ends, size = [*self.ends, seen], self.rule.how.page
        for first, end in zip([0, *self.ends], ends, strict=True):
            starts = range(first, end, size)
            pages = [keys[start : min(start + size, end), self._kv(head)] for start in starts]
            if not pages:
                continue
            least, most = (torch.stack([getattr(p, f)(0) for p in pages]) for f in ("amin", "amax"))
            if end in self.ends and self.rule.how.scores == "both":
                least, most = four_bits(least, torch.floor), four_bits(most, torch.ceil)
            for start, low, high in zip(starts, least, most, strict=True):
                for member in range(self.group):
                    mine = query[head * self.group + member]
                    bound = torch.maximum(mine * low, mine * high).sum()
                    scores[member, start : min(start + size, end)] = bound / math.sqrt(DIM)
        pages = self.rule.how.scores == "both"  # a page counts once
        return self._softmaxed(scores, {*self._pages(seen)} if pages else set(range(seen)))

    @staticmethod
    def _best(shares, forced, count):
        order = sorted(shares, key=lambda at: (at in forced, shares[at], at), reverse=True)
        return set(order[:count])


RULES = [
    *(replace(RULE, method=name) for name in METHODS),
    replace(RULE, full_layers=1),
    replace(RULE, select=0.25),
    replace(RULE, first=80),
    replace(RULE, method="asyncspade", correct=0.1),
    replace(RULE, method="ahead", correct=0.1),
    replace(RULE, method="exact,each=query"),
    replace(RULE, method="pages,each=query"),
    replace(RULE, method="exact,share=2"),
    replace(RULE, method="asyncspade,pack=2"),
    replace(RULE, method="asyncspade,pack=2,each=query", correct=0.1),
    replace(RULE, method="asyncspade,share=2", correct=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.method}-{rule.select}")
def test_each_row_attends_to_what_it_selects_by_hand(rule):
    batch = Batch()
    found = decoded(batch, rule)
    for row, keys in [*enumerate(batch.keys)][::2]:  # an oracle in plain numbers takes its time
        ends = [*accumulate(part.visible for part in batch.paths[row])]
        oracle = Oracle(rule, keys, row, ends)
        for token in range(TOKENS):
            fresh = torch.stack([drawn(token, layer, "key_value")[row] for layer in range(LAYERS)])
            for layer in range(LAYERS):
                expected = oracle.token(token, layer, fresh)
                torch.testing.assert_close(found[token][layer][row], expected)
    assert batch.store.counts.sparse_tokens > 0


@pytest.mark.parametrize("given", [0, 3])
def test_a_window_that_goes_on_ends_where_its_step_does(given):
    """What was forwarded behind its end is forgotten; what it was given counts as its own."""
    batch, rule = Batch(), replace(RULE, method="asyncspade,window=path")
    for each in batch.own if given else ():
        values = torch.randn(given, LAYERS, 2, KV_HEADS, DIM, dtype=LAYOUT.dtype)
        batch.store.append([each], [values])
    decoded(batch, rule)
    ended = [
        (*path, PathPart(s, given + 6)) for path, s in zip(batch.paths, batch.own, strict=True)
    ]
    children = [batch.store.create() for _ in ended]
    rank = SelectionQueue(batch.store.counts)
    SparseDecode(rule, rank, batch.store, ended, batch.tail()).bind_segments(children)
    for child in children:
        for layer, known in child.attention_data.queries.items():
            assert len(known) == 6, layer


class SpiedRank(SelectionQueue):
    """Who is asked for what, in order."""

    def __init__(self):
        super().__init__(Counters())
        self.asked = []

    def push(self, layer, work):
        self.asked.append(("push", layer))
        super().push(layer, work)

    def take(self, layer):
        self.asked.append(("take", layer))
        return super().take(layer)


@pytest.mark.parametrize(
    ("method", "token"),
    [
        # Nothing is known before the first token. Behind each layer's queries follows what that
        # layer reads for the next token: a token's time before it is taken.
        ("asyncspade", [("take", 0), ("push", 0), ("take", 1), ("push", 1)]),
        ("asyncspade,pack=2", [("take", 0), ("push", 0)]),
        ("ahead", [("push", 1), ("take", 0), ("take", 1)]),
    ],
)
def test_what_the_next_token_reads_is_pushed_behind_this_one_s_queries(method, token):
    rank = SpiedRank()
    decoded(Batch(), replace(RULE, method=method), rank=rank)
    assert rank.asked == token * TOKENS


def test_the_rest_is_what_the_scores_say():
    batch = Batch()
    decoded(batch, RULE)
    counts = batch.store.counts
    exact = counts.left_out / counts.sparse_heads
    assert 0.0 < exact < 0.9
    more = Batch()
    decoded(more, replace(RULE, method="quest"))
    counts = more.store.counts
    assert exact < counts.left_out / counts.sparse_heads <= 1.0, "a bound, of worse tokens"
    predicted = Batch()
    counts = predicted.store.counts
    decoded(predicted, replace(RULE, method="asyncspade"), SelectionQueue(counts, threaded=True))
    assert counts.sparse_heads == 0, "nothing is claimed"
    assert counts.rank_takes == LAYERS * (TOKENS - 1), "the first token selects by its own query"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_are_above_every_key_of_a_page(dtype):
    torch.manual_seed(0)
    keys, query = torch.randn(3, 2, 48, 8).to(dtype), torch.randn(3, 2, 5, 8)
    seen = torch.arange(48) < torch.tensor([48, 20, 3])[:, None]
    exact, sees = query @ keys.float().transpose(-1, -2), seen[:, None, None]
    for page in (4, 16):
        bounds = page_bounds(keys, seen[:, None], page)
        both, scale = quantise_bounds(bounds)
        assert both.dtype == torch.uint8
        assert 2 * both.numel() == bounds.numel(), "one byte for two"
        for held in (bounds.float(), dequantise_bounds(both, scale)):
            most = score_bounds(query, held, page)
            assert bool((most >= exact - 1e-5)[sees.expand_as(exact)].all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_selected_tokens_of_16_bits_are_attended_to_without_a_mask(dtype):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 2, n, 16, generator=generator).to(dtype) for n in (4, 24, 24)]
    context, _ = attend_few(*parts, None)
    expected = torch.nn.functional.scaled_dot_product_attention(*(each.double() for each in parts))
    assert context.dtype == dtype
    assert (context - expected).abs().max() < 2e-2
