"""Attention over a part of the keys, with the log-sum-exp that lets parts be merged.

`attend_part` uses torch's CPU flash operator where it can (it returns the log-sum-exp);
`attend_part_oracle` is the same in plain matrix products.

A row's bits depend neither on the other rows nor on masked keys behind its own, as long as queries
come in multiples of 8 and padded keys in multiples of 16 (a vector register of floats: a shorter
rest is summed in another order). The start-up self-test checks it on the machine at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_MULTIPLE = 8
KEY_MULTIPLE = 16

HALF = (torch.float16, torch.bfloat16)

Partial = tuple[Tensor, Tensor]


def round_up(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Partial:
    """Softmax attention of `query` over this part of the keys.

    query [items, kv_heads, rows, head_dim]; key, value [items, kv_heads, tokens, head_dim];
    mask is additive and broadcastable to [items, kv_heads, rows, tokens]; of a row that sees no
    token nothing is told, see `hide`. softcap: see `KVLayout`; the flash operator knows none.

    Returns:
        (context [items, rows, kv_heads, head_dim], log-sum-exp [items, rows, kv_heads]), both
        contiguous.
    """
    if query.device.type != "cpu" or query.dtype == torch.float16 or softcap is not None:
        return attend_part_oracle(query, key, value, mask, softcap)
    context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask
    )
    # The operator allocates [items, rows, heads, dim]; the transpose undoes its view.
    return context.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Partial:
    """The same as `attend_part`, for the few queries of a decode step, and heads before rows.

    In float32 by two batched products: the flash operator gives each (item, head) to one thread as
    a product of its own; with two threads and a few rows a head that is slower than with one
    (docs/log/2026-11.md#operators-and-layout). The scores [items * kv_heads, rows, tokens] are
    written out, which a prefill could not afford. In bfloat16 the flash operator is faster than
    anything in float32.

    Returns:
        (context [items, kv_heads, rows, head_dim], log-sum-exp [items, kv_heads, rows]), both
        contiguous.
    """
    items, kv_heads, rows, head_dim = query.shape
    queries, keys, values = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    if query.dtype in HALF:
        if mask is not None:
            mask = mask.expand(items, kv_heads, -1, -1).flatten(0, 1).unsqueeze(1)
        queries, keys, values = (part.unsqueeze(1) for part in (queries, keys, values))
        context, lse = attend_part(queries, keys, values, mask, softcap)  # an item per head
        return context.view(query.shape), lse.view(items, kv_heads, rows)
    scores = torch.bmm(queries * head_dim**-0.5, keys.transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.view(items, kv_heads, rows, -1).add_(mask)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    context = torch.bmm(weights, values).div_(total)
    lse = largest.add_(total.log_())
    return context.view(query.shape), lse.view(items, kv_heads, rows)


def attend_part_oracle(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Partial:
    """The same as `attend_part`, by plain matrix products (at least float32 inside)."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores + mask.to(wide)
    lse = scores.logsumexp(-1)
    context = (scores - lse.unsqueeze(-1)).exp() @ value.to(wide)
    return context.to(query.dtype).transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def hide(part: Partial, blind: Tensor) -> Partial:
    """A part without weight, and without NaN, for the rows [items, rows] that see none of it."""
    context, lse = part
    blind = blind.unsqueeze(-1)
    return context.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


def with_sinks(context: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """What is left of the context [rows, heads, head_dim] where sinks [heads] join the softmax.

    lse: of all that a row sees, in the order of the context's heads.
    """
    if sinks is None:
        return context
    # Torch rounds `sigmoid` otherwise in the rest of a vector, which others may shift; not `exp`.
    left = 1 / (1 + (sinks.to(lse.dtype) - lse.view(context.shape[:2])).exp())
    return context * left.unsqueeze(-1).to(context.dtype)


def merge_parts(context: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Merge partial results along dimension 1, in path order.

    context [rows, parts, heads..., head_dim], lse [rows, parts, heads...] with -inf where a row
    has fewer parts. Absent parts come last, so a row's sum does not depend on how many there are.
    """
    weights = lse.softmax(dim=1).to(context.dtype)
    merged = (weights.unsqueeze(-1) * context).sum(dim=1)
    return merged if sinks is None else with_sinks(merged, lse.logsumexp(dim=1), sinks)
