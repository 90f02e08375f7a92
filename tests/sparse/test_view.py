"""Rows that select their tokens, against a row at a time in plain products."""

import math
import random
from dataclasses import replace

import pytest
import torch

from beamwright.attention.tree import TreeAttention
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.segments import PathPart
from beamwright.kv.store import SegmentStore
from beamwright.sparse.index import bounded, page_bounds
from beamwright.sparse.rank import CacheRank
from beamwright.sparse.rule import (
    CANDIDATES,
    METHODS,
    PAGE,
    PREDICTORS,
    RECENT,
    SINKS,
    Rotary,
    SparseRule,
)
from beamwright.sparse.select import choose
from beamwright.sparse.view import SparseDecode

LAYERS, KV_HEADS, GROUP, DIM, TOKENS = 2, 2, 2, 16, 20
HEADS = KV_HEADS * GROUP
LAYOUT = KVLayout(LAYERS, KV_HEADS, DIM, torch.float64)
NOT_TURNED = Rotary(torch.empty(0), torch.empty(0))
RULE = SparseRule("exact", select=24, first=0)


def turning():
    """Tables as a decoder has them."""
    angles = torch.outer(torch.arange(256.0), 1e3 ** -(torch.arange(DIM // 2) / DIM * 2)).double()
    cos, sin = angles.cos(), angles.sin()
    return Rotary(torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1))


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


class LateRank(CacheRank):
    """Has nothing for these (token, layer)."""

    token = 0

    def __init__(self, late):
        super().__init__()
        self.late = late

    def is_late(self, layer):
        return (self.token, layer) in self.late


def decoded(batch, rule, rotary=NOT_TURNED, num_tokens=TOKENS, late=()):
    """Contexts [token][layer] of a batch."""
    tail, rank = batch.tail(), LateRank(late)
    view = SparseDecode(rule, rotary, rank, batch.store, batch.paths, tail)
    view.own(batch.own)
    found = []
    for token in range(num_tokens):
        contexts, rank.token = [], token
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

    def __init__(self, rule, rotary, keys, row, late=()):
        self.late, self.last = late, {}
        self.rule, self.rotary, self.row = rule, rotary, row
        self.stored, self.all = len(keys), keys
        self.queries = {layer: [] for layer in range(LAYERS)}
        self.left = {layer: None for layer in range(LAYERS)}

    def token(self, token, layer, fresh):
        """The context [heads, dim] of a token."""
        rule, how = self.rule, self.rule.how
        if layer == 0:
            self.all = torch.cat([self.all, fresh.unsqueeze(0)])
        self.all[-1, layer] = fresh[layer]
        query = drawn(token, layer, "query")[self.row]
        keys, values = self.all[:, layer, 0], self.all[:, layer, 1]
        seen = len(keys)
        out = torch.zeros(HEADS, DIM, dtype=LAYOUT.dtype)
        selected = [range(seen)] * KV_HEADS
        if rule.is_sparse(seen) and layer >= rule.full_layers:
            guess, foreseen = self._guess(token, layer, query, seen)
            if (token, layer) in self.late and layer in self.last:
                oldest = seen - 1 - RECENT
                selected = [(each - {oldest}) | {seen - 1} for each in self.last[layer]]
            else:
                selected = self._selected(layer, guess, foreseen, keys, seen)
            self.last[layer] = selected
        for head in range(HEADS):
            at = sorted(selected[head // GROUP])
            scores = keys[at, head // GROUP] @ query[head] / math.sqrt(DIM)
            out[head] = scores.softmax(-1) @ values[at, head // GROUP]
        if how.query in PREDICTORS:
            values = query[None]
            if rule.frame == "pre":
                values = self.rotary.turn_back(values, torch.tensor([seen - 1]))
            self.queries[layer].append(values[0])
        return out

    def _guess(self, token, layer, query, seen):
        how, rule, guess = self.rule.how.query, self.rule, None
        known = self.queries[layer][: len(self.queries[layer]) - (rule.lag - 1)]
        if how == "ahead" and layer:
            guess = drawn(token, layer, "ahead")[self.row]
        elif how in PREDICTORS and known:
            window = torch.stack(known[-(rule.window + 1) :], 1)
            guess = PREDICTORS[how](window)
            if rule.frame == "pre":
                guess = self.rotary.turn(guess[None], torch.tensor([seen - 1]))[0]
        if guess is None:
            return query, False
        if rule.correct is None:
            return guess, True
        near = torch.cosine_similarity(guess, query, -1).view(KV_HEADS, GROUP).mean(-1)
        keep = (near >= rule.correct).repeat_interleave(GROUP)[:, None]
        return torch.where(keep, guess, query), True

    def _selected(self, layer, guess, foreseen, keys, seen):
        rule, budget = self.rule, self.rule.budget(seen)
        newest = set(range(seen - RECENT, seen))
        found = []
        for head in range(KV_HEADS):
            if rule.method == "window":
                found.append({*range(SINKS), *range(seen - (budget - SINKS), seen)})
                continue
            forced = {*range(SINKS), *newest}
            everything = set(range(seen))
            if rule.how.evicts:
                before = self.left[layer]
                left = everything if before is None else before[head] | {seen - 1}
                found.append(self._best(self._shares(guess, keys, head, left), set(), budget))
                continue
            known = everything - ({seen - 1} if foreseen else set())
            if rule.how.scores == "keys":
                shares = self._shares(guess, keys, head, known)
                shares.setdefault(seen - 1, 0.0)
            else:
                shares = self._page_shares(guess, keys, head, len(known))
                shares.setdefault(seen - 1, 0.0)
            if rule.how.scores == "both":
                some = self._best(shares, forced, min(CANDIDATES * budget, seen))
                shares = self._shares(guess, keys, head, some & known)
                shares.setdefault(seen - 1, 0.0)
            found.append(self._best(shares, forced, budget))
        if rule.how.evicts:
            self.left[layer] = found
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
    replace(RULE, method="asyncspade", frame="pre", window=4, lag=2),
    replace(RULE, method="last", frame="pre", correct=0.1),
    replace(RULE, method="ahead", correct=0.1),
]


def check_by_hand(rule, late=()):
    batch, rotary = Batch(), turning()
    found = decoded(batch, rule, rotary, late=late)
    for row, keys in enumerate(batch.keys):
        oracle = Oracle(rule, rotary, keys, row, late)
        ends, at = [], 0
        for part in batch.paths[row]:
            at += part.visible
            ends.append(at)
        oracle.ends = ends
        for token in range(TOKENS):
            fresh = torch.stack([drawn(token, layer, "key_value")[row] for layer in range(LAYERS)])
            for layer in range(LAYERS):
                expected = oracle.token(token, layer, fresh)
                torch.testing.assert_close(found[token][layer][row], expected)
    assert batch.store.counts.sparse_tokens > 0


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.method}-{rule.select}")
def test_each_row_attends_to_what_it_selects_by_hand(rule):
    check_by_hand(rule)


@pytest.mark.parametrize("method", ["ahead", "ahead-pages", "asyncspade"])
def test_late_rows_attend_to_what_the_token_before_did_and_their_own(method):
    late = {(0, 1), (3, 0), *((token, 1) for token in range(4, 19))}
    check_by_hand(replace(RULE, method=method, late="previous"), late)


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
    decoded(predicted, replace(RULE, method="last"))
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
    seen = torch.tensor([[True, True, True, True, False]])
    forced = torch.tensor([[True, False, False, False, False]])
    assert choose(wanted, seen, forced, 3).tolist() == [[[0, 1, 3]]]


def test_turning_back_undoes_turning():
    rotary, values = turning(), torch.randn(5, HEADS, DIM, dtype=torch.float64)
    at = torch.tensor([0, 3, 9, 100, 255])
    torch.testing.assert_close(rotary.turn_back(rotary.turn(values, at), at), values)


def test_rows_that_have_stopped_may_stand_behind_the_context():
    rotary, values = turning(), torch.randn(2, HEADS, DIM, dtype=torch.float64)
    at, end = torch.tensor([7, 256]), torch.tensor([7, 255])
    assert torch.equal(rotary.turn(values, at), rotary.turn(values, end))
    assert torch.equal(rotary.turn_back(values, at), rotary.turn_back(values, end))
