"""FixedBuffers: what a decode step of one model touches beside weights and pool, where it stays.

A captured step reads addresses, not objects: sessions come and go, and each finds the tail and the
work lists of the one before it. Knows nothing of graphs, sampling or stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from beamwright.kv import FixedTail, Path, SegmentStore
from beamwright.models.decoder import Decoder
from beamwright.protocols import AttentionBackend, DecodeView


class Workspace(Protocol):
    """Device tensors that the views of a `FixedBackend` share, one view after the other."""

    @property
    def num_moves(self) -> int:
        """How often they were allocated anew."""
        ...

    def release(self) -> None: ...


class FixedView(DecodeView, Protocol):
    """A view whose tokens only launch kernels, once it is prepared."""

    def prepare(self, num_heads: int) -> None:
        """Bring the work lists up to date. num_heads: query heads of a layer."""
        ...


@runtime_checkable
class FixedBackend(Protocol):
    """A backend whose decode step can be captured: it reads nothing but tensors that stay."""

    def workspace(self, store: SegmentStore) -> Workspace: ...

    def decode_view(
        self, store: SegmentStore, paths: Sequence[Path], tail: FixedTail, workspace: Any
    ) -> FixedView: ...


class FixedBuffers:
    """The tail, and the backend's work lists if it is a `FixedBackend`.

    Other backends decode with them too, but their steps cannot be captured.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, store: SegmentStore) -> None:
        device = str(decoder.device)
        self.tail = FixedTail(store.pool.layout, backend.tail_tokens, store.scratch, device)
        self._backend, self._store = backend, store
        self._num_heads = decoder.shape.heads
        self._fixed = backend if isinstance(backend, FixedBackend) else None
        self._workspace = self._fixed.workspace(store) if self._fixed is not None else None
        self._view: FixedView | None = None

    @property
    def num_moves(self) -> int:
        """How often anything was allocated anew: a step captured before must not be replayed."""
        lists = self._workspace.num_moves if self._workspace is not None else 0
        return self.tail.num_moves + lists

    def open_view(self, paths: Sequence[Path]) -> DecodeView:
        """A view over the tail; the one before it is closed."""
        if self._fixed is None:
            return self._backend.decode_view(self._store, paths, self.tail)
        self._view = self._fixed.decode_view(self._store, paths, self.tail, self._workspace)
        return self._view

    def prepare(self) -> None:
        """Bring everything up to date that the next tokens read."""
        self.tail.load()
        if self._view is not None:
            self._view.prepare(self._num_heads)

    def release(self) -> None:
        """Give the memory back until the next session."""
        self.tail.release()
        if self._workspace is not None:
            self._workspace.release()
