"""Rows that are decoded through an attention view, and what Eq. 1-2 say of each token."""

from dataclasses import replace

import torch

from beamwright.attention import make_attention
from beamwright.kv.pool import BlockPool, ByteBudget
from beamwright.kv.segments import PathPart
from beamwright_lab.baselines.layerwise.backend import LayerwiseAttention
from beamwright_lab.baselines.layerwise.store import LayeredStore

LAYERS, TOKENS, FIRST_ROWS = 6, 7, 9
KEEP, FLUSH = {2: [8, 0, 1, 3, 4, 6], 5: [0, 2, 5]}, (4,)
LARGE = 1 << 40


class Drive:
    """Decodes rows of a forest like a session does, and works out Eq. 1-2 for every token.

    length: tokens that every row has in its tail.
    """

    def __init__(self, forest, attention, rows, *, budget_bytes=LARGE, real=None):
        self.forest, self.attention, self.rows = forest, attention, list(rows)
        self.store, self.layout = forest.store, forest.layout
        self.token_bytes = self.layout.bytes_per_token // self.layout.num_layers
        self.own = [self.store.create() for _ in rows]
        self.budget_bytes, self.real = budget_bytes, real
        self.tail, self.length = attention.make_tail(self.store), 0
        self.tail.arrange([], len(rows))
        self.contexts, self.resident, self.held, self.charged = [], [], [], []
        self.open()

    def open(self):
        self.paths = [
            (*self.forest.paths[row], *([PathPart(own, own.length)] if own.length else []))
            for row, own in zip(self.rows, self.own, strict=True)
        ]
        self.view = self.attention.decode_view(self.store, self.paths, self.tail)
        if self.real is not None:
            self.view.set_num_rows(self.real)

    def begin(self, length):
        """Every row has so many tokens in its tail, and gets one more."""
        self.length = length
        self.tail.set_lengths([length] * len(self.rows), 1)

    def flush(self):
        length, count = self.length, len(self.rows)
        taken = self.tail.read_tokens([(row, 0, length) for row in range(count)])
        self.store.append(self.own, taken, [length] * count)
        self.view.close()
        self.open()
        self.begin(0)

    def keep(self, kept):
        self.rows, self.own, self.paths = (
            [each[i] for i in kept] for each in (self.rows, self.own, self.paths)
        )
        self.tail.arrange(kept, len(kept))
        self.view.keep_rows(torch.tensor(kept))

    def token(self, number):
        real = self.paths[: self.real]
        if self.attention.name == "dense":
            sealed = sum(part.visible for path in real for part in path)
        else:
            sealed = sum(
                {(id(p.segment), p.visible): p.visible for path in real for p in path}.values()
            )
        held = (sealed + len(real) * self.length) * self.token_bytes
        whole = held + len(real) * self.token_bytes
        most, fitting = self.layout.num_layers, self.budget_bytes // whole
        self.resident.append(most if most <= fitting else max(0, fitting - 2))
        self.charged.append(min(most, self.resident[-1] + 2) * whole)
        self.held.append(held)
        self.begin(self.length)
        layers = []
        for layer in range(self.layout.num_layers):
            query, key_value = self.forest._token(0, number, layer)
            context = self.view.attend(layer, query[self.rows], key_value[self.rows])
            layers.append(context[: self.real].clone())
        self.tail.advance()
        self.length += 1
        self.contexts.append(layers)

    def run(self, num_tokens=TOKENS, keep=None, flush=()):
        try:
            for number in range(num_tokens):
                if number in flush:
                    self.flush()
                if keep and number in keep:
                    self.keep(keep[number])
                self.token(number)
            if flush:
                self.flush()
        finally:
            self.close()
        return self

    def close(self):
        self.view.close()
        self.tail.close()

    def moved_bytes(self):
        """Bytes to the device, what was fetched in vain included."""
        return self.streamed_bytes() + self.store.discarded_bytes

    def streamed_bytes(self):
        """Eq. 2 for every token, and each layer once when it becomes resident."""
        num_layers, moved, before = self.layout.num_layers, 0, self.layout.num_layers
        for resident, held in zip(self.resident, self.held, strict=True):
            moved += (num_layers - resident + max(0, resident - before)) * held
            before = resident
        return moved


def layer_bytes(forest, name, rows=FIRST_ROWS):
    """One layer's KV of the first token, itself included."""
    drive = Drive(forest, make_attention(name), range(rows))
    drive.token(0)
    drive.close()
    return drive.held[0] + rows * drive.token_bytes


def same(left, right):
    return all(
        torch.equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def layered(forest, link, budget_bytes=LARGE):
    """The same forest in a layered store; everything on the device."""
    device, total = torch.device(forest.device), forest.store.pool.budget.total_bytes
    pool = BlockPool([forest.layout], ByteBudget(total), pinned=device.type == "cuda")
    store = LayeredStore(pool, device, link, ByteBudget(int(budget_bytes)))
    moved = {}
    for segment in {part.segment: None for path in forest.paths for part in path}:
        moved[segment] = store.create()
        whole = forest.store.gather(segment, segment.length)
        store.append([moved[segment]], [whole.permute(2, 0, 1, 3, 4)])
    paths = [
        tuple(PathPart(moved[part.segment], part.visible) for part in path) for path in forest.paths
    ]
    return replace(forest, store=store, paths=paths)


def pair(make_forest, name, link, layers_that_fit, *, real=None, **shape):
    """The backend alone and streamed, on equal forests, for the first token's Eq. 1."""
    forests = [make_forest(4, layers=LAYERS, seed=5, **shape) for _ in range(2)]
    budget_bytes = int(layers_that_fit * layer_bytes(forests[0], name))
    forests[1] = layered(forests[1], link, budget_bytes)
    backend, rows = LayerwiseAttention(make_attention(name)), range(FIRST_ROWS)
    plain = Drive(forests[0], make_attention(name), rows, real=real)
    streamed = Drive(forests[1], backend, rows, budget_bytes=budget_bytes, real=real)
    return plain, streamed
