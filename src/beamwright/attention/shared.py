"""The sealed segments of a batch, packed into buckets of similar size. Knows no operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamwright.attention.layers import Entry, Hold, LayerSource, ResidentLayers
from beamwright.attention.partial import KEY_MULTIPLE, QUERY_MULTIPLE, round_up
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore

LEAST_KEYS = 32
"""Keys of the smallest size class."""


def size_class(value: int, least: int) -> int:
    """`value` rounded up to `least` times a power of four."""
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
    """The sealed segments of a batch of paths, packed once and attended once per layer."""

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        hold: Hold = ResidentLayers,
    ) -> None:
        layout = store.pool.layout
        self._device = store.compute_device
        self._num_kv_heads = layout.num_kv_heads
        items: dict[tuple[int, int], list[int]] = {}
        parts = {}
        for row, path in enumerate(paths):
            for part in path:
                key = (id(part.segment), part.visible)
                items.setdefault(key, []).append(row)
                parts[key] = part
        classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for key, rows in items.items():
            size = (size_class(len(rows), 1), size_class(parts[key].visible, LEAST_KEYS))
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

        Returns an index into [row * kv_heads] query groups in the order (item, kv_head, slot), and
        the number of slots that are real.
        """
        heads = torch.arange(self._num_kv_heads, device=self._device)
        rows = bucket.rows
        real = rows.shape[1]
        padded = round_up(real, QUERY_MULTIPLE)
        if padded > real:
            rows = torch.cat([rows, rows[:, :1].expand(-1, padded - real)], dim=1)
        index = rows[:, None, :] * self._num_kv_heads + heads[None, :, None]
        return index.flatten(), real
