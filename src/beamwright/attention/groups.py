"""Attention of models whose layers are in groups: a view and tails for each, and who reads what.

A group's view is the backend's own, over the group's KV and tail, and over what its window reaches
of each path (`kv.segments.within_reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from beamwright.attention.protocols import AttentionBackend, DecodeView, Workspace
from beamwright.kv.segments import Path, within_reach
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import SessionTail
from beamwright.library import Attention

Places = Mapping[int, tuple[int, int]]
"""By layer: its group, and its place among the group's. A layer without KV has its source's."""


def to_each(name: str) -> Callable[..., None]:
    """A method that calls the one of that name of every one of `self.parts`, in order."""

    def call(self: Any, *args: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args)

    return call


class GroupTails:
    """Tails of all groups, whose rows are the same, as one `SessionTail`.

    What is restored and taken of a row are a group's tokens, by group.
    """

    def __init__(self, parts: Sequence[SessionTail]) -> None:
        self.parts = tuple(parts)

    arrange, begin, advance = to_each("arrange"), to_each("begin"), to_each("advance")
    find = to_each("find")
    spread, together = to_each("spread"), to_each("together")
    close, release = to_each("close"), to_each("release")

    @property
    def num_rows(self) -> int:
        """Of any group."""
        return self.parts[0].num_rows

    @property
    def num_tokens(self) -> int:
        """Of any group."""
        return self.parts[0].num_tokens

    @property
    def num_moves(self) -> int:
        """How often memory was allocated anew."""
        return sum(part.num_moves for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Of all groups."""
        return sum(part.num_bytes for part in self.parts)

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Put back a row's tokens, [layers, 2, tokens, kv_heads, head_dim] by group."""
        for part, tokens in zip(self.parts, held, strict=True):
            part.restore(row, [tokens])

    def take(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Tokens of rows, by group."""
        return [values for each in self.parts for values in each.take(parts)]


class GroupedView(DecodeView):
    """A view of each group, as one."""

    def __init__(self, places: Places, views: Sequence[Any]) -> None:
        self._places, self.parts = places, views

    prepare, close = to_each("prepare"), to_each("close")
    keep_rows, spread = to_each("keep_rows"), to_each("spread")
    count_rows, drop_rows = to_each("count_rows"), to_each("drop_rows")

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        group, place = self._places[layer]
        context: Tensor = self.parts[group].attend(place, query, key_value, sinks)
        return context

    def described(self) -> list[Attention] | None:
        found = [part.described() for part in self.parts]
        return None if None in found else [each for part in found for each in part]


class GroupedWorkspace:
    """The `Workspace` of each group's views."""

    def __init__(self, parts: Sequence[Workspace]) -> None:
        self.parts = parts

    release = to_each("release")

    @property
    def num_moves(self) -> int:
        """Of all groups."""
        return sum(part.num_moves for part in self.parts)


class GroupedAttention(AttentionBackend):
    """A backend, for every group of a model's layers."""

    def __init__(self, inner: AttentionBackend, places: Places) -> None:
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self.copies_per_beam, self.spreads = inner.copies_per_beam, inner.spreads
        self.writes_blocks, self.keeps = inner.writes_blocks, inner.keeps
        self.holds_places = inner.holds_places
        self._inner, self._places = inner, places

    def make_tail(self, store: Any, group: int = 0, *, stays: bool = False) -> SessionTail:
        groups = enumerate(store.groups, start=group)
        tails = [self._inner.make_tail(each, n, stays=stays) for n, each in groups]
        return tails[0] if len(tails) == 1 else GroupTails(tails)

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
        """slots: of each group, where views keep KV by themselves."""
        own = [[lengths] * len(store.groups), [[each] for each in slots]]
        own += [each.parts for each in workspace]
        return self._view(self._inner.prefill_view, store, paths, [each for each in own if each])

    def _view(
        self, make: Any, store: SegmentStore, paths: Sequence[Path], own: Sequence[Any]
    ) -> GroupedView:
        """own: what views are made of beside their paths, each by group."""
        views = [
            make(group, [within_reach(path, number) for path in paths], *mine)
            for number, (group, *mine) in enumerate(zip(store.groups, *own, strict=True))
        ]
        return GroupedView(self._places, views)
