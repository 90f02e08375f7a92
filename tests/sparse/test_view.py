"""Rows that select their tokens, against a row at a time in plain products."""

import math
import random
import threading
from dataclasses import replace
from itertools import accumulate, chain

import pytest
import torch

from beamwright.attention.tree import TreeAttention
from beamwright.counters import Counters
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.segments import PathPart
from beamwright.kv.store import SegmentStore
from beamwright.sparse.rule import (
    CANDIDATES,
    METHODS,
    PAGE,
    RECENT,
    SINKS,
    SparseRule,
    asyncspade,
)
from beamwright.sparse.select import bounded, choose, page_bounds
from beamwright.sparse.view import CacheRank, SparseDecode

LAYERS, KV_HEADS, GROUP, DIM, TOKENS = 2, 2, 2, 16, 20
HEADS = KV_HEADS * GROUP
LAYOUT = KVLayout(LAYERS, KV_HEADS, DIM, torch.float64)
RULE = SparseRule("exact", select=24, first=0)


class Batch:
    """Eight rows behind shared and own segments, with what each has been given so far."""

    def __init__(self, seed=0, lengths=(40, 13, 5, 70)):
        torch.manual_seed(seed)
        self.store = SegmentStore(BlockPool(LAYOUT, ByteBudget(2**22)))
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
        tail = self.store.make_tail(64)
        tail.arrange([], 8)
        tail.begin([0] * 8, TOKENS)
        return tail


def drawn(token, layer, what):
    """A token's queries, or its keys and values, the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * token + 10 * layer + len(what))
    shape = (8, 2, KV_HEADS, DIM) if what == "key_value" else (8, HEADS, DIM)
    scale = 1.0 if what == "key_value" else 2.0
    return scale * torch.randn(shape, generator=generator, dtype=LAYOUT.dtype)


def decoded(batch, rule, *, threaded=False):
    """Contexts [token][layer] of a batch."""
    tail, rank = batch.tail(), CacheRank(batch.store.counts, threaded=threaded)
    view = SparseDecode(rule, rank, batch.store, batch.paths, tail)
    view.own(batch.own)
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


class Oracle:
    """One row, everything by hand."""

    def __init__(self, rule, keys, row, ends):
        self.rule, self.row, self.all, self.ends = rule, row, keys, ends
        self.queries = {layer: [] for layer in range(LAYERS)}

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
        selected = [range(seen)] * KV_HEADS
        if rule.is_sparse(seen) and layer >= rule.full_layers:
            guess, foreseen = self._guess(token, layer, query)
            selected = self._selected(guess, foreseen, keys, seen)
        for head in range(HEADS):
            at = sorted(selected[head // GROUP])
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
            guess = asyncspade(torch.stack(known[-17:], 1), rule.how.reading)
        if guess is None:
            return query, False
        if rule.correct is None:
            return guess, True
        near = torch.cosine_similarity(guess, query, -1).view(KV_HEADS, GROUP).mean(-1)
        keep = (near >= rule.correct).repeat_interleave(GROUP)[:, None]
        return torch.where(keep, guess, query), True

    def _selected(self, guess, foreseen, keys, seen):
        rule, budget = self.rule, self.rule.budget(seen)
        forced = {*range(SINKS), *range(seen - RECENT, seen)}
        known = set(range(seen)) - ({seen - 1} if foreseen else set())
        found = []
        for head in range(KV_HEADS):
            if rule.how.scores == "keys":
                shares = self._shares(guess, keys, head, known)
            else:
                shares = self._page_shares(guess, keys, head, len(known))
            shares.setdefault(seen - 1, 0.0)
            if rule.how.scores == "both":
                some = self._best(shares, forced, min(CANDIDATES * budget, seen))
                shares = self._shares(guess, keys, head, some & known)
                shares.setdefault(seen - 1, 0.0)
            found.append(self._best(shares, forced, budget))
        return found

    def _softmaxed(self, scores, head, left):
        """By position; scores [group, tokens]."""
        masked = torch.full_like(scores, -torch.inf)
        masked[:, sorted(left)] = scores[:, sorted(left)]
        shares = masked.float().softmax(-1).mean(0)
        return {position: float(shares[position]) for position in left}

    def _shares(self, query, keys, head, left):
        mine = query[head * GROUP : (head + 1) * GROUP]
        return self._softmaxed(mine @ keys[:, head].T / math.sqrt(DIM), head, left)

    def _page_shares(self, query, keys, head, seen):
        """Pages begin with each segment, and with the tail."""
        scores = torch.zeros(GROUP, seen, dtype=LAYOUT.dtype)
        ends = [*self.ends, seen]
        for first, end in zip([0, *self.ends], ends, strict=True):
            for start in range(first, end, PAGE):
                page = keys[start : min(start + PAGE, end), head]
                for member in range(GROUP):
                    mine = query[head * GROUP + member]
                    most = torch.maximum(mine * page.amin(0), mine * page.amax(0)).sum()
                    scores[member, start : min(start + PAGE, end)] = most / math.sqrt(DIM)
        return self._softmaxed(scores, head, set(range(seen)))

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
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.method}-{rule.select}")
def test_each_row_attends_to_what_it_selects_by_hand(rule):
    batch = Batch()
    found = decoded(batch, rule)
    for row, keys in enumerate(batch.keys):
        ends = [*accumulate(part.visible for part in batch.paths[row])]
        oracle = Oracle(rule, keys, row, ends)
        for token in range(TOKENS):
            fresh = torch.stack([drawn(token, layer, "key_value")[row] for layer in range(LAYERS)])
            for layer in range(LAYERS):
                expected = oracle.token(token, layer, fresh)
                torch.testing.assert_close(found[token][layer][row], expected)
    assert batch.store.counts.sparse_tokens > 0


def test_a_rank_on_a_thread_finds_the_same_and_counts_what_was_waited_for():
    batch, rule = Batch(), replace(RULE, method="asyncspade")
    inline = decoded(batch, rule)
    batch = Batch()
    counts = batch.store.counts
    threaded = decoded(batch, rule, threaded=True)
    for one, other in zip(chain(*inline), chain(*threaded), strict=True):
        assert torch.equal(one, other)
    assert counts.rank_takes == LAYERS * (TOKENS - 1), "the first token selects by its own query"
    assert 0 <= counts.rank_late <= counts.rank_takes
    assert (counts.rank_late == 0) == (counts.rank_waited_s == 0.0)


def test_a_layer_waits_for_what_is_late():
    counts, gate = Counters(), threading.Event()
    rank = CacheRank(counts, threaded=True)
    rank.push(0, lambda: gate.wait(10) and "found")
    rank.push(0, lambda: pytest.fail("only the first counts"))
    threading.Timer(0.05, gate.set).start()
    assert rank.take(0) == "found"
    assert rank.take(0) is None
    assert (counts.rank_takes, counts.rank_late) == (1, 1)
    assert counts.rank_waited_s > 0
    rank.close()


def test_what_sees_few_tokens_has_the_bits_of_tree():
    batch = Batch()
    everything = decoded(batch, replace(RULE, first=10_000))
    tail = batch.tail()
    tree = TreeAttention().decode_view(batch.store, batch.paths, tail)
    for token in range(TOKENS):
        for layer in range(LAYERS):
            args = (drawn(token, layer, "query"), drawn(token, layer, "key_value"))
            assert torch.equal(everything[token][layer], tree.attend(layer, *args))
        tail.advance()
    assert batch.store.counts.sparse_tokens == 0


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
    decoded(predicted, replace(RULE, method="asyncspade"))
    assert predicted.store.counts.sparse_heads == 0, "nothing is claimed"


def test_bounds_are_above_every_key_of_a_page():
    torch.manual_seed(0)
    keys, query = torch.randn(3, 2, 48, 8), torch.randn(3, 2, 5, 8)
    seen = torch.arange(48) < torch.tensor([48, 20, 3])[:, None]
    most = bounded(query, *page_bounds(keys, seen))
    exact = query @ keys.transpose(-1, -2)
    assert bool((most >= exact - 1e-6)[seen[:, None, None].expand_as(exact)].all())


def test_of_equal_values_the_later_ones_are_chosen():
    wanted = torch.tensor([[[0.1, 0.5, 0.1, 0.1, 0.0]]])
    seen = torch.tensor([[[True, True, True, True, False]]])
    forced = torch.tensor([[[True, False, False, False, False]]])
    assert choose(wanted, seen, forced, 3).tolist() == [[[0, 1, 3]]]
