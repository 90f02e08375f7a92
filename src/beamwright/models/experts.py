"""Mixture of experts: what `transformers`' experts compute, by projections of ours.

Rows are sorted by expert, and each expert that was chosen gets a multiple of 8 of them. A token's
experts are added up in the order of its router's choice. So neither the products nor the sum of a
row depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from beamwright.models.decoder import ROW_MULTIPLE, Linear, by_rows

_UP = ("gate_up_proj", "up_proj")


class Experts:
    """The experts of one layer: projections into and out of each. module: whose numbers they are.

    convert: what is made of each projection, once. kept: that of an expert in its file's form, by
    the parameter's name and the expert's number; None where there is none.
    """

    def __init__(
        self,
        module: Any,
        convert: Callable[[Linear], Linear],
        kept: Callable[[str, int], Linear | None],
        tile_rows: int | None,
    ) -> None:
        self._module, self._tile_rows = module, tile_rows
        up = next(name for name in _UP if hasattr(module, name))
        self._up, self._down = (self._take(name, convert, kept) for name in (up, "down_proj"))

    def _take(
        self,
        name: str,
        convert: Callable[[Linear], Linear],
        kept: Callable[[str, int], Linear | None],
    ) -> list[Linear]:
        """The projections of that name; the module keeps a shape without values of them."""
        module = self._module
        whole, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
        taken = []
        for number, weight in enumerate(whole.detach()):
            plain = weight.T if module.is_transposed else weight
            bias = None if biases is None else biases.detach()[number].clone()
            if bias is None and (linear := kept(name, number)) is not None:
                taken.append(linear)
                continue
            taken.append(convert(Linear(plain.contiguous().clone(), bias)))
        setattr(module, name, torch.nn.Parameter(whole.detach().to("meta"), requires_grad=False))
        return taken

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sums [tokens, hidden] of each token's experts.

        hidden: [tokens, hidden]; chosen, weights: [tokens, experts per token].
        """
        module, (tokens, each) = self._module, chosen.shape
        blocks, rows, places = _by_expert(chosen, len(self._down))
        x = self._products(self._up, blocks, hidden[rows])
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = self._products(self._down, blocks, x)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        x = x[places].view(tokens, each, -1).to(wide) * weights.to(wide).unsqueeze(-1)
        total = x[:, 0]
        for number in range(1, each):
            total = total + x[:, number]
        return total.to(hidden.dtype)

    def _products(
        self, linears: list[Linear], blocks: list[tuple[int, int]], x: torch.Tensor
    ) -> torch.Tensor:
        parts = x.split([count for _, count in blocks])
        pairs = zip(blocks, parts, strict=True)
        return torch.cat(
            [by_rows(linears[expert], part, self._tile_rows) for (expert, _), part in pairs]
        )


def _by_expert(
    chosen: torch.Tensor, num_experts: int
) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
    """Experts with how many rows they get; the token of each row; the row of each choice.

    Rows that fill up an expert's last 8 are some token's; nobody reads what becomes of them.
    """
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=num_experts)
    padded = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    places = torch.empty_like(order)
    sorted_places = torch.arange(len(order), device=order.device) + shift[flat[order]]
    places[order] = sorted_places
    blocks = [(expert, count) for expert, count in enumerate(padded.tolist()) if count]
    rows = order.new_zeros(sum(count for _, count in blocks))
    rows[sorted_places] = order // chosen.shape[1]
    return blocks, rows, places
