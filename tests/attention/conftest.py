"""Random trees of KV, and views over them that are driven like the decoder drives them."""

import random
from dataclasses import dataclass

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.kv import (
    BlockPool,
    ByteBudget,
    KVLayout,
    PathPart,
    SegmentStore,
    TailBuffer,
    truncate_path,
)


@dataclass
class Forest:
    """A store, and paths through it: deep, shallow, shared, cut inside a segment, repeated."""

    store: SegmentStore
    paths: list
    num_heads: int
    device: str = "cpu"

    @property
    def layout(self):
        return self.store.pool.layout

    def draw(self, seed, *size):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return drawn.to(self.device, self.layout.dtype)

    def decode(self, backend, rows, num_tokens, seed=0, keep=None):
        """Contexts [token][layer] of `rows` (in this order); keep: {token: positions kept}.

        backend: a name, or a backend.
        """
        layout = self.layout
        paths = [self.paths[row] for row in rows]
        attention = make_attention(backend) if isinstance(backend, str) else backend
        sizes = (len(rows), attention.tail_tokens, self.store.scratch, self.device)
        tail = TailBuffer(layout, *sizes)
        view = attention.decode_view(self.store, paths, tail)
        alive, found = list(rows), []
        for token in range(num_tokens):
            if keep and token in keep:
                alive = [alive[i] for i in keep[token]]
                index = torch.tensor(keep[token], device=self.device)
                tail.keep_rows(index)
                view.keep_rows(index)
            tail.make_room()
            layers = []
            for layer in range(layout.num_layers):
                query, key_value = self._token(seed, token, layer)
                layers.append(view.attend(layer, query[alive], key_value[alive]).clone())
            tail.length += 1
            found.append(layers)
        view.close()
        tail.close()
        return found

    def _token(self, seed, token, layer):
        """What every path of the forest asks and stores for one token."""
        layout, place = self.layout, 1000 * (1000 * seed + token) + layer
        query = self.draw(place, len(self.paths), self.num_heads, layout.head_dim)
        sizes = (len(self.paths), 2, layout.num_kv_heads, layout.head_dim)
        return query, self.draw(place + 500, *sizes)

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
            context = view.attend(layer, torch.cat(queries), torch.cat(key_values))
            assert context.shape[0] == sum(lengths) + num_padding
            found.append(context[: sum(lengths)].split(lengths))
        view.close()
        return found


@pytest.fixture
def make_forest():
    def make(
        depth,
        *,
        dtype=torch.float64,
        layers=2,
        kv_heads=2,
        group=2,
        head_dim=16,
        rows=11,
        seed=0,
        pool_tokens=32768,
        device="cpu",
    ):
        rng = random.Random(seed)
        layout = KVLayout(layers, kv_heads, head_dim, dtype)
        budget = ByteBudget(pool_tokens * layout.bytes_per_token)
        store = SegmentStore(BlockPool(layout, budget, device))
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

    return make
