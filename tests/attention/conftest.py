"""Random trees of KV, and views over them that are driven like the decoder drives them."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.kv.codes import round_to_grid
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.segments import PathPart, truncate_path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import RowTails

ORACLE = "reference"


@dataclass
class Forest:
    """A store, and paths through it: deep, shallow, shared, cut inside a segment, repeated."""

    store: SegmentStore
    paths: list
    num_heads: int
    device: str = "cpu"
    drawn: dict = field(default_factory=dict)
    sinks: torch.Tensor | None = None

    @property
    def layout(self):
        return self.store.pool.layout

    def draw(self, seed, *size):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return drawn.to(self.device, self.layout.dtype)

    def decode(self, backend, rows, num_tokens, seed=0, keep=None, held=None):
        """Contexts [token][layer] of `rows` (in this order); keep: {token: positions kept}.

        backend: a name, or a backend. held: {row: tokens that it has decoded before}.
        """
        batch = Batch(self, backend, seed)
        batch.arrange([], rows, held)
        found = []
        for token in range(num_tokens):
            if keep and token in keep:
                batch.arrange(keep[token])
            found.append(batch.token())
        batch.close()
        return found

    def distance(self, backend, rows, num_tokens, lengths=(), num_padding=0, **how):
        """Largest difference from the reference: of decoded tokens, and of these chunks."""
        found, expected = (self.decode(each, rows, num_tokens, **how) for each in (backend, ORACLE))
        if lengths:
            found.append(map(torch.cat, self.prefill(backend, rows, lengths, num_padding)))
            expected.append(map(torch.cat, self.prefill(ORACLE, rows, lengths)))
        return largest_difference(found, expected)

    def assert_bits(self, backend, batches, num_tokens, lengths, held=None):
        """A row has the bits in any batch, decoded and prefilled, that it has in the whole one."""
        rows, layers = range(len(lengths)), range(self.layout.num_layers)
        whole = self.decode(backend, rows, num_tokens, held=held)
        filled = self.prefill(backend, rows, lengths)
        for batch in batches:
            part = self.decode(backend, batch, num_tokens, held=held)
            some = self.prefill(backend, batch, [lengths[row] for row in batch])
            for layer in layers:
                for token in range(num_tokens):
                    assert torch.equal(whole[token][layer][batch], part[token][layer])
                for place, row in enumerate(batch):
                    assert torch.equal(filled[layer][row], some[layer][place])

    def assert_joins(self, backend, arrangements, num_tokens, held):
        """Rows that are kept and rows that join, between any two tokens, have the bits of each
        alone."""
        rows = range(len(self.paths))
        alone = {row: self.decode(backend, [row], num_tokens, held=held) for row in rows}
        batch = Batch(self, backend)
        for kept, joining in arrangements:
            batch.arrange(kept, joining, held)
            before = list(batch.held)
            for layer, contexts in enumerate(batch.token()):
                for row, count, context in zip(batch.rows, before, contexts, strict=True):
                    expected = alone[row][count - held.get(row, 0)][layer][0]
                    assert torch.equal(context, expected)
        batch.close()

    def chain(self, *lengths, seed=0):
        """A path of new segments of so many tokens."""
        layout, path = self.layout, []
        for number, length in enumerate(lengths):
            segment = self.store.create()
            size = (length, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
            self.store.append([segment], [self.draw(100 * seed + number, *size)])
            path.append(PathPart(segment, length))
        return tuple(path)

    def _token(self, seed, token, layer):
        """What every path of the forest asks and stores for one token."""
        layout, place = self.layout, 1000 * (1000 * seed + token) + layer
        key = (place, len(self.paths))
        if key not in self.drawn:
            query = self.draw(place, len(self.paths), self.num_heads, layout.head_dim)
            sizes = (len(self.paths), 2, layout.num_kv_heads, layout.head_dim)
            key_value = self.draw(place + 500, *sizes)
            if layout.kept != "auto":  # as a decoder hands them over
                key_value = round_to_grid(key_value, layout.kept)
            self.drawn[key] = query, key_value
        return self.drawn[key]

    def prefill(self, backend, rows, lengths, num_padding=0):
        """Contexts [layer][row] of `lengths[i]` new tokens behind each row's path.

        backend: a name, or a backend.
        """
        layout = self.layout
        paths = [self.paths[row] for row in rows]
        attention = make_attention(backend) if isinstance(backend, str) else backend
        view = attention.prefill_view(self.store, paths, lengths)
        found = []
        for layer in range(layout.num_layers):
            queries, key_values = [], []
            for row, length in zip(rows, lengths, strict=True):
                place = 10_000 * row + layer
                queries.append(self.draw(place, 96, self.num_heads, layout.head_dim)[:length])
                sizes = (96, 2, layout.num_kv_heads, layout.head_dim)
                key_values.append(self.draw(place + 500, *sizes)[:length])
            if num_padding:
                queries.append(queries[0][:1].expand(num_padding, -1, -1))
                key_values.append(key_values[0][:1].expand(num_padding, -1, -1, -1))
            asked = torch.cat(queries), torch.cat(key_values)
            context = view.attend(layer, *asked, self.sinks)
            assert context.shape[0] == sum(lengths) + num_padding
            found.append(context[: sum(lengths)].split(lengths))
        view.close()
        return found


class Batch:
    """Rows of a forest that are decoded as a session does: tails of any lengths, rows that join.

    A row's n-th token is the same in every batch.
    """

    def __init__(self, forest, backend, seed=0):
        self.forest, self.seed = forest, seed
        self.attention = make_attention(backend) if isinstance(backend, str) else backend
        store = forest.store
        # The oracle sums whatever it is given: it is held against the longest tails.
        capacity = 256 if self.attention.name == "reference" else self.attention.tail_tokens
        self.in_blocks = self.attention.writes_blocks
        self.tail = self.attention.make_tail(store) if self.in_blocks else RowTails(store, capacity)
        self.rows, self.held, self.view, self.own = [], [], None, []

    def arrange(self, kept, joining=(), held=None):
        """Go on with the rows at these places, then with new ones; held: as in `Forest.decode`."""
        self.tail.arrange(kept, len(kept) + len(joining))
        fresh = [(held or {}).get(row, 0) for row in joining]
        self.rows = [*(self.rows[i] for i in kept), *joining]
        self.held = [*(self.held[i] for i in kept), *fresh]
        self.own = [self.own[i] for i in kept] if self.in_blocks else []
        for place, row in enumerate(joining, start=len(kept)):
            decoded = self.decoded(row, self.held[place])
            if self.in_blocks:
                self.own.append(self.forest.store.create())
                self.forest.store.append(self.own[-1:], [decoded.permute(2, 0, 1, 3, 4)])
            else:
                self.tail.restore(place, [decoded])
        if self.view is not None and not joining:
            self.view.keep_rows(torch.tensor(kept, device=self.forest.device))
            return
        if self.view is not None:
            self.view.close()
        paths = [self.forest.paths[row] for row in self.rows]
        self.view = self.attention.decode_view(self.forest.store, paths, self.tail)

    def decoded(self, row, count):
        """KV [layers, 2, tokens, kv_heads, head_dim] of a row's first tokens."""
        layout, forest = self.forest.layout, self.forest
        sizes = (layout.num_layers, 2, count, layout.num_kv_heads, layout.head_dim)
        held = forest.draw(0, *sizes)
        for token in range(count):
            for layer in range(layout.num_layers):
                held[layer, :, token] = forest._token(self.seed, token, layer)[1][row]
        return held

    def token(self):
        """Contexts [layer] of the next token of every row."""
        self.begin()
        layers = []
        for layer in range(self.forest.layout.num_layers):
            drawn = [self.forest._token(self.seed, token, layer) for token in self.held]
            picked = [(q[row], kv[row]) for (q, kv), row in zip(drawn, self.rows, strict=True)]
            query, key_value = map(torch.stack, zip(*picked, strict=True))
            sinks = self.forest.sinks
            layers.append(self.view.attend(layer, query, key_value, sinks).clone())
        self.tail.advance()
        self.held = [count + 1 for count in self.held]
        return layers

    def begin(self):
        """Make places for a token of every row."""
        if self.in_blocks:
            store = self.forest.store
            store.reserve({s: n + 1 for s, n in zip(self.own, self.held, strict=True)})
            self.tail.set_segments([(segment, 0) for segment in self.own])
        self.tail.set_lengths(self.held, 1)

    def close(self):
        self.view.close()
        self.tail.close()
        for segment in self.own:
            self.forest.store.free(segment)


def make(
    depth, *, dtype=torch.float64, layers=2, kv_heads=2, group=2, head_dim=16, rows=11, seed=0,
    pool_tokens=32768, device="cpu", block_tokens=8, **kind,
):  # fmt: skip
    """A forest of this depth. kind: window, soft cap and kept form of its layout."""
    rng = random.Random(seed)
    layout = KVLayout(layers, kv_heads, head_dim, dtype, block_tokens, **kind)
    budget = ByteBudget(pool_tokens * layout.bytes_per_token)
    store = SegmentStore(BlockPool([layout], budget, device))
    forest = Forest(store, [], kv_heads * group, device)
    level, seen = [()], []
    for at in range(depth):
        children = []
        for path in level[:4]:
            for _ in range(rng.choice([1, 1, 2, 3])):
                length = rng.choice([1, 2, 15, 16, 17, rng.randint(1, 50)])
                segment = store.create()
                sizes = (length, layers, 2, kv_heads, head_dim)
                store.append([segment], [forest.draw(seed * 97 + at * 31 + len(seen), *sizes)])
                children.append((*path, PathPart(segment, length)))
        rng.shuffle(children)
        level = children
        seen += children
    paths = [level[0], level[-1], level[0]]
    while len(paths) < rows:
        path = rng.choice(seen)
        if rng.random() < 0.25:
            path = truncate_path(path, rng.randint(1, sum(p.visible for p in path)))
        paths.append(path)
    rng.shuffle(paths)
    forest.paths = paths
    return forest


@pytest.fixture
def make_forest():
    return make


def largest_difference(left, right):
    pairs = [pair for x, y in zip(left, right, strict=True) for pair in zip(x, y, strict=True)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def by_definition(query, keys, values, window=None, softcap=None, sinks=None):
    """One token's context [heads, head_dim]; it is the last of keys, values [all, kv_heads, dim].

    Head by head and key by key, without a mask: what is not seen is not there.
    """
    first = 0 if window is None else max(0, len(keys) - window)
    found, group = [], len(query) // keys.shape[1]
    for head, asked in enumerate(query):
        seen, held = keys[first:, head // group], values[first:, head // group]
        scores = seen @ asked / len(asked) ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        found.append((weights / total) @ held)
    return torch.stack(found)


def plain_softmax(forest, rows, num_tokens, seed=0):
    """Decoding from the definition, one row, head and token at a time; shares no code."""
    store, layers, found = forest.store, range(forest.layout.num_layers), []
    rule = forest.layout.window, forest.layout.softcap, forest.sinks
    own = [[] for _ in layers]
    for token in range(num_tokens):
        contexts = [[] for _ in layers]
        for layer in layers:
            query, key_value = forest._token(seed, token, layer)
            own[layer].append(key_value)
            for row in rows:
                parts = [store.gather(p.segment, p.visible)[layer] for p in forest.paths[row]]
                mine = torch.stack([kv[row] for kv in own[layer]], dim=1)
                context = by_definition(query[row], *torch.cat([*parts, mine], dim=1), *rule)
                contexts[layer].append(context)
        found.append([torch.stack(each) for each in contexts])
    return found
