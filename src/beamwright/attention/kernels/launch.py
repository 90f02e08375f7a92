"""Starts the kernels on blocks of KV. Knows work lists as tensors, no segments and no stores."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from beamwright.attention.kernels import begins_early, is_hopper, is_interpreted, is_small
from beamwright.attention.kernels.own import OwnBlocks
from beamwright.attention.kernels.programs import attend_chunks, attend_parts, merge_rows
from beamwright.attention.kernels.worklist import (
    HeadLayout,
    Tile,
    decode_tile,
    entry_size,
    prefill_tile,
)
from beamwright.kv.pool import KVBlocks

_LOG2_E = 1.4426950408889634
_PARTS = 16
_MERGE_WARPS = 2
_CODES: dict[str, int] = {"auto": 0, "int8": 1, "fp8": 2}  # as `programs` calls them


def heads_of(kv: KVBlocks, num_heads: int) -> HeadLayout:
    """How a layer's query heads read these KV heads."""
    layout = kv.layout
    return HeadLayout(layout.num_kv_heads, num_heads // layout.num_kv_heads, layout.head_dim)


def tile_of_prefill(kv: KVBlocks, num_heads: int) -> Tile:
    """The tile of a prefill over this KV."""
    size, hopper = kv.layout.dtype.itemsize, is_hopper(kv.storage.device)
    return prefill_tile(heads_of(kv, num_heads), size, hopper=hopper)


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
    kv: KVBlocks,
    layer: int,
    own: OwnBlocks,
    work: Sequence[Tensor],
    partials: Partials,
    sinks: Tensor | None = None,
) -> Tensor:
    """Context [rows, heads, head_dim] of one token per row, in the dtype of `query`.

    query: [rows, heads, head_dim]; key_value: [rows, 2, kv_heads, head_dim].
    own: where each row's newest tokens are, at least one; the last is the current token, stored
        here. work: the lists of a `DecodeWork` on the device.
    """
    query, key_value = _packed_heads(query), _packed_heads(key_value)
    items, *entries, slot_rows, slot_reach, row_parts, row_slots = work
    num_rows, num_items = query.shape[0], items.shape[0] // 4
    heads = heads_of(kv, query.shape[1])
    tile = decode_tile(heads, query.element_size(), small=is_small(query.device))
    pool, strides = _pool(kv, layer)
    rule = _rule(kv)
    attend_parts[((num_rows + num_items) * heads.kv_heads,)](
        query, key_value, *pool, own.table, own.counts, partials.context, partials.lse,
        items, *entries, slot_rows, slot_reach, num_rows, partials.first_own, _scale(heads),
        query.stride(0), key_value.stride(0), *strides,
        **_sizes(heads, tile, kv, query.dtype), MOST=own.table.shape[1], **rule, **partials.early,
    )  # fmt: skip
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    merge_rows[(num_rows * heads.heads,)](
        partials.context, partials.lse, row_parts, row_slots, sinks, out, partials.first_own,
        HEADS=heads.heads, HEAD_DIM=heads.head_dim, DIM=tile.dim, PARTS=_PARTS,
        SINKS=sinks is not None, WINDOW=rule["WINDOW"], num_warps=_MERGE_WARPS, **partials.early,
    )  # fmt: skip
    return out


def prefill_attention(
    query: Tensor,
    key_value: Tensor,
    kv: KVBlocks,
    layer: int,
    work: Sequence[Tensor | None],
    num_tiles: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Context [tokens, heads, head_dim] of packed chunks: what is in none is whatever was there.

    query: [tokens, heads, head_dim]; key_value: [tokens, 2, kv_heads, head_dim].
    work: the lists of a `PrefillWork` on the device, with so many tiles; None for its slots where
        nothing is kept.
    """
    query, key_value = _packed_heads(query), _packed_heads(key_value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    heads, tile = heads_of(kv, query.shape[1]), tile_of_prefill(kv, query.shape[1])
    pool, strides = _pool(kv, layer)
    attend_chunks[(num_tiles * heads.kv_heads,)](
        query, *pool, key_value[:, 0], key_value[:, 1], sinks, out, *work, _scale(heads),
        query.stride(0), key_value.stride(0), *strides,
        **_sizes(heads, tile, kv, query.dtype), SINKS=sinks is not None, **_rule(kv),
    )  # fmt: skip
    return out


def _packed_heads(numbers: Tensor) -> Tensor:
    """What is of a token next to each other; tokens may lie apart (they are cut from a product)."""
    return numbers if numbers[:1].is_contiguous() else numbers.contiguous()


def _scale(heads: HeadLayout) -> float:
    return _LOG2_E / sqrt(heads.head_dim)


def _pool(kv: KVBlocks, layer: int) -> tuple[list[Tensor | None], tuple[int, int]]:
    """A layer's keys and values [block, token, kv_head, head_dim], the exponents of both, None
    where there are no codes; and the strides of a block and of a token."""
    numbers = kv.storage[:, layer]
    codes = (None, None) if kv.exponents is None else kv.exponents[:, layer].unbind(1)
    return [*numbers.unbind(1), *codes], (numbers.stride(0), numbers.stride(2))


def _rule(kv: KVBlocks) -> dict[str, Any]:
    """What a layer's attention does beside attending, see `programs`; 0 for none of it."""
    layout = kv.layout
    window, softcap = layout.window or 0, layout.softcap or 0.0
    return {"SOFTCAP": softcap, "WINDOW": window, "CODES": _CODES[layout.kept]}


def _sizes(heads: HeadLayout, tile: Tile, kv: KVBlocks, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "KV_HEADS": heads.kv_heads,
        "GROUP": heads.group,
        "HEAD_DIM": heads.head_dim,
        "DIM": tile.dim,
        "ENTRY_TOKENS": entry_size(kv.block_tokens),
        "PIECES": kv.block_tokens // entry_size(kv.block_tokens),
        "PAIRS": tile.pairs,
        "TOKENS": tile.tokens,
        "WIDE": dtype == torch.bfloat16 and is_interpreted(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
