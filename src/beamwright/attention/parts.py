"""Attention over a part of the keys, with the log-sum-exp that merging parts requires (torch).

`attend_part` uses torch's CPU flash operator where possible, because it returns the log-sum-exp.
`attend_part_oracle` computes the same with plain matrix products.

If the number of queries is a multiple of 8, and the padded number of keys a multiple of 16, a row's
result is bitwise independent of other rows and of masked keys after its own keys. (Sixteen floats
fill a vector register, and a shorter remainder is summed in another order.) The start-up self-test
checks this independence on the current machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_MULTIPLE = 8
KEY_MULTIPLE = 16

HALF = (torch.float16, torch.bfloat16)

# The context of a part of the keys, and its log-sum-exp.
Partial = tuple[Tensor, Tensor]


def round_up(count: int, multiple: int) -> int:
    """Round `count` up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Partial:
    """Compute softmax attention of `query` over this part of the keys.

    The result of a row is undefined if all its keys are masked, see `hide_blind_rows`.

    Args:
        query: [items, kv_heads, rows, head_dim].
        key, value: [items, kv_heads, tokens, head_dim].
        mask: additive, broadcastable to [items, kv_heads, rows, tokens]; None for no mask.
        softcap: see `KVLayout`; the flash operator does not support it.

    Returns:
        (context [items, rows, kv_heads, head_dim], log-sum-exp [items, rows, kv_heads]), both
        contiguous.
    """
    if query.device.type != "cpu" or query.dtype == torch.float16 or softcap is not None:
        return attend_part_oracle(query, key, value, mask, softcap)
    context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask
    )
    # The operator allocates [items, rows, heads, dim], so the transposed view is contiguous.
    return context.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Partial:
    """Compute `attend_part` for the few queries of a decode step. Heads come before rows.

    In float32 and float64, `attend_few` uses two batched products. The flash operator runs each
    (item, head) as a separate product on one thread, and with few rows per head two threads are
    slower than one (docs/log/2026-11.md#operators-and-layout). The batched products store all
    scores [items * kv_heads, rows, tokens], which would need too much memory in a prefill. In
    16-bit dtypes, `attend_few` calls `attend_part`, because the flash operator in bfloat16 is
    faster than any computation in float32.

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
        context, lse = attend_part(queries, keys, values, mask, softcap)  # one item per head
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
    """Compute `attend_part` with plain matrix products, in at least float32."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores + mask.to(wide)
    lse = scores.logsumexp(-1)
    context = (scores - lse.unsqueeze(-1)).exp() @ value.to(wide)
    return context.to(query.dtype).transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def hide_blind_rows(part: Partial, blind: Tensor) -> Partial:
    """Give zero weight to a part for the rows that see none of its keys.

    blind: True for these rows [items, rows]. Their context becomes 0 instead of NaN, and their
    log-sum-exp becomes minus infinity.
    """
    context, lse = part
    blind = blind.unsqueeze(-1)
    return context.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


def with_sinks(context: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Rescale a context [rows, heads, head_dim] as if attention sinks had joined the softmax.

    Args:
        lse: log-sum-exp over all keys that a row sees, in the order of the context's heads.
        sinks: one score per head [heads]; None returns the context unchanged.
    """
    if sinks is None:
        return context
    # Not `torch.sigmoid`: it rounds the remainder after the last full vector differently, and the
    # other rows decide which elements are in the remainder. `exp` rounds all elements alike.
    left = 1 / (1 + (sinks.to(lse.dtype) - lse.view(context.shape[:2])).exp())
    return context * left.unsqueeze(-1).to(context.dtype)


def merge_parts(context: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Merge partial results along dimension 1, in path order.

    Absent parts come last, so a row's sum does not depend on the number of absent parts.

    Args:
        context: [rows, parts, heads..., head_dim].
        lse: [rows, parts, heads...]; minus infinity for absent parts of rows with fewer parts.
        sinks: see `with_sinks`.
    """
    weights = lse.softmax(dim=1).to(context.dtype)
    merged = (weights.unsqueeze(-1) * context).sum(dim=1)
    return merged if sinks is None else with_sinks(merged, lse.logsumexp(dim=1), sinks)
