"""Runs any `transformers` model as a `Decoder`: its own modules, with Beamwright's attention.

No family needs code here. Rows are packed as one sequence [1, tokens] with a position per token.
The attention view decides which KV each token attends to, and holds the states of recurrent layers
(`recurrent_layers`). All other modules work token by token and run unchanged. Weights that are only
used in matrix products become Beamwright's projections (`ProjectionWeight`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.kernels import why_no_kernels
from beamwright.attention.protocols import AttentionView
from beamwright.models.decoder import ROW_MULTIPLE, Decoder, Linear, apply_padded
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.offload import WeightOffload
from beamwright.models.recurrent_layers import Recurrent
from beamwright.models.shape import ModelShape, NoDecoderError
from beamwright.models.steps import install_steps
from beamwright.models.survey import Survey, bind

_UP = ("gate_up_proj", "up_proj")
_GROUPED_CAPABILITY = (8, 0)  # least compute capability of a GPU for `F.grouped_mm`


class ProjectionWeight:
    """A stand-in for a module's weight: `F.linear` with it runs one of Beamwright's projections.

    linear: the projection. like: the weight that is replaced; its shape and dtype are kept.
    tile_rows: see `Decoder`.
    """

    def __init__(self, linear: Linear, like: Tensor, device: str, tile_rows: int | None) -> None:
        self.linear, self._tile_rows = linear, tile_rows
        self.shape, self.dtype, self.device = like.shape, like.dtype, torch.device(device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not F.linear:
            raise TypeError(f"{func} is not supported on a weight that is packed for products")
        x, own, bias = (*args, None)[:3] if kwargs is None else (*args, *kwargs.values(), None)[:3]
        own.linear.bias = bias
        flat = x.reshape(-1, x.shape[-1])
        product = apply_padded(own.linear, flat, own._tile_rows)
        if own.shape[0] == 1 and not x.is_cuda:
            # The outputs of a gate, one per row, must not be contiguous: torch rounds the last few
            # elements of a contiguous vector differently, so that a row would depend on the batch.
            return F.pad(product, (0, 1))[:, :1].view(*x.shape[:-1], 1)
        return product.view(*x.shape[:-1], -1)


class StoredEmbedding:
    """A stand-in for an embedding table: `F.embedding` with it reads rows from the model's file."""

    def __init__(self, rows: RowReader | None, like: Tensor, device: str) -> None:
        self.rows, self.shape, self.dtype = rows, like.shape, like.dtype
        self.device = torch.device(device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not F.embedding:
            raise TypeError(f"{func} is not supported on an embedding that is read from a file")
        token_ids, own = args[:2]
        embedded: Tensor = own.rows[token_ids.flatten()].view(*token_ids.shape, -1)
        return embedded


class _Attention:
    """The function that `transformers` calls for attention; it calls the attention view."""

    # The attention view of the current forward pass, and the function that brings its weights.
    view: AttentionView
    begin_layer: Callable[[int], None]

    def begin(self, number: int, *_: Any) -> None:
        """Bring the weights of layer `number`; called before the layer's module runs."""
        self.begin_layer(number)

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
        """Return attention's output [1, tokens, heads, value width].

        Args:
            query, key, value: [1, heads, tokens, width]; values may be narrower.
            module: the attention module of the layer.
            scaling: the factor of the scores; None: 1 / sqrt(width of a query).
            s_aux: attention sinks [heads], see `AttentionView.attend`.
        """
        width, narrow = query.shape[-1], value.shape[-1]
        head_dim = max(width, narrow)
        # The view divides scores by sqrt(width of the query that it receives).
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


def can_multiply_groups(weight: Tensor) -> bool:
    """Return whether `F.grouped_mm` can multiply the rows of all experts at once with `weight`."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device) >= _GROUPED_CAPABILITY


class Experts:
    """The experts of one layer, computed by Beamwright's projections.

    Rows are sorted by expert. Each chosen expert gets a multiple of 8 rows. The results of a
    token's experts are added in the order in which its router chose them. So the products and the
    sum of a row are batch-invariant.

    module: the experts module of `transformers` whose weights and settings are used.
    convert: converts each projection once, when it is loaded; None: projections stay plain, so
        that one kernel may multiply the rows of all experts.
    stored_projection: returns an expert's projection as the checkpoint stores it, quantised; None
        if the checkpoint stores plain weights. Its arguments are the parameter's name and the
        expert's number.
    """

    def __init__(
        self,
        module: Any,
        convert: Callable[[Linear], Linear] | None,
        stored_projection: Callable[[str, int], Linear | None],
        tile_rows: int | None,
    ) -> None:
        self._module, self._tile_rows = module, tile_rows
        up = next(name for name in _UP if hasattr(module, name))
        self._up, self._down = (
            self._take_projections(name, convert, stored_projection) for name in (up, "down_proj")
        )
        self._grouped = isinstance(self._up, Tensor)
        # Brings experts that are not on the device (`WeightOffload.bring_experts`).
        self.bring: Callable[[Sequence[int]], Iterator[int]] | None = None

    @property
    def projections(self) -> list[Sequence[Linear]]:
        """The projections of each expert; empty if one kernel multiplies all experts at once."""
        return [] if self._grouped else [*zip(self._up, self._down, strict=True)]

    def _take_projections(
        self,
        name: str,
        convert: Callable[[Linear], Linear] | None,
        stored_projection: Callable[[str, int], Linear | None],
    ) -> list[Linear] | Tensor:
        """Take the projections of all experts out of the module's parameter `name`.

        Return one projection per expert, or the weights [experts, in, out] if one kernel multiplies
        all experts. The module keeps a meta tensor of the same shape.
        """
        module, taken = self._module, list[Linear]()
        whole, biases = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        setattr(module, name, torch.nn.Parameter(whole.to("meta"), requires_grad=False))
        stacked: Tensor = whole if module.is_transposed else whole.transpose(1, 2)
        if convert is None and biases is None and can_multiply_groups(whole):
            return stacked
        for number, weight in enumerate(stacked):
            bias = None if biases is None else biases.detach()[number].clone()
            if bias is None and (linear := stored_projection(name, number)) is not None:
                taken.append(linear)
                continue
            plain = Linear(weight.T.contiguous().clone(), bias)
            taken.append(plain if convert is None else convert(plain))
        return taken

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [tokens, hidden] of each token's experts.

        hidden: [tokens, hidden].
        chosen: the numbers of each token's experts [tokens, experts per token].
        weights: the weights of these experts in the sum, in the same shape.
        """
        module, (tokens, taken), flat = self._module, chosen.shape, chosen.reshape(-1)
        counts = flat.new_zeros(module.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        padded = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
        order, ends = flat.argsort(stable=True), padded.cumsum(0)
        # Copies of token 0 pad each expert's rows to a multiple of 8. Their results are not read.
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        by_expert = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
        places = torch.empty_like(order).index_copy_(0, order, by_expert)
        # The grouped kernel reads `ends` on the device, so the host need not wait for `padded`.
        sizes = [] if self._grouped else padded.tolist()
        most = min(ROW_MULTIPLE * len(flat), len(flat) + (ROW_MULTIPLE - 1) * len(counts))
        rows = order.new_zeros(sum(sizes) if sizes else most)
        x = hidden[rows.index_copy_(0, by_expert, order // taken)]
        if self.bring is None:
            x = self._gate(self._products(self._up, x, sizes, ends))
            x = self._products(self._down, x, sizes, ends)
        else:
            x = self._one_by_one(x, sizes, self.bring)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        x = x[places].view(tokens, taken, -1).to(wide) * weights.to(wide).unsqueeze(-1)
        total = x[:, 0]
        for number in range(1, taken):
            total = total + x[:, number]
        return total.to(hidden.dtype)

    def _gate(self, x: Tensor) -> Tensor:
        module = self._module
        gated: Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        return gated

    def _one_by_one(
        self, x: Tensor, sizes: list[int], bring: Callable[[Sequence[int]], Iterator[int]]
    ) -> Tensor:
        """Compute one expert after the other, in the order in which they reach the device."""
        parts = {number: part for number, part in enumerate(x.split(sizes)) if len(part)}
        projections = self.projections
        for number in bring([*parts]):
            up, down = projections[number]
            inner = self._gate(apply_padded(up, parts[number], self._tile_rows))
            parts[number] = apply_padded(down, inner, self._tile_rows)
        return torch.cat([*parts.values()])

    def _products(
        self, kept: list[Linear] | Tensor, x: Tensor, sizes: list[int], ends: Any
    ) -> Tensor:
        """Multiply each expert's rows of x [rows, in] with its weights, and return [rows, out].

        kept: a projection per expert, or the weights of all experts for the grouped kernel.
        sizes: number of rows of each expert, for projections.
        ends: end of each expert's rows [experts], on the device, for the grouped kernel.
        """
        if isinstance(kept, Tensor):
            product: Tensor = F.grouped_mm(x, kept, offs=ends.to(torch.int32))
            return product
        used = zip(kept, x.split(sizes), strict=True)
        return torch.cat(
            [apply_padded(each, part, self._tile_rows) for each, part in used if len(part)]
        )


class _BodyOutput:
    """The output of `_NoLayers`: its input as `last_hidden_state`, and None for other fields."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]


class _NoLayers(torch.nn.Module):
    """A stand-in for a model's layers that returns its input, so that the LM head can run alone."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # not registered as a submodule

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        """Return the body's attribute if it is a number, otherwise this module.

        Some models reach the body by a longer path, such as `model.decoder`. Every step of that
        path leads to this module.
        """
        value = getattr(self.body, name, None)
        return value if isinstance(value, int | float) else self


def can_update_states_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels can update recurrent states inside the pool's blocks: on a GPU."""
    return device.type == "cuda" and why_no_kernels(device, dtype) is None


def projections_of(layer: torch.nn.Module) -> list[Linear]:
    """Return Beamwright's projections in a layer, without those of its experts."""
    parts = (each.__dict__.get("weight") for each in layer.modules())
    return [part.linear for part in parts if part is not None]


def _kernel_keys(layer: torch.nn.Module) -> tuple[object, ...]:
    """Return the `Linear.kernel_key` of each projection in a layer."""
    return tuple(each.kernel_key for each in projections_of(layer))


class AdaptedDecoder(Decoder):
    """A `Decoder` that runs the modules of a `transformers` model.

    surveyed: the model and what `survey` found out about it; its weights must be loaded.
    """

    def __init__(
        self,
        surveyed: Survey,
        shape: ModelShape,
        dtype: torch.dtype,
        tile_rows: int | None,
        offload: WeightOffload | None = None,
    ) -> None:
        self.offload = offload  # `_recurrent` needs the weights of the layers that it tests
        self.shape, self.tile_rows, self.least_rows = shape, tile_rows, ROW_MULTIPLE
        self._attention, self._model = _Attention(), surveyed.model
        self._embedding, self._body = surveyed.model.get_input_embeddings().weight, surveyed.body
        # The embedding's device, not `--device`: "cuda" becomes "cuda:0".
        self.dtype, self.device = dtype, self._embedding.device
        bind(
            surveyed.model, self._attention, lambda module, *args: module.beamwright_experts(*args)
        )
        self.recurrent = self._recurrent(surveyed)
        surveyed.model._modules[surveyed.body_at] = _NoLayers(surveyed.body)
        path, _, self._leaf = surveyed.layers_at.partition(".")[2].rpartition(".")
        self._holder = self._body.get_submodule(path)
        self._layers = getattr(self._holder, self._leaf)
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(partial(self._attention.begin, number))

    def _recurrent(self, surveyed: Survey) -> tuple[Recurrent, ...]:
        """Wrap the recurrent modules, so that they read and write the states of the current view.

        Raises:
            NoDecoderError: if a module's results depend on how many tokens it gets in one call.
        """
        known, made = dict[type, bool](), list[Recurrent]()
        in_blocks = can_update_states_in_place(self.device, self.dtype)
        with self.begin_pass() as begin_layer:
            for name, parts in surveyed.recurrent.items():
                layer, module = parts[0].layer, surveyed.model.get_submodule(name)
                own = [part for part in self.shape.states if part.layer == layer]
                each = Recurrent(module, layer, own, self.dtype)
                begin_layer(layer)
                if type(module) not in known:
                    if not each.chunks_agree(self.shape.hidden, self.device, after_state=False):
                        raise NoDecoderError(
                            f"{type(module).__name__} gives other results for one token at a time "
                            "than for several at once"
                        )
                    known[type(module)] = each.chunks_agree(
                        self.shape.hidden, self.device, after_state=True
                    )
                each.in_chunks = known[type(module)]
                install_steps(each, self.shape.hidden, self.device, in_blocks=in_blocks)
                each.install(lambda: self._attention.view.states)
                made.append(each)
        return tuple(made)

    @property
    def updates_states_in_place(self) -> bool:
        return all(each.in_place is not None for each in self.recurrent)

    @property
    def self_test_key(self) -> tuple[object, ...]:
        """Key of self-test results, equal for models whose passes run the same kernels.

        It holds the model's shape (with the family's name), the kernels of the projections, dtype,
        device, rows per tile and KV dtype.
        """
        kinds = {_kernel_keys(layer) for layer in self._layers}
        how = self.dtype, self.device, self.tile_rows, self.kv_dtype
        return self.shape, frozenset(kinds), *how

    def forward(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None
    ) -> Tensor:
        self._attention.view = view
        self._holder._modules[self._leaf] = self._layers
        with self.begin_pass() as self._attention.begin_layer:
            output = self._body(token_ids[None], position_ids=positions[None], use_cache=False)
        states: Tensor = output.last_hidden_state[0]
        return states if read is None else states.index_select(0, read)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits with the model's own head, including its scale or soft cap."""
        return self.apply_padded(
            lambda x: self._model(inputs_embeds=x[None], use_cache=False).logits[0], hidden
        )

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embedding)

    def first_layers(self) -> AdaptedDecoder:
        """Return a shallow copy with the first layers, as many as contain every kind of layer.

        No layer in between is left out, because modules know their layer numbers.
        """
        owners, firsts = dict(self.shape.shared), dict[object, int]()
        for number, layer in enumerate(self._layers):
            group = next((g for g in self.shape.kv_layer_groups if number in g.layers), None)
            parts = tuple(type(part) for part in layer.modules())
            if number not in owners:
                like = replace(group, layers=()) if group else None
                firsts.setdefault((like, parts, _kernel_keys(layer)), number)
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
