"""TreeModel: a decoder whose KV lives in tree segments. Batched prefill and decode sessions.

Chunk and tail sizes are constants, never functions of the budget or of the batch: they set where
attention's partial sums are cut, and results must not depend on the schedule (DESIGN, point 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from beamwright.kv import (
    BlockPool,
    DeviceBudget,
    KVLayout,
    Path,
    PathPart,
    Segment,
    SegmentStore,
    TailBuffer,
)
from beamwright.models.decoder import Decoder, padded_rows
from beamwright.protocols import AttentionBackend, AttentionView, DecodeView

PREFILL_CHUNK_TOKENS = 256
_BATCH_PADDED_TOKENS = 4096


@dataclass
class PrefillRequest:
    """Tokens to append to `segment`, which stands behind `path`.

    start: position of the first token.
    """

    path: Path
    segment: Segment
    token_ids: Sequence[int]
    start: int


class TreeModel:
    """Decoder + segment store + attention backend of one model (generator or verifier)."""

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        kv_budget_bytes: int,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> None:
        shape = decoder.shape
        layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, decoder.dtype)
        self.decoder = decoder
        self.backend = backend
        self.budget = DeviceBudget(kv_budget_bytes)
        self.store = SegmentStore(BlockPool(layout, self.budget, str(decoder.device)))
        self._chunk_tokens = prefill_chunk_tokens

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[torch.Tensor]:
        """Compute and store the KV of each request's tokens.

        Returns:
            Final hidden states [tokens, embed_dim] of each request.

        Raises:
            CapacityError: if the KV budget cannot hold the new segments.
        """
        found: list[list[torch.Tensor]] = [[] for _ in requests]
        offset = 0
        longest = max((len(request.token_ids) for request in requests), default=0)
        while offset < longest:
            for batch in self._batches(requests, offset):
                chunks = [
                    requests[i].token_ids[offset : offset + self._chunk_tokens] for i in batch
                ]
                hidden = self._prefill_batch([requests[i] for i in batch], chunks, offset)
                for i, states in zip(batch, hidden, strict=True):
                    found[i].append(states)
            offset += self._chunk_tokens
        return [torch.cat(states) if len(states) > 1 else states[0] for states in found]

    def _batches(self, requests: Sequence[PrefillRequest], offset: int) -> Iterator[list[int]]:
        """Requests that still have tokens at `offset`, longest first, in bounded batches."""
        length = {
            i: min(len(request.token_ids) - offset, self._chunk_tokens)
            for i, request in enumerate(requests)
            if len(request.token_ids) > offset
        }
        order = sorted(length, key=lambda i: -length[i])
        while order:
            rows = max(1, _BATCH_PADDED_TOKENS // padded_rows(length[order[0]]))
            yield order[:rows]
            order = order[rows:]

    def _prefill_batch(
        self, requests: list[PrefillRequest], chunks: list[Sequence[int]], offset: int
    ) -> list[torch.Tensor]:
        lengths = [len(chunk) for chunk in chunks]
        paths = [_visible(request.path, request.segment) for request in requests]
        token_ids = [token for chunk in chunks for token in chunk]
        positions = [
            request.start + offset + i
            for request, length in zip(requests, lengths, strict=True)
            for i in range(length)
        ]
        total = len(token_ids)
        padding = padded_rows(total) - total
        device = self.decoder.device
        view = _Recording(self.backend.prefill_view(self.store, paths, lengths))
        try:
            hidden = self.decoder.hidden(
                torch.tensor(token_ids + token_ids[:1] * padding, device=device),
                torch.tensor(positions + positions[:1] * padding, device=device),
                view,
            )
        finally:
            view.close()
        key_values = torch.stack(view.key_values, dim=1)[:total].split(lengths)
        self.store.append([request.segment for request in requests], key_values)
        return list(hidden[:total].split(lengths))

    def open_session(self, paths: Sequence[Path], segments: Sequence[Segment]) -> DecodeSession:
        """Start decoding: row i writes segment i behind path i.

        Raises:
            CapacityError: if the rows' tails do not fit the KV budget.
        """
        return DecodeSession(self, paths, segments)


class DecodeSession:
    """Rows that are decoded together, one token per row and call.

    Rows are padded to a multiple of 8 with repeats of the first, which own no segment.
    """

    def __init__(
        self, model: TreeModel, paths: Sequence[Path], segments: Sequence[Segment]
    ) -> None:
        self._model = model
        padding = padded_rows(len(paths)) - len(paths)
        self._paths = [*paths, *([paths[0]] * padding)]
        self._segments: list[Segment | None] = [*segments, *([None] * padding)]
        store = model.store
        self._tail = TailBuffer(
            store.pool.layout,
            len(self._paths),
            model.backend.tail_tokens,
            model.budget,
            str(model.decoder.device),
        )
        try:
            self._view = self._make_view()
        except BaseException:
            self._tail.close()
            raise

    @property
    def num_rows(self) -> int:
        """Rows of the present batch, padding included."""
        return len(self._paths)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, embed_dim] of one token per row ([rows] ids and positions)."""
        if self._tail.full:
            self._flush()
        self._tail.make_room()
        hidden = self._model.decoder.hidden(token_ids, positions, self._view)
        self._tail.length += 1
        return hidden

    def seal(self, rows: Sequence[int]) -> None:
        """Move the tails of these rows into their segments."""
        self._append_tails(rows)

    def drop(self, rows: Sequence[int]) -> None:
        """Give up the rows' segments: what is decoded in these rows from here on is lost."""
        for row in rows:
            self._segments[row] = None

    def keep_rows(self, rows: Sequence[int]) -> list[int]:
        """Compact the batch to these rows, padded to a multiple of 8; returns all rows kept."""
        spare = [row for row in range(self.num_rows) if row not in set(rows)]
        kept = [*rows, *spare[: padded_rows(len(rows)) - len(rows)]]
        index = torch.tensor(kept, device=self._model.decoder.device)
        self._tail.keep_rows(index)
        self._view.keep_rows(index)
        self._paths = [self._paths[row] for row in kept]
        self._segments = [self._segments[row] for row in kept]
        return kept

    def close(self) -> None:
        """Release tails and copies; segments stay with their owners."""
        self._view.close()
        self._tail.close()

    def _append_tails(self, rows: Sequence[int]) -> None:
        owned = [(row, segment) for row in rows if (segment := self._segments[row]) is not None]
        self._model.store.append(
            [segment for _, segment in owned],
            [self._tail.take(row, self._tail.length) for row, _ in owned],
        )

    def _flush(self) -> None:
        """Move full tails into the segments: from here on they are read as sealed parts."""
        self._append_tails(range(self.num_rows))
        self._tail.clear()
        self._view.close()
        self._view = self._make_view()

    def _make_view(self) -> DecodeView:
        paths = [_visible(path, own) for path, own in zip(self._paths, self._segments, strict=True)]
        return self._model.backend.decode_view(self._model.store, paths, self._tail)


def _visible(path: Path, own: Segment | None) -> Path:
    """A path and what its own segment holds already; empty parts are left out."""
    parts = path if own is None else (*path, PathPart(own, own.length))
    return tuple(part for part in parts if part.visible > 0)


class _Recording:
    """An attention view that also keeps the new keys and values of every layer."""

    def __init__(self, view: AttentionView) -> None:
        self._view = view
        self.key_values: list[torch.Tensor] = []

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        self.key_values.append(key_value)
        context: torch.Tensor = self._view.attend(layer, query, key_value)
        return context

    def close(self) -> None:
        self._view.close()
