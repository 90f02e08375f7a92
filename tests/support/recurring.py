"""A stand-in for a hybrid: a model of attention layers, and behind them a recurrent one.

Its state is sums of what the layers before it make, that decay, and how many tokens it has seen.
That number is looked at: a state that is not exactly that before a row's next token fails the test.
All is elementwise and token by token, so prefill and decode have equal bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from beamwright.kv.states import RowStates
from beamwright.models.load import load_model
from beamwright.models.shape import LayerGroup, StatePart

_SUMS = 24  # more than a block of the tiny models


class Recurring:
    """A decoder with a recurrent layer behind those of another one."""

    def __init__(self, inner):
        self._inner = inner
        shape = inner.shape
        layer, every = shape.layers, tuple(range(shape.layers))
        group = LayerGroup(every, shape.kv_heads, shape.head_dim)
        parts = (
            StatePart(layer, "conv", (3,)),
            StatePart(layer, "recurrent", (_SUMS, shape.hidden), wide=True),
        )
        self.shape = replace(shape, groups=(group,), states=parts)
        self._layer, self._decay = layer, torch.linspace(0.5, 0.95, _SUMS)[:, None]

    def __getattr__(self, name):
        return getattr(self._inner, name)

    @property
    def least_rows(self):
        return self._inner.least_rows

    @least_rows.setter
    def least_rows(self, count):
        self._inner.least_rows = count

    def first_layers(self):
        return Recurring(self._inner.first_layers())

    def hidden(self, token_ids, positions, view, read=None):
        found = self._inner.hidden(token_ids, positions, view)
        states = getattr(view, "states", None)
        if states is None:
            total = found.float()[:, None].expand(-1, _SUMS, -1)
            found = found + self._out(total).to(found.dtype)
        elif states.lengths is None:
            before = states.read(self._layer)
            kept = states.actions > 0
            assert torch.equal(before["conv"][kept, 0].long(), positions[kept]), "of another token"
            total = before["recurrent"] * self._decay + found.float()[:, None]
            states.write(self._layer, {"conv": before["conv"] + 1, "recurrent": total})
            found = found + self._out(total).to(found.dtype)
        else:
            found = self._prefilled(found, positions, states)
        return found if read is None else found.index_select(0, read)

    def _prefilled(self, found, positions, states):
        before = states.read(self._layer)
        counts, totals, start, made = before["conv"], list(before["recurrent"]), 0, []
        for row, length in enumerate(states.lengths):
            assert int(counts[row, 0]) == int(positions[start]), "of another token"
            for values in found[start : start + length]:
                totals[row] = totals[row] * self._decay + values.float()
                made.append(values + self._out(totals[row]).to(found.dtype))
            start += length
        added = torch.tensor(states.lengths)[:, None]
        states.write(self._layer, {"conv": counts + added, "recurrent": torch.stack(totals)})
        return torch.cat([torch.stack(made), found[start:]])

    def _out(self, total):
        """Of sums [..., sums, hidden]; one after the other, so that no sum's order can change."""
        made = torch.zeros_like(total[..., 0, :])
        for each in total.unbind(-2):
            made = made + each / (1 + each.abs())
        return made / _SUMS


def load_recurring(spec, settings, *args, **kwargs):
    """What `load_model` gives, with a recurrent layer."""
    loaded = load_model(spec, settings, *args, **kwargs)
    return replace(loaded, decoder=Recurring(loaded.decoder))


def check_states(solver, tree):
    """Every state that is anywhere is of exactly the tokens up to its node's end."""
    store = solver.generator.store
    states = store.pool.states
    found = 0
    for node in tree.nodes():
        handle = node.handles.get("generator")
        if handle is None or handle.row is not None or not handle.segment.length:
            continue
        segment = handle.segment.group_segments[-1]
        assert segment.group.state_blocks
        if segment.copies:
            rows = RowStates(states, [segment.blocks], [segment.blocks])
            counts = rows.read(next(iter(states.layout.by_layer)))["conv"]
            assert int(counts[0, 0]) == node.start + segment.length == node.end
            found += 1
    return found
