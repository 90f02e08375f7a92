"""Starts the kernels on tensors. Knows work lists as tensors, no segments and no stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from beamwright.attention.kernels import begins_early, is_interpreted
from beamwright.attention.kernels.programs import attend_chunks, attend_parts, merge_rows
from beamwright.attention.kernels.worklist import HeadLayout, Tile, entry_size

_LOG2_E = 1.4426950408889634
_PARTS = 16
_MERGE_WARPS = 2


@dataclass(frozen=True)
class Rule:
    """What a layer's attention does beside attending; see `programs`. 0 for none of it.

    exponents: of a pool's codes, as `layer` without head_dim.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    codes: int = 0
    exponents: Tensor | None = None


_PLAIN = Rule()


class Partials:
    """Partial results: context [slots, heads, head_dim] and base-2 log-sum-exp [slots, heads].

    Of so many slots of work items; a slot per row, of its own tokens, follows the `first_own` ones.
    early: options of the kernels that write and read them.
    """

    def __init__(
        self, heads: HeadLayout, num_slots: int, num_rows: int, device: torch.device
    ) -> None:
        size = (num_slots + num_rows, heads.heads)
        self.context = torch.empty((*size, heads.head_dim), dtype=torch.float32, device=device)
        self.lse = torch.empty(size, dtype=torch.float32, device=device)
        self.first_own = num_slots
        self.early = (
            {"EARLY": True, "launch_pdl": True} if begins_early(device) else {"EARLY": False}
        )

    @property
    def num_rows(self) -> int:
        """Rows whose own tokens have a slot."""
        return self.lse.shape[0] - self.first_own

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.context.nbytes + self.lse.nbytes


def decode_attention(
    query: Tensor,
    key_value: Tensor,
    layer: Tensor,
    own_blocks: Tensor,
    num_own: Tensor,
    work: Sequence[Tensor],
    partials: Partials,
    heads: HeadLayout,
    tile: Tile,
    rule: Rule = _PLAIN,
) -> Tensor:
    """Context [rows, heads, head_dim] of one token per row, in the dtype of `query`.

    query: [rows, heads, head_dim]; key_value: [rows, 2, kv_heads, head_dim].
    layer: one layer of the pool, [blocks, K or V, token, kv_head, head_dim]; see `Rule.codes`.
    own_blocks [rows, most] int32: entries of the pool with each row's newest tokens; num_own [rows]
        int32: how many, at least one. The last of them is the current token, stored here.
    work: the lists of a `DecodeWork` on the device.
    """
    query, key_value = _packed_heads(query), _packed_heads(key_value)
    items, *entries, slot_rows, slot_reach, row_parts, row_slots = work
    num_rows, num_items = query.shape[0], items.shape[0] // 4
    attend_parts[((num_rows + num_items) * heads.kv_heads,)](
        query, key_value, layer[:, 0], layer[:, 1], *_exponents(rule),
        own_blocks, num_own, partials.context, partials.lse,
        items, *entries, slot_rows, slot_reach, num_rows, partials.first_own, _scale(heads),
        query.stride(0), key_value.stride(0), layer.stride(0), layer.stride(2),
        **_sizes(heads, tile, layer, query.dtype), MOST=own_blocks.shape[1],
        SOFTCAP=rule.softcap, WINDOW=rule.window, CODES=rule.codes, **partials.early,
    )  # fmt: skip
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    merge_rows[(num_rows * heads.heads,)](
        partials.context, partials.lse, row_parts, row_slots, rule.sinks, out,
        partials.first_own,
        HEADS=heads.heads, HEAD_DIM=heads.head_dim, DIM=tile.dim, PARTS=_PARTS,
        SINKS=rule.sinks is not None, WINDOW=rule.window, num_warps=_MERGE_WARPS,
        **partials.early,
    )  # fmt: skip
    return out


def prefill_attention(
    query: Tensor,
    key_value: Tensor,
    layer: Tensor,
    work: Sequence[Tensor | None],
    num_tiles: int,
    heads: HeadLayout,
    tile: Tile,
    rule: Rule = _PLAIN,
) -> Tensor:
    """Context [tokens, heads, head_dim] of packed chunks: what is in none is whatever was there.

    query: [tokens, heads, head_dim]; key_value: [tokens, 2, kv_heads, head_dim].
    layer: as in `decode_attention`. work: the lists of a `PrefillWork` on the device, with so many
    tiles; None for its slots where nothing is kept.
    """
    query, key_value = _packed_heads(query), _packed_heads(key_value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attend_chunks[(num_tiles * heads.kv_heads,)](
        query, layer[:, 0], layer[:, 1], *_exponents(rule), key_value[:, 0], key_value[:, 1],
        rule.sinks, out,
        *work, _scale(heads),
        query.stride(0), key_value.stride(0), layer.stride(0), layer.stride(2),
        **_sizes(heads, tile, layer, query.dtype),
        SINKS=rule.sinks is not None, SOFTCAP=rule.softcap, WINDOW=rule.window, CODES=rule.codes,
    )  # fmt: skip
    return out


def _packed_heads(numbers: Tensor) -> Tensor:
    """What is of a token next to each other; tokens may lie apart (they are cut from a product)."""
    return numbers if numbers[:1].is_contiguous() else numbers.contiguous()


def _scale(heads: HeadLayout) -> float:
    return _LOG2_E / sqrt(heads.head_dim)


def _exponents(rule: Rule) -> tuple[Tensor | None, Tensor | None]:
    """Of keys and of values."""
    found = rule.exponents
    return (None, None) if found is None else (found[:, 0], found[:, 1])


def _sizes(
    heads: HeadLayout, tile: Tile, layer: Tensor, dtype: torch.dtype
) -> dict[str, int | bool]:
    return {
        "KV_HEADS": heads.kv_heads,
        "GROUP": heads.group,
        "HEAD_DIM": heads.head_dim,
        "DIM": tile.dim,
        "ENTRY_TOKENS": entry_size(layer.shape[2]),
        "PIECES": layer.shape[2] // entry_size(layer.shape[2]),
        "PAIRS": tile.pairs,
        "TOKENS": tile.tokens,
        "WIDE": dtype == torch.bfloat16 and is_interpreted(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
