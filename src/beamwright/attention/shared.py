"""The sealed segments of a batch, packed into buckets of similar size. Knows no operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamwright.attention.layers import Entry, Hold, LayerSource, ResidentLayers
from beamwright.attention.partial import KEY_MULTIPLE, QUERY_MULTIPLE, round_up
from beamwright.kv import Path, SegmentStore


def _power_of_four(value: int, least: int) -> int:
    size = least
    while size < value:
        size *= 4
    return size


@dataclass
class Bucket:
    """Items of one size class, padded to the same number of rows and tokens.

    layers: packed KV, per layer [K or V, item, kv_head, token, head_dim].
    mask: additive [item, 1, 1, token].
    rows: the row in each slot [item, slot]; empty slots repeat some row and are never read.
    """

    layers: LayerSource
    mask: torch.Tensor
    rows: torch.Tensor


class SharedSegments:
    """The sealed segments of a batch of paths, packed once and attended once per layer.

    `tokens_per_row` queries follow each row (1 in decode, the padded chunk in prefill).
    """

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        tokens_per_row: int,
        hold: Hold = ResidentLayers,
    ) -> None:
        layout = store.pool.layout
        self._device = store.compute_device
        self._num_kv_heads = layout.num_kv_heads
        self._tokens_per_row = tokens_per_row
        items: dict[tuple[int, int], list[int]] = {}
        parts = {}
        for row, path in enumerate(paths):
            for part in path:
                key = (id(part.segment), part.visible)
                items.setdefault(key, []).append(row)
                parts[key] = part
        classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for key, rows in items.items():
            size = (_power_of_four(len(rows), 1), _power_of_four(parts[key].visible, 32))
            classes.setdefault(size, []).append(key)
        self.buckets: list[Bucket] = []
        slot_of: dict[tuple[tuple[int, int], int], int] = {}
        num_slots = num_bytes = 0
        for keys in classes.values():
            chosen = [(parts[key], items[key]) for key in keys]
            width = max(len(rows) for _, rows in chosen)
            tokens = round_up(max(part.visible for part, _ in chosen), KEY_MULTIPLE)
            mask = torch.full(
                (len(keys), 1, 1, tokens), -torch.inf, dtype=layout.dtype, device=self._device
            )
            slots = torch.zeros(len(keys), width, dtype=torch.long)
            for i, (part, rows) in enumerate(chosen):
                mask[i, :, :, : part.visible] = 0.0
                slots[i, : len(rows)] = torch.tensor(rows)
                for j, row in enumerate(rows):
                    slot_of[keys[i], row] = num_slots + i * width + j
            entries = [Entry((part,), tuple(rows)) for part, rows in chosen]
            layers = hold(store, entries, tokens)
            self.buckets.append(Bucket(layers, mask, slots.to(self._device)))
            num_bytes += layout.bytes_per_token * len(keys) * tokens
            num_slots += len(keys) * width
        self.num_slots = num_slots
        self.part_slots = [
            [slot_of[(id(part.segment), part.visible), row] for part in path]
            for row, path in enumerate(paths)
        ]
        self._scratch, self._counted = store.scratch, num_bytes
        self._scratch.add(num_bytes)

    def close(self) -> None:
        """Give back the packed copies' bytes."""
        self._scratch.add(-self._counted)
        self._counted = 0

    def query_index(self, bucket: Bucket) -> tuple[torch.Tensor, int]:
        """Where each padded query row of a bucket comes from.

        Returns an index into [row * tokens_per_row * kv_heads] query groups in the order
        (item, kv_head, slot, token), and the number of (slot, token) pairs that are real.
        """
        heads = torch.arange(self._num_kv_heads, device=self._device)
        steps = torch.arange(self._tokens_per_row, device=self._device)
        flat = bucket.rows[:, :, None] * self._tokens_per_row + steps
        flat = flat.flatten(1)
        real = flat.shape[1]
        padded = round_up(real, QUERY_MULTIPLE)
        if padded > real:
            flat = torch.cat([flat, flat[:, :1].expand(-1, padded - real)], dim=1)
        index = flat[:, None, :] * self._num_kv_heads + heads[None, :, None]
        return index.flatten(), real
