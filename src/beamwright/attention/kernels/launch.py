"""Launches the attention kernels on paged KV, with work lists (`worklist`) as device tensors.

This module knows blocks, but not the segments to which the blocks belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from beamwright.attention.kernels import (
    can_overlap,
    has_small_shared_memory,
    is_hopper,
    is_interpreted,
)
from beamwright.attention.kernels.own_blocks import OwnBlocks
from beamwright.attention.kernels.programs import attend_chunks, attend_parts, merge_rows
from beamwright.attention.kernels.worklist import (
    HeadLayout,
    Tile,
    decode_tile,
    entry_size,
    prefill_tile,
)
from beamwright.kv.pool import KVBlockView

_LOG2_E = 1.4426950408889634
_PARTS = 16
_MERGE_WARPS = 2
_CODES: dict[str, int] = {"auto": 0, "int8": 1, "fp8": 2}  # values of CODES in `programs`


def heads_of(kv: KVBlockView, num_heads: int) -> HeadLayout:
    """Return how `num_heads` query heads are assigned to the KV heads of `kv`."""
    layout = kv.layout
    return HeadLayout(layout.num_kv_heads, num_heads // layout.num_kv_heads, layout.head_dim)


def tile_of_prefill(kv: KVBlockView, num_heads: int) -> Tile:
    """Return the tile size of the prefill kernel for this KV layout and GPU."""
    size, hopper = kv.layout.dtype.itemsize, is_hopper(kv.storage.device)
    return prefill_tile(heads_of(kv, num_heads), size, hopper=hopper)


class Partials:
    """Device memory for partial results of attention: a context and a log-sum-exp per slot.

    The `num_slots` slots of work items (parts of paths) come first. Then each row has one slot for
    its own newest tokens.

    Attributes:
        context: [slots, heads, head_dim], float32.
        lse: base-2 log-sum-exp [slots, heads], float32.
        first_own: the first slot of rows' own tokens.
        early: launch options of the kernels that write and read the partial results, so that one
            can start before the other has ended.
    """

    def __init__(
        self, heads: HeadLayout, num_slots: int, num_rows: int, device: torch.device
    ) -> None:
        size = (num_slots + num_rows, heads.heads)
        self.context = torch.empty((*size, heads.head_dim), dtype=torch.float32, device=device)
        self.lse = torch.empty(size, dtype=torch.float32, device=device)
        self.first_own = num_slots
        self.early = (
            {"EARLY": True, "launch_pdl": True} if can_overlap(device) else {"EARLY": False}
        )

    @property
    def num_rows(self) -> int:
        """Number of rows that have a slot for their own tokens."""
        return self.lse.shape[0] - self.first_own

    @property
    def num_bytes(self) -> int:
        """Bytes of the contexts and log-sum-exps."""
        return self.context.nbytes + self.lse.nbytes


def decode_attention(
    query: Tensor,
    key_value: Tensor,
    kv: KVBlockView,
    layer: int,
    own: OwnBlocks,
    work: Sequence[Tensor],
    partials: Partials,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the context [rows, heads, head_dim] of one token per row, in the dtype of `query`.

    The kernel also stores the keys and values of the current tokens in their blocks.

    Args:
        query: [rows, heads, head_dim].
        key_value: keys and values of the current tokens [rows, 2, kv_heads, head_dim].
        own: the blocks of each row's newest tokens, which end with the current token.
        work: the lists of a `DecodeWork` on the device.
        partials: working memory for the partial results.
        sinks: one score per head [heads] that joins the softmax without a value.
    """
    query, key_value = _packed_heads(query), _packed_heads(key_value)
    items, *entries, slot_rows, slot_reach, row_parts, row_slots = work
    num_rows, num_items = query.shape[0], items.shape[0] // 4
    heads = heads_of(kv, query.shape[1])
    tile = decode_tile(heads, query.element_size(), small=has_small_shared_memory(query.device))
    pool, strides = _pool(kv, layer)
    flags = _kernel_flags(kv)
    attend_parts[((num_rows + num_items) * heads.kv_heads,)](
        query, key_value, *pool, own.table, own.counts, partials.context, partials.lse,
        items, *entries, slot_rows, slot_reach, num_rows, partials.first_own, _scale(heads),
        query.stride(0), key_value.stride(0), *strides,
        **_sizes(heads, tile, kv, query.dtype), MOST=own.table.shape[1], **flags, **partials.early,
    )  # fmt: skip
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    merge_rows[(num_rows * heads.heads,)](
        partials.context, partials.lse, row_parts, row_slots, sinks, out, partials.first_own,
        HEADS=heads.heads, HEAD_DIM=heads.head_dim, DIM=tile.dim, PARTS=_PARTS,
        SINKS=sinks is not None, WINDOW=flags["WINDOW"], num_warps=_MERGE_WARPS, **partials.early,
    )  # fmt: skip
    return out


def prefill_attention(
    query: Tensor,
    key_value: Tensor,
    kv: KVBlockView,
    layer: int,
    work: Sequence[Tensor | None],
    num_tiles: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the context [tokens, heads, head_dim] of a prefill over packed chunks.

    The context of a token that is in no chunk is uninitialised.

    Args:
        query: [tokens, heads, head_dim].
        key_value: keys and values of the same tokens [tokens, 2, kv_heads, head_dim].
        work: the lists of a `PrefillWork` on the device; its slots are None if the kernel does not
            store keys and values.
        num_tiles: number of tiles in `work`, including empty ones.
        sinks: one score per head [heads] that joins the softmax without a value.
    """
    query, key_value = _packed_heads(query), _packed_heads(key_value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    heads, tile = heads_of(kv, query.shape[1]), tile_of_prefill(kv, query.shape[1])
    pool, strides = _pool(kv, layer)
    attend_chunks[(num_tiles * heads.kv_heads,)](
        query, *pool, key_value[:, 0], key_value[:, 1], sinks, out, *work, _scale(heads),
        query.stride(0), key_value.stride(0), *strides,
        **_sizes(heads, tile, kv, query.dtype), SINKS=sinks is not None, **_kernel_flags(kv),
    )  # fmt: skip
    return out


def _packed_heads(numbers: Tensor) -> Tensor:
    """Return `numbers`, copied if the values of one token are not contiguous.

    The stride between tokens may be larger, because `numbers` may be a slice of a larger product.
    """
    return numbers if numbers[:1].is_contiguous() else numbers.contiguous()


def _scale(heads: HeadLayout) -> float:
    return _LOG2_E / sqrt(heads.head_dim)


def _pool(kv: KVBlockView, layer: int) -> tuple[list[Tensor | None], tuple[int, int]]:
    """Return the pool's tensors of a layer, and their strides.

    The tensors are keys and values [block, token, kv_head, head_dim], and the scale exponents of
    both, which are None if KV is not quantised. The strides are of a block and of a token.
    """
    numbers = kv.storage[:, layer]
    codes = (None, None) if kv.exponents is None else kv.exponents[:, layer].unbind(1)
    return [*numbers.unbind(1), *codes], (numbers.stride(0), numbers.stride(2))


def _kernel_flags(kv: KVBlockView) -> dict[str, Any]:
    """Return the kernel arguments for softcap, window and codes, see `programs`; 0 means none."""
    layout = kv.layout
    window, softcap = layout.window or 0, layout.softcap or 0.0
    return {"SOFTCAP": softcap, "WINDOW": window, "CODES": _CODES[layout.kept]}


def _sizes(heads: HeadLayout, tile: Tile, kv: KVBlockView, dtype: torch.dtype) -> dict[str, Any]:
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
