"""Attention for models that mix layer types, such as full attention and sliding windows.

Layers with the same KV layout and window form a group. Each group has its own KV and tails, and a
view that the wrapped backend makes. A group's view reads only the part of each path that is inside
the group's window (`kv.segments.parts_read`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from beamwright.attention.protocols import AttentionBackend, DecodeView, Workspace
from beamwright.kv.segments import Path, parts_read
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import SessionTail
from beamwright.library import Attention

# For each layer, the number of its group, and its index among the group's layers. A layer that
# reads the KV of another layer has the same entry as that layer.
Places = Mapping[int, tuple[int, int]]


def call_each(name: str) -> Callable[..., None]:
    """Make a method that calls the method `name` of each object in `self.parts`, in order."""

    def call(self: Any, *args: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args)

    return call


class LayerGroupTails:
    """A `SessionTail` that passes each call on to the tails (newest KV of rows) of all groups.

    All groups have the same rows. `restore` and `take` handle one tensor per group.
    """

    def __init__(self, parts: Sequence[SessionTail]) -> None:
        self.parts = tuple(parts)

    arrange, advance = call_each("arrange"), call_each("advance")
    set_segments, set_lengths = call_each("set_segments"), call_each("set_lengths")
    begin_multi_token_pass = call_each("begin_multi_token_pass")
    end_multi_token_pass = call_each("end_multi_token_pass")
    close, release = call_each("close"), call_each("release")

    @property
    def num_rows(self) -> int:
        """Number of rows, which is the same in all groups."""
        return self.parts[0].num_rows

    @property
    def num_tokens(self) -> int:
        """Number of tokens per row, which is the same in all groups."""
        return self.parts[0].num_tokens

    @property
    def num_moves(self) -> int:
        """How often memory was reallocated, summed over the groups."""
        return sum(part.num_moves for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tails of all groups."""
        return sum(part.num_bytes for part in self.parts)

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Put tokens back into the tail of `row`.

        held: for each group, a tensor [layers, 2, tokens, kv_heads, head_dim].
        """
        for part, tokens in zip(self.parts, held, strict=True):
            part.restore(row, [tokens])

    def read_tokens(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Return the KV of the tail tokens `parts`, as one tensor per group.

        parts: (row, first, end), a range of tokens for each row.
        """
        return [values for each in self.parts for values in each.read_tokens(parts)]


class GroupedView(DecodeView):
    """A view that calls, for each layer, the view of the layer's group."""

    def __init__(self, places: Places, views: Sequence[Any]) -> None:
        self._places, self.parts = places, views

    prepare, close = call_each("prepare"), call_each("close")
    keep_rows, set_query_rows = call_each("keep_rows"), call_each("set_query_rows")
    set_num_rows, deactivate_rows = call_each("set_num_rows"), call_each("deactivate_rows")

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        group, place = self._places[layer]
        context: Tensor = self.parts[group].attend(place, query, key_value, sinks)
        return context

    def describe_layers(self) -> list[Attention] | None:
        descriptions = [part.describe_layers() for part in self.parts]
        return None if None in descriptions else [each for part in descriptions for each in part]


class GroupedWorkspace:
    """A `Workspace` that consists of the workspaces of all groups."""

    def __init__(self, parts: Sequence[Workspace]) -> None:
        self.parts = parts

    release = call_each("release")

    @property
    def num_moves(self) -> int:
        """How often memory was reallocated, summed over the groups."""
        return sum(part.num_moves for part in self.parts)


class GroupedAttention(AttentionBackend):
    """A backend that runs the wrapped backend `inner` for each group of a model's layers."""

    def __init__(self, inner: AttentionBackend, places: Places) -> None:
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self.copies_per_beam, self.sets_query_rows = inner.copies_per_beam, inner.sets_query_rows
        self.writes_blocks, self.prefill_writes_kv = inner.writes_blocks, inner.prefill_writes_kv
        self.holds_block_numbers = inner.holds_block_numbers
        self._inner, self._places = inner, places

    def make_tail(self, store: Any, group: int = 0, *, stays: bool = False) -> SessionTail:
        groups = enumerate(store.groups, start=group)
        tails = [self._inner.make_tail(each, n, stays=stays) for n, each in groups]
        return tails[0] if len(tails) == 1 else LayerGroupTails(tails)

    def workspace(self, store: SegmentStore) -> GroupedWorkspace | None:
        parts = [self._inner.workspace(group) for group in store.groups]
        shared = [part for part in parts if part is not None]
        return GroupedWorkspace(shared) if shared else None

    def prefill_workspace(
        self, store: SegmentStore, num_heads: int, num_tokens: int
    ) -> GroupedWorkspace:
        make, sizes = self._inner.prefill_workspace, (num_heads, num_tokens)
        return GroupedWorkspace([make(group, *sizes) for group in store.groups])

    def decode_view(
        self, store: SegmentStore, paths: Sequence[Path], tail: Any, *workspace: GroupedWorkspace
    ) -> GroupedView:
        own = [getattr(tail, "parts", (tail,)), *(each.parts for each in workspace)]
        return self._view(self._inner.decode_view, store, paths, own)

    def prefill_view(
        self, store: Any, paths: Sequence[Path], lengths: Any, slots: Any = (), *workspace: Any
    ) -> GroupedView:
        """Make a prefill view for `lengths[i]` new tokens after path i.

        slots: per group, the places in the pool for the KV of the new tokens, for backends whose
        views write KV themselves; otherwise empty.
        """
        own = [[lengths] * len(store.groups), [[each] for each in slots]]
        own += [each.parts for each in workspace]
        return self._view(self._inner.prefill_view, store, paths, [each for each in own if each])

    def _view(
        self, make: Any, store: SegmentStore, paths: Sequence[Path], own: Sequence[Any]
    ) -> GroupedView:
        """Make one view per group, and combine them.

        make: the inner backend's method that makes a view. own: its further arguments, each with
            one value per group.
        """
        views = [
            make(group, [parts_read(path, number) for path in paths], *mine)
            for number, (group, *mine) in enumerate(zip(store.groups, *own, strict=True))
        ]
        return GroupedView(self._places, views)
