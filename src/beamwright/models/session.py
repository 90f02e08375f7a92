"""DecodeSession: decodes the rows of the running batch together, one token per row and call.

A row's newest KV is in the row's tail. A full tail is copied to the blocks of the row's segment.
The tail's size decides where attention's partial sums are split. Results must not depend on the
schedule (docs/concepts/sameness.md), so the size is a constant of the attention backend, whatever
the KV budget and the batch are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from beamwright.attention.protocols import AttentionBackend, DecodeView
from beamwright.kv.segments import Path, Segment, append_own_segment, initial_state_segment
from beamwright.kv.states import RowStates, StateTables
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import RowTails, SessionTail
from beamwright.models.decoder import Decoder, pad_for_cuda_graph, padded_rows

_CLOSED = DecodeView()  # the view of a session without rows; its methods do nothing


@dataclass(eq=False)
class _OpenRow:
    """One row of a session: its path, the segment of its current step, and its lengths.

    flushed: number of the step's tokens that attention reads from blocks.
    in_tail: number of newer tokens, which attention reads from the tail.
    """

    path: Path
    segment: Segment
    flushed: int
    in_tail: int

    @property
    def num_tokens(self) -> int:
        return self.flushed + self.in_tail


def updates_states_in_place(decoder: Decoder, store: SegmentStore) -> bool:
    """Return whether `step_kernels` read recurrent states directly from the pool's blocks."""
    cells = store.pool.states
    return decoder.updates_states_in_place and cells is not None and cells.has_whole_lines


class DecodeSession:
    """Rows that are decoded together. Rows join and leave between calls.

    The batch is padded (`pad`) with rows that own no segment. Attention reads a row's newest tokens
    from the tail. `copy_to_segments` also copies them to the row's segment, so that their KV can be
    written back to the host while decoding continues (LBS section 4.1).

    Call `forward` for one token per row. For several tokens call `prepare` once, then `compute` and
    `advance` for each token. If the backend supports it (`sets_query_rows`), `forward_some`
    computes several tokens of some rows in one pass.

    stays: keep the memory when rows leave, as CUDA graphs require. Addresses change only when
        `num_moves` changes.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: SegmentStore,
        backend: AttentionBackend,
        *,
        stays: bool = False,
    ) -> None:
        self._decoder, self._store, self._backend = decoder, store, backend
        self._in_blocks = backend.writes_blocks
        self._tail: SessionTail = backend.make_tail(store, stays=stays)
        # The row that each query of the view belongs to; None: one query for every row, in order.
        self._query_rows: Sequence[int] | None = None
        self._workspace = backend.workspace(store)
        self._stays = stays
        self._view = _CLOSED
        self._known_moves = store.num_relocated  # block moves that the view accounts for
        self._states: RowStates | None = None
        cells = store.pool.states if updates_states_in_place(decoder, store) else None
        self._state_tables = None if cells is None else StateTables(cells)
        self._rows: list[_OpenRow | None] = []

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch, including padding."""
        return len(self._rows)

    def pad(self, num_rows: int) -> int:
        """Return the padded batch size for `num_rows` rows."""
        if self._stays:
            return pad_for_cuda_graph(num_rows)
        return padded_rows(num_rows, self._decoder.least_rows)

    @property
    def tail_shape(self) -> tuple[int, int]:
        """The tail's capacity (rows, tokens), which sets the strides that kernels use."""
        return self._tail.num_rows, self._tail.num_tokens

    @property
    def num_moves(self) -> int:
        """Number of reallocations. CUDA graphs captured before the last one are invalid."""
        parts = self._tail, self._workspace, self._state_tables
        return sum(part.num_moves for part in parts if part is not None)

    @property
    def held_bytes(self) -> int:
        """Size of the tail's memory in bytes."""
        return self._tail.num_bytes

    # --- rows --------------------------------------------------------------------------------

    def arrange_rows(
        self, kept: Sequence[int], paths: Sequence[Path] = (), segments: Sequence[Segment] = ()
    ) -> None:
        """Set the batch: the `kept` rows in that order, then one new row per path and segment.

        A new row that was preempted within its step has stored its tail's tokens in its segment.
        These tokens are copied back to the tail.
        """
        fresh = []
        for path, segment in zip(paths, segments, strict=True):
            # `in_tail` depends only on the length, so a preempted row continues with the same sums.
            in_tail = segment.length % self._backend.tail_tokens
            fresh.append(_OpenRow(path, segment, segment.length - in_tail, in_tail))
        rows = [*(self._rows[row] for row in kept), *fresh]
        num_rows = self.pad(len(rows))
        spare = [row for row in range(self.num_rows) if row not in set(kept)]
        # If rows only left, the view is kept; some of the former rows become its padding.
        index = [*kept, *spare[: num_rows - len(kept)]]
        self._view.wait_for_threads()
        self._tail.arrange(kept, num_rows)
        for place, row in enumerate(fresh, start=len(kept)):
            if row.in_tail and not self._in_blocks:
                tokens = self._store.read_tokens(row.segment, row.flushed, row.num_tokens)
                self._tail.restore(place, tokens)
        compacts = self._view is not _CLOSED and not fresh and len(index) == num_rows
        self._rows, self._states = [*rows, *([None] * (num_rows - len(rows)))], None
        if compacts:
            self._set_query_rows(None)
            self._view.deactivate_rows(spare)  # their segments may have been freed
            self._view.keep_rows(torch.tensor(index, device=self._decoder.device))
            self._view.set_num_rows(len(rows))
        else:
            self._open_view()

    def deactivate_rows(self, rows: Sequence[int]) -> None:
        """Turn rows into padding: they lose their segments, and the caller ignores their output."""
        for row in rows:
            self._rows[row] = None
        self.stop_rows(rows)
        self._view.deactivate_rows(rows)

    def stop_rows(self, rows: Sequence[int]) -> None:
        """Stop updating the recurrent states of these rows, whose steps are decoded."""
        if self._states is not None and rows:
            self._states.stop(rows)

    def close(self) -> None:
        """Remove all rows. The caller still owns their segments."""
        self._close_view()
        self._tail.close()
        if self._workspace is not None and not self._stays:
            self._workspace.release()
        self._rows = []

    def release(self) -> None:
        """Remove all rows, and free the memory that `close` keeps for later rows."""
        self.close()
        self._tail.release()
        if self._workspace is not None:
            self._workspace.release()

    # --- tokens ------------------------------------------------------------------------------

    def max_tokens(self) -> int:
        """Return how many tokens every row can decode before the next `prepare`; at least one."""
        capacity = self._backend.tail_tokens
        return min(capacity - row.in_tail % capacity for row in self._rows if row is not None)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute one token per row from ids and positions [rows]; return [rows, hidden].

        Raises:
            CapacityError: if the backend writes KV directly to blocks and no block is free.
        """
        if self._in_blocks:
            self._store.reserve({r.segment: r.num_tokens + 1 for r in self._rows if r is not None})
        self.prepare(1)
        hidden = self.compute(token_ids, positions)
        self.advance()
        return hidden

    def prepare(self, max_tokens: int) -> None:
        """Make room in the tails for up to `max_tokens` tokens per row.

        Order: store full tails in the segments, reopen the view if block numbers changed, then
        place the new tokens. If the backend writes KV directly to blocks, the rows' segments must
        already have the blocks.
        """
        capacity = self._backend.tail_tokens
        full = {i: row for i, row in enumerate(self._rows) if row and row.in_tail == capacity}
        if full:
            self.copy_to_segments({place: row.num_tokens for place, row in full.items()})
            for row in full.values():
                row.flushed, row.in_tail = row.num_tokens, 0
        if relocated := self._known_moves != self._store.num_relocated:
            self._known_moves, self._states = self._store.num_relocated, None
        if full or (relocated and self._backend.holds_block_numbers):
            self._open_view()
        self._set_query_rows(None)
        lengths = [row.in_tail if row is not None else None for row in self._rows]
        self._view.wait_for_threads()
        self._tail.set_segments([None if r is None else (r.segment, r.flushed) for r in self._rows])
        self._tail.set_lengths(lengths, max_tokens)
        if self._store.pool.states is not None:
            self._locate_states()
        self._view.prepare(self._decoder.shape.heads)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether each row has room for `num_tokens` more; reserve only free blocks."""
        if self._in_blocks:
            rows = [row for row in self._rows if row is not None]
            wanted = {row.segment: row.flushed + row.in_tail + num_tokens for row in rows}
            if not self._store.fits_free_blocks({}, wanted):
                return False
            self._store.reserve(wanted)
        return True

    def compute(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute one token per row as `forward` does. A CUDA graph can capture this call.

        The caller adds the tokens to the rows' lengths with `advance`.
        """
        hidden = self._decoder.hidden(token_ids, positions, self._view)
        self._tail.advance()
        if self._states is not None:
            self._states.advance()
        return hidden

    def forward_some(
        self, some: Sequence[tuple[int, int, int, int]], written: Sequence[tuple[int, int, int]]
    ) -> Tensor:
        """Compute several tokens of some rows in one pass, after `prepare`.

        Return hidden states [tokens and padding, hidden]. Each token is computed as a row of the
        batch, so the result is bitwise equal to decoding one token after the other. Call `advance`
        to keep tokens.

        some: the tokens, as (row, ahead, id, position). `ahead` counts the row's new tokens from 0.
            A token attends to the row's earlier new tokens too.
        written: (index into `some`, row, ahead) for each token whose KV is stored in a tail.
        """
        in_tail = [row.in_tail if row is not None else 0 for row in self._rows]
        padding = padded_rows(len(some), self._decoder.least_rows) - len(some)
        rows, ahead, *given = zip(*some, *[some[0]] * padding, strict=True)
        places = [in_tail[row] + count for row, count in zip(rows, ahead, strict=True)]
        columns = torch.tensor([rows, places, *given], device=self._decoder.device)
        index, where, ids, positions = columns
        copied = torch.tensor([(at, row, in_tail[row] + n) for at, row, n in written])
        tail = cast(RowTails, self._tail)  # a backend that `sets_query_rows` has this kind of tail
        tail.begin_multi_token_pass(index, where, copied.T.to(self._decoder.device))
        self._set_query_rows(rows, index)
        hidden = self._decoder.hidden(ids, positions, self._view)
        tail.end_multi_token_pass()
        return hidden

    def advance(self, num_tokens: Mapping[int, int] | None = None) -> None:
        """Add `num_tokens[row]` computed tokens to the rows' lengths; None: one for every row.

        Padding rows, which have no segment, are skipped.
        """
        for place, row in enumerate(self._rows):
            if row is not None:
                row.in_tail += 1 if num_tokens is None else num_tokens.get(place, 0)

    def copy_to_segments(self, num_tokens: Mapping[int, int]) -> None:
        """Copy tail tokens to segments, until the segment of row i has `num_tokens[i]` tokens.

        Raises:
            CapacityError: if no blocks are free. In this case nothing has been written.
        """
        missing = [
            (place, row, count)
            for place, count in num_tokens.items()
            if (row := self._rows[place]) is not None and count > row.segment.length
        ]
        if not missing:
            return
        lengths = [count - row.segment.length for _, row, count in missing]
        segments = [row.segment for _, row, _ in missing]
        if self._in_blocks:
            self._store.extend_each(segments, lengths)
            return
        taken = self._tail.read_tokens(
            [
                (place, row.segment.length - row.flushed, count - row.flushed)
                for place, row, count in missing
            ]
        )
        self._view.wait_for_threads()
        self._store.append(segments, taken, lengths)

    # --- inside ------------------------------------------------------------------------------

    def _locate_states(self) -> None:
        """Locate each row's recurrent state: the row's own if it has tokens, else its parent's."""
        if self._states is None:
            own = [None if row is None else row.segment for row in self._rows]
            begins = [
                None
                if row is None
                else row.segment.group_segments[-1]
                if row.num_tokens
                else initial_state_segment(row.path)
                for row in self._rows
            ]
            self._states = self._store.make_row_states(begins, own, tables=self._state_tables)
        self._view.states = self._states

    def _set_query_rows(self, rows: Sequence[int] | None, index: Any = None) -> None:
        if rows != self._query_rows:
            self._view.set_query_rows(index)
            self._query_rows = rows

    def _open_view(self) -> None:
        self._close_view()
        self._known_moves = self._store.num_relocated
        live = next((row for row in self._rows if row is not None), None)
        assert live is not None, "a batch has a row"
        # The output of a row without a segment is ignored, so it may read any live row's path.
        read = [row or live for row in self._rows]
        paths = [append_own_segment(row.path, row.segment, row.flushed) for row in read]
        shared: tuple[Any, ...] = () if self._workspace is None else (self._workspace,)
        self._view = self._backend.decode_view(self._store, paths, self._tail, *shared)
        self._view.bind_segments([None if row is None else row.segment for row in self._rows])
        self._view.set_num_rows(max(i for i, row in enumerate(self._rows) if row is not None) + 1)
        self._view.deactivate_rows([i for i, row in enumerate(self._rows) if row is None])

    def _close_view(self) -> None:
        self._view.close()
        self._view, self._query_rows = _CLOSED, None
