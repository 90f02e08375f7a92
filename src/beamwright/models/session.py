"""DecodeSession: the rows of a group, decoded together, one token per row and call.

The tail's size is a constant of the backend, never a function of the budget or of the batch: it
sets where attention's partial sums are cut, and results must not depend on the schedule
(docs/architecture.md, "Sameness").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from beamwright.errors import CapacityError
from beamwright.kv import Lease, Path, PathPart, Segment, TailBuffer, copies_needed
from beamwright.models.decoder import padded_rows
from beamwright.models.fixed import FixedBuffers
from beamwright.protocols import DecodeView

if TYPE_CHECKING:
    from beamwright.models.tree_model import TreeModel


class DecodeSession:
    """Rows that are decoded together, one token per row and call.

    Rows are padded to a multiple of 8 with repeats of the first, which own no segment. A row's
    newest tokens stand in the tail, which attention reads; block by block they are also written
    to the row's segment, so that they can go home while decoding goes on (LBS section 4.1).

    A token is `forward`; or, with `fixed` buffers, `prepare` once for the tokens up to the next
    block, and `compute` and `advance` for each of them.
    """

    def __init__(
        self,
        model: TreeModel,
        paths: Sequence[Path],
        segments: Sequence[Segment],
        lease: Lease,
        *,
        write_back: bool,
        fixed: FixedBuffers | None = None,
    ) -> None:
        self._model, self._store, self._lease = model, model.store, lease
        self._fixed = fixed
        self._write_back = write_back
        padding = padded_rows(len(paths)) - len(paths)
        self._paths = [*paths, *([paths[0]] * padding)]
        self._segments: list[Segment | None] = [*segments, *([None] * padding)]
        self._num_real = len(paths)
        lease.add({segment: 1 for segment in segments})
        tail_tokens = model.backend.tail_tokens
        # A function of the token alone, so that parked rows go on with the same partial sums.
        self._flushed = segments[0].length // tail_tokens * tail_tokens
        self._tail = self._open_tail(tail_tokens)
        try:
            self._stored = self._restore(segments)
            self._view = self._make_view()
        except BaseException:
            self._tail.close()
            raise

    @property
    def num_rows(self) -> int:
        """Rows of the present batch, padding included."""
        return len(self._paths)

    @property
    def tokens_to_block(self) -> int:
        """Tokens until `make_room` has to be asked again; at least one."""
        return self._store.pool.block_tokens - self._tail.length % self._store.pool.block_tokens

    @property
    def tail_shape(self) -> tuple[int, ...]:
        """What the kernels' strides depend on: [layer, K or V, row, kv_head, token, head_dim]."""
        return tuple(self._tail.storage.shape)

    def make_room(self, rows: Sequence[int]) -> list[int]:
        """Make sure that these rows' next token has a block; parks rows for which there is none.

        Returns:
            The parked rows, last in order first; their segments hold all that they decoded.

        Raises:
            CapacityError: if not even one row fits, or nothing can be evicted.
        """
        size = self._store.pool.block_tokens
        if self._tail.length % size:
            return []
        self._save(rows)
        going = list(rows)
        parked: list[int] = []
        while not self._reserve(going):
            self._hold_only(going)  # rows that have stopped, or are parked, may be evicted
            if self._reserve(going):
                break
            if len(going) == 1 or not self._store.evicts:
                self._store.reserve(self._next_block(going))  # raises, and says what is missing
            parked.append(going.pop())
            self._park(parked[-1])
        return parked

    def _next_block(self, rows: Sequence[int]) -> dict[Segment, int]:
        size = self._store.pool.block_tokens
        owned = [s for row in rows if (s := self._segments[row]) is not None]
        return {segment: segment.length + size for segment in owned}

    def _reserve(self, rows: Sequence[int]) -> bool:
        try:
            self._store.reserve(self._next_block(rows))
        except CapacityError:
            return False
        return True

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, embed_dim] of one token per row ([rows] ids and positions)."""
        self.prepare()
        hidden = self.compute(token_ids, positions)
        self.advance()
        return hidden

    def prepare(self) -> None:
        """Make sure that the tail has a place for the next token, and for those of its block."""
        if self._tail.length - self._stored >= self._store.pool.block_tokens:
            self._save(range(self.num_rows))
        if self._tail.full:
            self._flush()
        self._tail.make_room()
        if self._fixed is not None:
            self._fixed.prepare()

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `forward` returns, and nothing else: the host does not count the token."""
        hidden = self._model.decoder.hidden(token_ids, positions, self._view)
        if self._fixed is not None:
            self._fixed.tail.count()
        return hidden

    def advance(self) -> None:
        """One more token has been computed."""
        self._tail.length += 1

    def seal(self, rows: Sequence[int], *, surplus: int = 0) -> None:
        """The steps of these rows are complete: move what is left of their tails into blocks.

        surplus: the newest tokens of the tail, which these rows decoded after their steps' end.
        """
        owned = self._append(rows, self._tail.length - surplus)
        for segment in owned:
            self._store.trim(segment)
        if self._write_back:
            self._store.write_back(owned)

    def drop(self, rows: Sequence[int]) -> None:
        """Give up the rows' segments: what is decoded in these rows from here on is lost."""
        for row in rows:
            self._segments[row] = None
        self._view.drop_rows(rows)

    def keep_rows(self, rows: Sequence[int]) -> list[int]:
        """Compact the batch to these rows, padded to a multiple of 8; returns all rows kept."""
        spare = [row for row in range(self.num_rows) if row not in set(rows)]
        kept = [*rows, *spare[: padded_rows(len(rows)) - len(rows)]]
        index = torch.tensor(kept, device=self._model.decoder.device)
        self._tail.keep_rows(index)
        self._view.keep_rows(index)
        self._num_real = len(rows)
        self._view.count_rows(self._num_real)
        self._paths = [self._paths[row] for row in kept]
        self._segments = [self._segments[row] for row in kept]
        return kept

    def close(self) -> None:
        """Give back tails and working copies; segments stay with their owners."""
        self._view.close()
        self._tail.close()

    # --- inside ------------------------------------------------------------------------------

    def _open_tail(self, capacity: int) -> TailBuffer:
        if self._fixed is not None:
            self._fixed.tail.open(self.num_rows)
            return self._fixed.tail
        return self._store.make_tail(self.num_rows, capacity)

    def _save(self, rows: Sequence[int]) -> None:
        """Write the tail's tokens to blocks; attention goes on reading the tail."""
        if self._tail.length > self._stored:
            owned = self._append(rows, self._tail.length)
            self._stored = self._tail.length
            if self._write_back:
                self._store.write_back(owned, sealed=False)

    def _append(self, rows: Sequence[int], end: int) -> list[Segment]:
        owned = [(row, segment) for row in rows if (segment := self._segments[row]) is not None]
        self._store.append(
            [segment for _, segment in owned],
            [self._tail.take(row, self._stored, end) for row, _ in owned],
        )
        return [segment for _, segment in owned]

    def _park(self, row: int) -> None:
        segment = self._segments[row]
        assert segment is not None
        self.drop([row])
        self._store.trim(segment)

    def _hold_only(self, rows: Sequence[int]) -> None:
        """Unpin everything that only other rows read or write."""
        per_beam = self._model.backend.copies_per_beam
        needs = copies_needed((self._paths[row] for row in rows), per_beam=per_beam)
        needs.update({s: 1 for row in rows if (s := self._segments[row]) is not None})
        self._lease.keep(needs)

    def _restore(self, segments: Sequence[Segment]) -> int:
        """Bring back the tail of parked rows; returns how many of its tokens there are."""
        length = segments[0].length
        if length > self._flushed:
            held = [self._store.gather(s, length)[:, :, self._flushed :] for s in segments]
            self._tail.restore([*held, *([held[0]] * (len(self._paths) - len(held)))])
        return length - self._flushed

    def _flush(self) -> None:
        """The tail is full: from here on its tokens are read as a sealed part."""
        self._flushed += self._tail.length
        self._stored = 0
        self._tail.clear()
        self._view.close()
        self._view = self._make_view()

    def _make_view(self) -> DecodeView:
        # Rows without a segment decode nothing that is kept; their paths may have been evicted.
        live = next((row for row, own in enumerate(self._segments) if own is not None), 0)
        paths = [
            visible_path(path if own is not None else self._paths[live], own, self._flushed)
            for path, own in zip(self._paths, self._segments, strict=True)
        ]
        if self._fixed is not None:
            view = self._fixed.open_view(paths)
        else:
            view = self._model.backend.decode_view(self._store, paths, self._tail)
        view.count_rows(self._num_real)
        view.drop_rows([row for row, own in enumerate(self._segments) if own is None])
        return view


def visible_path(path: Path, own: Segment | None, own_tokens: int) -> Path:
    """A path and what its own segment holds already; empty parts are left out."""
    parts = path if own is None else (*path, PathPart(own, own_tokens))
    return tuple(part for part in parts if part.visible > 0)
