"""Attention of models whose layers are in groups: a view for each group, and who reads what.

A group's view is the backend's own, over the group's KV and tail, and over what its window reaches
of each path (`kv.segments.within_reach`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from beamwright.kv.groups import GroupTails, to_each
from beamwright.kv.segments import Path, within_reach
from beamwright.kv.store import SegmentStore

Places = Mapping[int, tuple[int, int]]
"""By layer: its group, and its place among the group's. A layer without KV has its source's."""


class GroupedView:
    """A view of each group, as one."""

    def __init__(self, places: Places, views: Sequence[Any]) -> None:
        self._places, self.parts = places, views

    prepare, close = to_each("prepare"), to_each("close")  # only some have a workspace to prepare
    keep_rows, spread = to_each("keep_rows"), to_each("spread")
    count_rows, drop_rows = to_each("count_rows"), to_each("drop_rows")

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        group, place = self._places[layer]
        context: Tensor = self.parts[group].attend(place, query, key_value, sinks)
        return context


class GroupedWorkspace:
    """What each group's views share, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    release = to_each("release")

    @property
    def num_moves(self) -> int:
        """Of all groups."""
        return sum(part.num_moves for part in self.parts)


class GroupedAttention:
    """A backend, for every group of a model's layers."""

    def __init__(self, inner: Any, places: Places) -> None:
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self.spreads = getattr(inner, "spreads", False)
        self.copies_per_beam, self._inner, self._places = inner.copies_per_beam, inner, places
        if (make := getattr(inner, "workspace", None)) is not None:
            self.workspace = lambda store: GroupedWorkspace([make(g) for g in store.groups])
        self.keeps = getattr(inner, "keeps", False)
        if (lists := getattr(inner, "prefill_workspace", None)) is not None:
            self.prefill_workspace = lambda store, *sizes: GroupedWorkspace(
                [lists(group, *sizes) for group in store.groups]
            )
        if (tail := getattr(inner, "make_tail", None)) is not None:
            self.make_tail = lambda store, spare: GroupTails(
                [tail(group, spare, number) for number, group in enumerate(store.groups)]
            )

    def decode_view(
        self, store: SegmentStore, paths: Sequence[Path], tail: Any, workspace: Any = None
    ) -> GroupedView:
        """A view for one token per row."""
        views = []
        for number, group in enumerate(store.groups):
            shared = () if workspace is None else (workspace.parts[number],)
            reached = [within_reach(path, number) for path in paths]
            own = tail.parts[number] if hasattr(tail, "parts") else tail
            views.append(self._inner.decode_view(group, reached, own, *shared))
        return GroupedView(self._places, views)

    def prefill_view(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        slots: Sequence[Any] | None = None,
        workspace: Any = None,
    ) -> GroupedView:
        """A view for `lengths[i]` new tokens after path i. slots: of each group."""
        views = []
        for number, group in enumerate(store.groups):
            own = () if slots is None else (slots[number : number + 1],)
            shared = () if workspace is None else (workspace.parts[number],)
            reached = [within_reach(path, number) for path in paths]
            views.append(self._inner.prefill_view(group, reached, lengths, *own, *shared))
        return GroupedView(self._places, views)
