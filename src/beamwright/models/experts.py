"""Mixture of experts: what `transformers`' experts compute, by projections of ours.

Rows are sorted by expert, and each expert that was chosen gets a multiple of 8 of them. A token's
experts are added up in the order of its router's choice. So neither the products nor the sum of a
row depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.models.decoder import ROW_MULTIPLE, Linear, by_rows

_UP = ("gate_up_proj", "up_proj")
_GROUPED_CAPABILITY = (8, 0)


def multiplies_groups(weight: Tensor) -> bool:
    """Whether one kernel multiplies the rows of all experts here, with weights as they are."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device) >= _GROUPED_CAPABILITY


class Experts:
    """The experts of one layer: projections into and out of each. module: whose numbers they are.

    convert: what is made of each projection, once; None: nothing, so that one kernel may multiply
    all. kept: that of an expert in its file's form, by
    the parameter's name and the expert's number; None where there is none.
    """

    def __init__(
        self,
        module: Any,
        convert: Callable[[Linear], Linear] | None,
        kept: Callable[[str, int], Linear | None],
        tile_rows: int | None,
    ) -> None:
        self._module, self._tile_rows = module, tile_rows
        up = next(name for name in _UP if hasattr(module, name))
        self._up, self._down = (self._take(name, convert, kept) for name in (up, "down_proj"))
        self._grouped = isinstance(self._up, Tensor)

    def _take(
        self,
        name: str,
        convert: Callable[[Linear], Linear] | None,
        kept: Callable[[str, int], Linear | None],
    ) -> list[Linear] | Tensor:
        """The projections of that name, one by one, or [experts, in, out] in one piece.

        The module keeps a shape without values of them.
        """
        module, taken = self._module, list[Linear]()
        whole, biases = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        setattr(module, name, torch.nn.Parameter(whole.to("meta"), requires_grad=False))
        stacked: Tensor = whole if module.is_transposed else whole.transpose(1, 2)
        if convert is None and biases is None and multiplies_groups(whole):
            return stacked
        for number, weight in enumerate(stacked):
            bias = None if biases is None else biases.detach()[number].clone()
            if bias is None and (linear := kept(name, number)) is not None:
                taken.append(linear)
                continue
            plain = Linear(weight.T.contiguous().clone(), bias)
            taken.append(plain if convert is None else convert(plain))
        return taken

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums [tokens, hidden] of each token's experts.

        hidden: [tokens, hidden]; chosen, weights: [tokens, experts per token].
        """
        module, (tokens, taken), flat = self._module, chosen.shape, chosen.reshape(-1)
        counts = flat.new_zeros(module.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        padded = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
        order, ends = flat.argsort(stable=True), padded.cumsum(0)
        # Rows that fill up an expert's last 8 are some token's; nobody reads what they become.
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        by_expert = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
        places = torch.empty_like(order).index_copy_(0, order, by_expert)
        # One kernel reads where experts end on the device: the host waits for nothing.
        sizes = [] if self._grouped else padded.tolist()
        most = min(ROW_MULTIPLE * len(flat), len(flat) + (ROW_MULTIPLE - 1) * len(counts))
        rows = order.new_zeros(sum(sizes) if sizes else most)
        x = hidden[rows.index_copy_(0, by_expert, order // taken)]
        x = self._products(self._up, x, sizes, ends)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = self._products(self._down, x, sizes, ends)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        x = x[places].view(tokens, taken, -1).to(wide) * weights.to(wide).unsqueeze(-1)
        total = x[:, 0]
        for number in range(1, taken):
            total = total + x[:, number]
        return total.to(hidden.dtype)

    def _products(
        self, kept: list[Linear] | Tensor, x: Tensor, sizes: list[int], ends: Any
    ) -> Tensor:
        """Rows [rows, out]. sizes: of each expert's; ends: where they end, on the device."""
        if isinstance(kept, Tensor):
            product: Tensor = F.grouped_mm(x, kept, offs=ends.to(torch.int32))
            return product
        used = zip(kept, x.split(sizes), strict=True)
        return torch.cat([by_rows(each, part, self._tile_rows) for each, part in used if len(part)])
