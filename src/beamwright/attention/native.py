"""Decode attention on a CPU by the C library (`csrc/step.c`).

The result of a row depends only on the row's own tokens, not on other rows or on where segments
begin and end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from beamwright.attention.buckets import ResidentLayers, SharedSegments, Table
from beamwright.kv.pool import KVLayout
from beamwright.kv.tails import RowTails, Tail
from beamwright.library import (
    LANES,
    Attention,
    Model,
    NativeLayer,
    NativeSource,
    Pass,
    instruction_set,
    library,
)

_ATTENDS = 1  # number of the attention stage within a layer, see `csrc/step.c`


def can_attend(layout: KVLayout, device: torch.device) -> bool:
    """Return True if the library supports attention over KV of this layout on `device`."""
    known = layout.dtype in (torch.float32, torch.bfloat16) and layout.head_dim % LANES == 0
    return device.type == "cpu" and known and library() is not None


class NativePaths:
    """Describes a batch's packed segments and tail to the C library by pointers and offsets."""

    def __init__(self, layout: KVLayout, shared: SharedSegments, tail: Tail) -> None:
        self._layout, self._tail, self._buckets = layout, tail, shared.buckets
        entries = list[tuple[int, int, int]]()
        for number, (bucket, tokens) in enumerate(zip(shared.buckets, shared.visible, strict=True)):
            size = layout.num_kv_heads * bucket.mask.shape[-1] * layout.head_dim
            entries += [(number, place * size, count) for place, count in enumerate(tokens)]
        # Per item: number of its bucket, offset in the bucket's tensor in elements, number of
        # tokens. The last entry stands for absent parts.
        self._entries = np.array([*entries, (0, 0, 0)])
        self._places = torch.empty(0)

    def arrange(self, items: Table) -> None:
        """Set the rows' paths. items: see `RowAssignment` [rows, parts]."""
        self._places = torch.from_numpy(self._entries[items])

    def describe_layers(self) -> list[Attention] | None:
        """Describe the attention of all layers, so that the library can run a whole pass.

        Return None if some layers are not on the device, or if the tail is not a `RowTails`.
        """
        if not isinstance(self._tail, RowTails):
            return None
        whole = [
            each.layers.whole for each in self._buckets if isinstance(each.layers, ResidentLayers)
        ]
        if len(whole) < len(self._buckets):
            return None
        sources = [NativeSource(x.data_ptr(), x.stride(0), x.stride(1), x.stride(3)) for x in whole]
        held = self._tail.storage
        slots, written, rows = self._tail.passes
        spec = self._describe(sources)
        spec.own = NativeSource(held.data_ptr(), held.stride(0), held.stride(1), held.stride(3))
        spec.own_row, spec.slots = held.stride(2), slots.data_ptr()
        spec.num_written = len(slots) // (2 * self._layout.num_kv_heads)
        spec.written = None if written is None else written.data_ptr()
        spec.own_rows = None if rows is None else rows.data_ptr()
        spec.kept = spec.kept, slots, written, rows
        return [spec]

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in one layer, see `AttentionView`. The call may wait for a transfer."""
        self._tail.write(layer, key_value)
        keys, values = (each.contiguous() for each in self._tail.read(layer))
        held = [bucket.layers.layer(layer).contiguous() for bucket in self._buckets]
        sources = [
            NativeSource(data.data_ptr(), 0, data.stride(0), data.stride(2)) for data in held
        ]
        spec = self._describe(sources)
        apart = (values.data_ptr() - keys.data_ptr()) // keys.itemsize
        spec.own = NativeSource(keys.data_ptr(), 0, apart, keys.stride(1))
        spec.own_row = keys.stride(0)
        wide = None if sinks is None else sinks.float()
        spec.sinks = None if wide is None else wide.data_ptr()
        rows, heads, head_dim = query.shape
        kv_heads = self._layout.num_kv_heads
        turned = torch.empty(rows, heads + 2 * kv_heads, head_dim)
        turned[:, :heads] = query
        context = torch.empty(query.shape)
        model = Model((NativeLayer * 1)(), heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        places = {"turned": turned.data_ptr(), "context": context.data_ptr()}
        run_in_library(model, Pass(_ATTENDS, _ATTENDS + 1, rows, **places), [spec])
        return context.to(query.dtype)

    def _describe(self, sources: Sequence[NativeSource]) -> Attention:
        ends, layout = self._tail.places.contiguous(), self._layout
        spec = Attention((NativeSource * len(sources))(*sources))
        spec.places, spec.most = self._places.data_ptr(), self._places.shape[1]
        spec.ends, spec.kept = ends.data_ptr(), ends
        spec.window, spec.softcap = layout.window or 0, layout.softcap or 0.0
        spec.narrow = layout.dtype == torch.bfloat16
        return spec


def run_in_library(model: Model, given: Pass, attentions: Sequence[Attention] = ()) -> None:
    """Run the stages in `given` of `model` in the library.

    Raises:
        MemoryError: if the library cannot allocate its working memory.
    """
    pointers = [ctypes.pointer(each) for each in attentions]
    given.attentions = (ctypes.POINTER(Attention) * len(pointers))(*pointers)
    given.threads, given.set = torch.get_num_threads(), instruction_set()
    if library().bw_run(model, given):
        raise MemoryError
