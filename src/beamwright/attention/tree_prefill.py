"""Prefill with tree attention: each stored segment is attended once by all new tokens below it.

The queries of a segment are the new tokens of its rows, packed one after the other, so no row is
padded to the longest. Segments that are read by similar numbers of tokens are attended in one
product. The grouping affects only speed, because the result of a token is bitwise independent of
the other tokens in its product (`attention.parts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beamwright.attention.buckets import (
    LEAST_KEYS,
    Hold,
    LayerSource,
    ResidentLayers,
    SharedPart,
    WrittenLayers,
    find_shared_parts,
    part_width,
    size_class,
    tokens_after,
)
from beamwright.attention.parts import (
    KEY_MULTIPLE,
    attend_part,
    hide_blind_rows,
    round_up,
    with_sinks,
)
from beamwright.attention.protocols import AttentionView
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore

Table = npt.NDArray[np.int64]

# Maximum number of padding tokens in a product. More would cost as much as a second product.
SPARE_TOKENS = 128


@dataclass
class _Product:
    """Describes the items that one call of the attention operator computes.

    An item is a sealed (stored) segment, or a row with its new tokens. Each slot of an item is one
    query token.
    """

    # Keys and values of sealed segments; None: items are rows that attend to their own new tokens.
    layers: LayerSource | None
    # The query token of each slot [item, slot]. Padding repeats a token and is never read.
    tokens: Tensor
    # Additive mask: [item, 1, 1, key] for sealed keys, [1, 1, slot, key] for new keys, and [item,
    # 1, slot, key] for sealed keys with a window. `_allocate` repeats the slots for all query heads
    # of a group.
    mask: Tensor
    # True for queries whose window contains none of the keys [item, slot * group]; None: no window.
    blind: Tensor | None = None


class TreePrefill(AttentionView):
    """A prefill view: new tokens attend to shared segments, then causally to their own row."""

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        hold: Hold = ResidentLayers,
    ) -> None:
        self._store, self._hold, self._layout = store, hold, store.kv.layout
        self._lengths, self._starts = lengths, [0, *accumulate(lengths)]
        self._num_slots = self._counted = 0
        # Per new token, the slots of its path's parts, then the slot of its row's new tokens; -1
        # for absent parts.
        most = max(len(path) for path in paths) + 1
        self._tokens_after = [tokens_after(path) for path in paths]
        self._slots: Table = np.full((self._starts[-1], most), -1)
        self._products = [
            self._sealed_product(items) for items in _group_items(find_shared_parts(paths, lengths))
        ]
        self._products += self._new_products([len(path) for path in paths])
        heads = torch.arange(store.kv.layout.num_kv_heads, device=store.compute_device)
        self._index = [
            (product.tokens[:, None, :] * len(heads) + heads[None, :, None]).flatten()
            for product in self._products
        ]
        self._context = self._lse = self._flat = torch.empty(0)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        num_tokens, heads, head_dim = query.shape
        kv_heads, at = key_value.shape[2], 0
        if not self._flat.numel():
            self._allocate(query, kv_heads)
        queries = query.reshape(num_tokens * kv_heads, -1)
        for product, index in zip(self._products, self._index, strict=True):
            keys, values = _keys_values(product, layer, key_value)
            asking = queries.index_select(0, index).view(len(keys), kv_heads, -1, head_dim)
            context, lse = attend_part(asking, keys, values, product.mask, self._layout.softcap)
            if product.blind is not None:
                context, lse = hide_blind_rows((context, lse), product.blind)
            part = context.view(-1, *self._context.shape[1:])
            self._context[at : at + len(part)] = part
            self._lse[at : at + len(part)] = lse.view(-1, *self._lse.shape[1:])
            at += len(part)
        # Per token and part: the context [group, kv_head, head_dim], and its log-sum-exp.
        shape, index = self._flat.shape, self._flat.flatten()
        picked = self._context.index_select(0, index).view(*shape, *self._context.shape[1:])
        weights = self._lse.index_select(0, index).view(*shape, *self._lse.shape[1:])
        total = None if sinks is None else weights.logsumexp(dim=1).transpose(1, 2)
        weights = weights.softmax(dim=1).to(picked.dtype)
        merged = picked.mul_(weights.unsqueeze(-1)).sum(dim=1)
        out = merged.transpose(1, 2).reshape(num_tokens, heads, head_dim)
        return out if total is None else with_sinks(out, total.reshape(num_tokens, heads), sinks)

    def close(self) -> None:
        self._store.scratch.count_unchecked(-self._counted)
        self._counted = 0

    # --- tables ------------------------------------------------------------------------------

    def _sealed_product(self, items: Sequence[SharedPart]) -> _Product:
        """Make one product of several stored segments, and enter its slots into `_slots`."""
        layout, device = self._layout, self._store.compute_device
        width = round_up(max(item.num_tokens for item in items), KEY_MULTIPLE)
        num_keys = part_width(max(item.part.visible for item in items), layout)
        tokens: Table = np.empty((len(items), width), dtype=np.int64)
        asking = 1 if layout.window is None else width
        mask = np.full((len(items), 1, asking, num_keys), -np.inf, dtype=np.float32)
        for number, item in enumerate(items):
            at = 0
            for row, place in item.rows:
                begin, end = self._starts[row : row + 2]
                tokens[number, at : at + end - begin] = np.arange(begin, end)
                first = self._num_slots + number * width + at
                self._slots[begin:end, place] = np.arange(first, first + end - begin)
                if layout.window is not None:
                    # Distance of each new token from the part's first token, then from each key.
                    ahead = (
                        self._tokens_after[row][place] + item.part.visible + np.arange(end - begin)
                    )
                    far = ahead[:, None] - np.arange(item.part.visible) >= layout.window
                    seen = mask[number, 0, at : at + end - begin, : item.part.visible]
                    seen[~far] = 0.0
                at += end - begin
            tokens[number, at:] = tokens[number, 0]
            if layout.window is None:
                mask[number, :, :, : item.part.visible] = 0.0
        self._num_slots += tokens.size
        hold = self._hold if items[0].written else WrittenLayers
        layers = hold(self._store, [item.entry for item in items], num_keys)
        num_bytes = layout.read_bytes_per_token * len(items) * num_keys
        self._counted += num_bytes
        self._store.scratch.count_unchecked(num_bytes)
        return _Product(
            layers,
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(mask).to(device, layout.dtype),
        )

    def _new_products(self, places: Sequence[int]) -> Iterator[_Product]:
        """Yield the products in which rows attend to their own new tokens.

        Rows with the same padded length are in one product.

        places: per row, the column of the new tokens in the table of slots, after the path's parts.
        """
        dtype, device, window = self._layout.dtype, self._store.compute_device, self._layout.window
        classes: dict[int, list[int]] = {}
        for row, length in enumerate(self._lengths):
            classes.setdefault(part_width(length, self._layout), []).append(row)
        for width, rows in classes.items():
            tokens: Table = np.empty((len(rows), width), dtype=np.int64)
            for number, row in enumerate(rows):
                begin, end = self._starts[row : row + 2]
                tokens[number, : end - begin] = np.arange(begin, end)
                tokens[number, end - begin :] = end - 1
                first = self._num_slots + number * width
                self._slots[begin:end, places[row]] = np.arange(first, first + end - begin)
            self._num_slots += tokens.size
            hidden = torch.full((1, 1, width, width), -torch.inf, dtype=dtype)
            causal = hidden.triu(1) if window is None else hidden.triu(1) + hidden.tril(-window)
            yield _Product(None, torch.from_numpy(tokens).to(device), causal.to(device))

    def _allocate(self, query: Tensor, kv_heads: int) -> None:
        """Allocate the tensors that all layers use.

        Padding tokens at the end of the batch read the same slots as the first token. The last slot
        of the partial results stands for absent parts; its weight is always zero.
        """
        num_tokens, heads, head_dim = query.shape
        padding = np.repeat(self._slots[:1], num_tokens - len(self._slots), axis=0)
        slots = np.concatenate([self._slots, padding])
        slots[slots < 0] = self._num_slots
        self._flat, group = torch.from_numpy(slots).to(query.device), heads // kv_heads
        self._context = query.new_zeros(self._num_slots + 1, group, kv_heads, head_dim)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self._lse = torch.full_like(self._context[..., 0], -torch.inf, dtype=wide)
        for product in self._products:
            if product.mask.shape[2] > 1:
                product.mask = product.mask.repeat_interleave(group, dim=2)
            if product.layers is not None and self._layout.window is not None:
                product.blind = product.mask.isinf().all(-1).squeeze(1)


def _keys_values(product: _Product, layer: int, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Return a product's keys and values, each [item, kv_head, key, head_dim].

    fresh: keys and values of the new tokens [tokens, 2, kv_heads, head_dim].
    """
    if product.layers is not None:
        keys, values = product.layers.layer(layer)
        return keys, values
    own = fresh.index_select(0, product.tokens.flatten())
    own = own.view(*product.tokens.shape, *fresh.shape[1:])
    return own[:, :, 0].transpose(1, 2), own[:, :, 1].transpose(1, 2)


def _group_items(items: Sequence[SharedPart]) -> list[list[SharedPart]]:
    """Group items with similar numbers of keys and queries into products.

    Items that this pass has to write first get products of their own.
    """
    classes: dict[tuple[int, bool], list[SharedPart]] = {}
    for item in items:
        key = size_class(item.part.visible, LEAST_KEYS), item.written
        classes.setdefault(key, []).append(item)
    groups: list[list[SharedPart]] = []
    for alike in classes.values():
        alike.sort(key=lambda item: -item.num_tokens)
        spare = 0
        for number, item in enumerate(alike):
            spare += groups[-1][0].num_tokens - item.num_tokens if number else 0
            if not number or spare > SPARE_TOKENS:
                groups.append([])
                spare = 0
            groups[-1].append(item)
    return groups
