"""Tiny checkpoints of hybrids, and a view that keeps KV and states of some rows as tensors."""

import torch
from transformers import AutoConfig

import fakes
from beamwright.attention.protocols import AttentionView
from tables import beside

_TABLES = beside(__file__)
TINY = {"vocab_size": fakes.VOCAB, **_TABLES["all"]}
EXPERTS, FAMILIES = _TABLES["experts"], _TABLES["families"]


def write_hybrid(folder, family, **changes):
    """A checkpoint of a family in a folder, which is given back."""
    fakes.write_tokenizer(folder)
    options = {**TINY, **FAMILIES.get(family, {}), **changes}
    fakes.write_checkpoint(folder, AutoConfig.for_model(family, **options))
    return folder


class KeptRows(AttentionView):
    """Rows behind one another's tokens, none shared; `begin` says what the next pass computes.

    Its states are its own, see `kv.states.RowStates`.
    """

    def __init__(self, shape, dtype, num_rows):
        self._shape, self._dtype = shape, dtype
        self._kv = [{} for _ in range(num_rows)]
        self._states = [{} for _ in range(num_rows)]
        self.rows, self.lengths = (), None
        self.states = self

    def begin(self, rows, lengths=None):
        """The next pass has so many tokens of these rows; None: one each."""
        self.rows, self.lengths = rows, lengths

    def attend(self, layer, query, key_value, sinks=None):
        layer = dict(self._shape.shared).get(layer, layer)
        counts = self.lengths or [1] * len(self.rows)
        found = torch.zeros_like(query)
        start = 0
        for row, count in zip(self.rows, counts, strict=True):
            new = key_value[start : start + count]
            every = torch.cat([self._kv[row].get(layer, new[:0]), new])
            self._kv[row][layer] = every
            ratio = query.shape[1] // every.shape[2]
            key, value = every.repeat_interleave(ratio, 2).unbind(1)
            q = query[start : start + count]
            scores = torch.einsum("qhd,khd->hqk", q, key) * q.shape[-1] ** -0.5
            seen = torch.ones(count, len(every)).tril(len(every) - count).bool()
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            found[start : start + count] = torch.einsum("hqk,khd->qhd", weights, value)
            start += count
        return found

    def part_places(self, layer):
        return None

    def read(self, layer):
        parts = [part for part in self._shape.states if part.layer == layer]
        dtypes = {p.kind: torch.float32 if p.wide else self._dtype for p in parts}
        zeros = {p.kind: torch.zeros(p.size, dtype=dtypes[p.kind]) for p in parts}
        every = [self._states[row].get(layer, zeros) for row in self.rows]
        return {kind: torch.stack([own[kind] for own in every]) for kind in zeros}

    def write(self, layer, values):
        for number, row in enumerate(self.rows):
            self._states[row][layer] = {kind: part[number].clone() for kind, part in values.items()}
