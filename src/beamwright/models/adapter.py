"""A decoder of `transformers`' own modules, whose attention is a view's. No code per family.

Rows are packed as one sequence [1, tokens] with their positions. What a layer attends to is the
view's business, and so are the states of recurrent layers (`recurrent`): that is all that there is
to translate; everything else works token by token. Weights that only products read become
projections of ours (`Product`).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.kernels import why_no_kernels
from beamwright.attention.protocols import AttentionView
from beamwright.models.decoder import ROW_MULTIPLE, Decoder, Linear, by_rows
from beamwright.models.formats.plain import StoredRows
from beamwright.models.recurrent import Recurrent
from beamwright.models.shape import ModelShape, NotBuiltError
from beamwright.models.stepped import put_in
from beamwright.models.survey import Survey, bind


class Product:
    """Stands where a weight was: `F.linear` with it is a product of ours."""

    def __init__(self, linear: Linear, like: Tensor, device: str, tile_rows: int | None) -> None:
        self.linear, self._tile_rows = linear, tile_rows
        self.shape, self.dtype, self.device = like.shape, like.dtype, torch.device(device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not F.linear:
            raise TypeError(f"{func} of a weight that is kept for products")
        x, own, bias = (*args, None)[:3] if kwargs is None else (*args, *kwargs.values(), None)[:3]
        own.linear.bias = bias
        flat = x.reshape(-1, x.shape[-1])
        found = by_rows(own.linear, flat, own._tile_rows)
        if own.shape[0] == 1 and not x.is_cuda:
            # A gate's numbers lie apart: in one vector they round otherwise than those at its end.
            return F.pad(found, (0, 1))[:, :1].view(*x.shape[:-1], 1)
        return found.view(*x.shape[:-1], -1)


class EmbeddingRows:
    """Stands where an embedding was: `F.embedding` with it reads rows of their file."""

    def __init__(self, rows: StoredRows | None, like: Tensor, device: str) -> None:
        self.rows, self.shape, self.dtype = rows, like.shape, like.dtype
        self.device = torch.device(device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not F.embedding:
            raise TypeError(f"{func} of an embedding whose rows are in a file")
        token_ids, own = args[:2]
        found: Tensor = own.rows[token_ids.flatten()].view(*token_ids.shape, -1)
        return found


class _Attention:
    """Hands what layers attend with to the view that is in use."""

    view: AttentionView

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None = None,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Context [1, tokens, heads, width of a value] of [1, heads, tokens, width] each."""
        width, narrow = query.shape[-1], value.shape[-1]
        head_dim = max(width, narrow)
        # A view divides by the root of the width that it gets.
        scale = (width**-0.5 if scaling is None else scaling) * math.sqrt(head_dim)
        if not math.isclose(scale, 1.0, rel_tol=1e-12):
            query = query * scale
        if width != narrow:
            query, key, value = (F.pad(x, (0, head_dim - x.shape[-1])) for x in (query, key, value))
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        sinks = () if s_aux is None else (s_aux,)
        key_value = torch.stack([key, value], dim=1)
        context: Tensor = self.view.attend(module.layer_idx, query, key_value, *sinks)
        return context[None, ..., :narrow]


class _Passed:
    """What a model without layers puts out: what it was given."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]


class _NoLayers(torch.nn.Module):
    """Stands where the layers were, so that a model's own head can be called alone."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # it is no part of this one

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Passed:
        return _Passed(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        """Numbers of the body; some models' layers are one module further in."""
        found = getattr(self.body, name, None)
        return found if isinstance(found, int | float) else self


def steps_in_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels step on states where they lie: on a card."""
    return device.type == "cuda" and why_no_kernels(device, dtype) is None


def _forms(layer: torch.nn.Module) -> tuple[object, ...]:
    """Forms of a layer's products, in order."""
    parts = (each.__dict__.get("weight") for each in layer.modules())
    return tuple(part.linear.form for part in parts if part is not None)


class AdaptedDecoder(Decoder):
    """A `Decoder` over a model of `transformers`. found: its survey, with weights in place."""

    def __init__(
        self, found: Survey, shape: ModelShape, dtype: torch.dtype, tile_rows: int | None
    ) -> None:
        self.shape, self.tile_rows, self.least_rows = shape, tile_rows, ROW_MULTIPLE
        self._attention, self._found = _Attention(), found
        self._embedding, self._body = found.model.get_input_embeddings().weight, found.body
        # Not what was asked for: of `cuda` this has the card's number.
        self.dtype, self.device = dtype, self._embedding.device
        bind(found.model, self._attention, lambda module, *args: module.beamwright_experts(*args))
        self.recurrent = self._recurrent(found)
        found.model._modules[found.body_at] = _NoLayers(found.body)
        path, _, self._leaf = found.layers_at.partition(".")[2].rpartition(".")
        self._holder = self._body.get_submodule(path)
        self._layers = getattr(self._holder, self._leaf)

    def _recurrent(self, found: Survey) -> tuple[Recurrent, ...]:
        """Its recurrent modules, each with the states of the pass that is computed.

        Raises:
            NotBuiltError: if one of them does with a token at a time what it does not with several.
        """
        known, made = dict[type, bool](), list[Recurrent]()
        in_blocks = steps_in_blocks(self.device, self.dtype)
        for name, parts in found.recurrent.items():
            layer, module = parts[0].layer, found.model.get_submodule(name)
            own = [part for part in self.shape.states if part.layer == layer]
            each = Recurrent(module, layer, own, self.dtype)
            if type(module) not in known:
                if not each.agrees(self.shape.hidden, self.device, behind=False):
                    raise NotBuiltError(f"{type(module).__name__}: token by token it differs")
                known[type(module)] = each.agrees(self.shape.hidden, self.device, behind=True)
            each.in_chunks = known[type(module)]
            put_in(each, self.shape.hidden, self.device, in_blocks=in_blocks)
            each.install(lambda: self._attention.view.states)
            made.append(each)
        return tuple(made)

    @property
    def steps_in_place(self) -> bool:
        return all(each.in_place is not None for each in self.recurrent)

    @property
    def kind(self) -> tuple[object, ...]:
        """Families differ in what their layers compute, and name that by their shape."""
        kinds = {_forms(layer) for layer in self._layers}
        how = self.dtype, self.device, self.tile_rows, self.kv_dtype
        return self.shape, frozenset(kinds), *how

    def forward(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None
    ) -> Tensor:
        self._attention.view = view
        self._holder._modules[self._leaf] = self._layers
        found = self._body(token_ids[None], position_ids=positions[None], use_cache=False)
        states: Tensor = found.last_hidden_state[0]
        return states if read is None else states.index_select(0, read)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.by_rows(self._head, hidden)

    def _head(self, x: Tensor) -> Tensor:
        """The model's own: with its scale, or soft cap."""
        found: Tensor = self._found.model(inputs_embeds=x[None], use_cache=False).logits[0]
        return found

    def embedded(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embedding)

    def first_layers(self) -> AdaptedDecoder:
        """All layers up to the first one of the last kind: they keep their numbers."""
        owners, firsts = dict(self.shape.shared), dict[object, int]()
        for number, layer in enumerate(self._layers):
            group = next((g for g in self.shape.kv_groups if number in g.layers), None)
            parts = tuple(type(part) for part in layer.modules())
            if number not in owners:
                like = replace(group, layers=()) if group else None
                firsts.setdefault((like, parts, _forms(layer)), number)
        depth = 1 + max(firsts.values())
        first = copy(self)
        first._layers = torch.nn.ModuleList(list(self._layers)[:depth])
        groups = [
            replace(group, layers=tuple(number for number in group.layers if number < depth))
            for group in self.shape.groups
        ]
        kept = tuple(group for group in groups if group.layers)
        shared = tuple(pair for pair in self.shape.shared if pair[0] < depth)
        states = tuple(part for part in self.shape.states if part.layer < depth)
        first.shape = replace(self.shape, layers=depth, groups=kept, shared=shared, states=states)
        return first
