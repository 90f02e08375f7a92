"""From scores to selected tokens: one set for each row and KV head."""

from __future__ import annotations

import torch

_FORCED = 2**31 - 1


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Softmax for each head, averaged over the heads of a group.

    scores [rows, kv_heads, group, columns], -inf where a row has no token; returns float32
    [rows, kv_heads, columns]. Sums are in float64: their last bits, which follow the number of
    columns, are rounded away.
    """
    scores = scores.float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    return weights.div_(total).mean(2)


def choose(
    wanted: torch.Tensor, seen: torch.Tensor, forced: torch.Tensor, count: int
) -> torch.Tensor:
    """The `count` columns with the largest values, in order; of equal ones the later.

    wanted [rows, kv_heads, columns], float32 and not negative; seen, forced: masks [rows, columns]
    or [rows, kv_heads, columns] of what a row may and must select, at least and at most `count`.
    Returns [rows, kv_heads, count].
    """
    seen, forced = (
        mask if mask.dim() == 3 else mask[:, None].expand_as(wanted) for mask in (seen, forced)
    )
    # Floats that are not negative are ordered like their bits: no two keys are equal.
    keys = wanted.contiguous().view(torch.int32).long().masked_fill(forced, _FORCED)
    keys = keys.masked_fill(~seen, -1)
    columns = torch.arange(wanted.shape[-1], device=wanted.device)
    best = ((keys << 32) + columns).topk(count, -1, sorted=False).values
    return (best & 0xFFFFFFFF).sort(-1).values
