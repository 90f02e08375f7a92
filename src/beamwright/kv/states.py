"""Recurrent states (hybrid models) in the blocks of a KV pool: layout, reading and writing.

A segment's state is the state after its last token. It is one flat record of all layers' parts, in
blocks of its own. A running row updates its own record in place. At its first token it reads the
record of its parent node, so siblings begin from one record without copying it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.plan.blocks import aligned_tensor_bytes

# A part's layer and kind ("conv" or "recurrent").
Key = tuple[int, str]
# Block numbers of one record, in order.
Blocks = Sequence[int]
_LEAST_ROWS = 64  # a table has room for at least this many rows
# What a row does in a pass: keep no state, begin from zeros, or continue from an earlier state.
IDLE, BEGINS, GOES_ON = 0, 1, 2


class StateBlocks(NamedTuple):
    """Block tables of the rows' states, for kernels.

    storage: bytes [block, bytes].
    sources, targets: blocks that a row reads and writes, int32 [rows, num_blocks].
    actions: what each row does, int32 [rows]: `IDLE`, `BEGINS` or `GOES_ON`.
    """

    storage: Tensor
    sources: Tensor
    targets: Tensor
    actions: Tensor


class StatePlace(NamedTuple):
    """Where kernels find one part (one layer's tensor) of all rows' states.

    offset: bytes from the beginning of each record.
    """

    blocks: StateBlocks
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StateTensor:
    """Shape and dtype of one tensor that a recurrent layer keeps for each row."""

    layer: int
    kind: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in a record, padded so that each part begins aligned."""
        return aligned_tensor_bytes(self.size, self.dtype.itemsize)


class StateLayout:
    """Layout of a state record, in which the tensors of all layers (parts) follow each other.

    Recurrent parts come first. They are the largest, and their sizes are multiples of larger powers
    of two than those of convolutions, so their heads do not straddle blocks.

    parts: tensors by key.
    offsets: bytes from the record's start, by key.
    num_bytes: bytes of a record.
    """

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        ordered = sorted(tensors, key=lambda part: part.kind != "recurrent")
        self.parts: dict[Key, StateTensor] = {(part.layer, part.kind): part for part in ordered}
        *starts, self.num_bytes = accumulate((part.num_bytes for part in ordered), initial=0)
        self.offsets: dict[Key, int] = dict(zip(self.parts, starts, strict=True))
        self.by_layer: dict[int, list[str]] = {}
        for layer, kind in self.parts:
            self.by_layer.setdefault(layer, []).append(kind)

    def num_blocks(self, block_bytes: int) -> int:
        """Return the number of blocks of `block_bytes` bytes that a record fills."""
        return -(-self.num_bytes // block_bytes)


class StateCells:
    """The blocks of a pool, viewed as state records.

    A part (one layer's tensor) consists of whole *cells*: pieces of equal bytes, as large as the
    sizes of parts and blocks allow. So one index selection over cells reads a part of any rows,
    whatever blocks the rows have.
    """

    def __init__(self, by_block: Tensor, layout: StateLayout) -> None:
        """Compute the cells of each part. by_block: bytes [block, bytes] of a pool."""
        count, block_bytes = by_block.shape
        self.by_block, self.device = by_block, by_block.device
        self.layout, self.num_blocks = layout, layout.num_blocks(block_bytes)
        sizes = [part.num_bytes for part in layout.parts.values()]
        cell = math.gcd(block_bytes, *layout.offsets.values(), *sizes)
        self._per_block = block_bytes // cell
        cells = by_block.view(count * self._per_block, cell)
        self._cells = cells.view(torch.int64) if cell % 8 == 0 else cells
        self._at: dict[Key, tuple[Tensor, Tensor]] = {}
        for (key, start), size in zip(layout.offsets.items(), sizes, strict=True):
            numbers = torch.arange(start // cell, (start + size) // cell, device=by_block.device)
            self._at[key] = numbers // self._per_block, numbers % self._per_block

    @property
    def has_whole_lines(self) -> bool:
        """True if kernels can update recurrent states in place.

        Kernels read each line along the last dimension of a recurrent part as contiguous memory, so
        no line may straddle blocks.
        """
        lines = [
            (self.layout.offsets[key], part.size[-1] * part.dtype.itemsize)
            for key, part in self.layout.parts.items()
            if part.kind == "recurrent"
        ]
        block_bytes = self.by_block.shape[1]
        return all(block_bytes % line == 0 == offset % line for offset, line in lines)

    def cell_numbers(self, key: Key, blocks: Tensor) -> Tensor:
        """Return the numbers [rows * cells] of the cells that hold a part of these rows.

        blocks: the rows' blocks [rows, num_blocks].
        """
        block, cell = self._at[key]
        return (blocks.index_select(1, block) * self._per_block + cell).flatten()

    def read(self, key: Key, index: Tensor) -> Tensor:
        """Return a copy of a part [rows, *size] from cells at `index`."""
        part = self.layout.parts[key]
        cells = self._cells.index_select(0, index).view(-1, part.num_bytes // _width(self._cells))
        values: Tensor = cells.view(part.dtype)[:, : math.prod(part.size)]
        return values.view(len(values), *part.size)

    def to_cells(self, key: Key, values: Tensor) -> Tensor:
        """Convert a part [rows, *size] to cells, which `write_cells` writes without allocating."""
        part, width = self.layout.parts[key], _width(self._cells)
        flat = values.to(part.dtype).flatten(1)
        spare = part.num_bytes // part.dtype.itemsize - flat.shape[1]
        flat = F.pad(flat, (0, spare)) if spare else flat.contiguous()
        if flat.storage_offset() * part.dtype.itemsize % width:
            flat = flat.clone()  # a view with a wider dtype must begin at a multiple of its width
        return flat.view(self._cells.dtype).view(-1, self._cells.shape[1])

    def write_cells(self, index: Tensor, cells: Tensor) -> None:
        self._cells.index_copy_(0, index, cells)


def _width(cells: Tensor) -> int:
    return cells.dtype.itemsize


class _Table:
    """Blocks [rows, num_blocks] of rows, with a cache of the cell numbers of each part."""

    def __init__(self, states: StateCells, blocks: Tensor) -> None:
        self.blocks, self._states = blocks, states
        self._indices: dict[Key, Tensor] = {}

    def cell_numbers(self, key: Key) -> Tensor:
        if key not in self._indices:
            self._indices[key] = self._states.cell_numbers(key, self.blocks)
        return self._indices[key]


class StateTables:
    """Device tables of the rows' state blocks, at addresses that a captured pass can keep.

    `load` fills the tables from the host before the rows' first pass. After each pass,
    `advance` updates them with kernels only, so a replayed pass needs nothing from the
    host. Addresses change only when `num_moves` does.
    """

    def __init__(self, states: StateCells) -> None:
        self._states, self._count, self.num_moves = states, 0, 0
        self._most = self._empty(0)

    @property
    def blocks(self) -> StateBlocks:
        """The part of the tables that the present rows use."""
        storage, *tables = self._most
        return StateBlocks(storage, *(table[: self._count] for table in tables))

    def load(self, rows: RowStates) -> None:
        """Copy the block numbers of the rows' states from the host to the tables."""
        contents = rows.sources, rows.targets, rows.actions
        self._count = len(contents[0])
        if self._count > len(self._most.actions):
            most = max(self._count, _LEAST_ROWS)
            self._most, self.num_moves = self._empty(most), self.num_moves + 1
        for table, values in zip(self.blocks[1:], contents, strict=True):
            table.copy_(values)

    def advance(self) -> None:
        """Make rows read, from now on, the states that they wrote. Only launches kernels."""
        _, sources, targets, actions = self.blocks
        sources.copy_(targets)
        actions.mul_(GOES_ON).clamp_(max=GOES_ON)

    def stop(self, rows: Sequence[int]) -> None:
        """Mark these rows as idle, so that their states are not written from now on."""
        self._most.actions[list(rows)] = IDLE

    def _empty(self, rows: int) -> StateBlocks:
        sizes = (rows, self._states.num_blocks), (rows, self._states.num_blocks), (rows,)
        device = self._states.device
        tables = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
        return StateBlocks(self._states.by_block, *tables)


class RowStates:
    """Recurrent states of a batch's rows over several passes, updated by `models.recurrent_layers`.

    lengths: tokens of each row in a pass; None: one token each.
    sources, targets: blocks [rows, num_blocks] that rows read and write.
    """

    def __init__(
        self,
        states: StateCells,
        sources: Sequence[Blocks | None],
        targets: Sequence[Blocks | None],
        lengths: Sequence[int] | None = None,
        *,
        deferred: bool = False,
        tables: StateTables | None = None,
    ) -> None:
        """Create the states from each row's block numbers.

        sources: blocks to read at first; None for rows that begin from zeros.
        targets: blocks to write; None for rows whose states are not kept.
        deferred: True: nothing is written before `commit`, so that a pass can be repeated after an
            error.
        tables: tables by which kernels read and write the states, instead of `read` and `write`.
        """
        self.states, self.lengths = states, lengths
        spare = next(target for target in targets if target is not None)
        written = [spare if target is None else target for target in targets]
        read = [b if a is None else a for a, b in zip(sources, written, strict=True)]
        self._read, self._own = self._table(read), self._table(written)
        self._beginning = [i for i, source in enumerate(sources) if source is None]
        self._zeros = self._places(self._beginning)
        self._active = [i for i, target in enumerate(targets) if target is not None]
        self._later: list[tuple[Tensor, Tensor]] | None = [] if deferred else None
        self._select_written()
        self._tables = tables
        if tables is not None:
            tables.load(self)

    @property
    def sources(self) -> Tensor:
        return self._read.blocks

    @property
    def targets(self) -> Tensor:
        return self._own.blocks

    @property
    def actions(self) -> Tensor:
        """Each row's action, int32 [rows], see `IDLE`."""
        actions = [IDLE] * len(self._own.blocks)
        for row in self._active:
            actions[row] = BEGINS if row in self._beginning else GOES_ON
        return torch.tensor(actions, dtype=torch.int32).to(self.states.device)

    def part_places(self, layer: int) -> dict[str, StatePlace] | None:
        """Return where kernels find a layer's parts, by kind; None if kernels have no tables."""
        if self._tables is None:
            return None
        blocks, layout = self._tables.blocks, self.states.layout
        return {
            kind: StatePlace(blocks, layout.offsets[layer, kind], layout.parts[layer, kind].dtype)
            for kind in layout.by_layer[layer]
        }

    def read(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's parts by kind, each [rows, *size]."""
        parts = {}
        for kind in self.states.layout.by_layer[layer]:
            key = layer, kind
            parts[kind] = self.states.read(key, self._read.cell_numbers(key))
            if self._zeros is not None:
                parts[kind].index_fill_(0, self._zeros, 0)
        return parts

    def write(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Store a layer's parts, shaped as `read` returns them, for rows whose states are kept."""
        for kind, value in values.items():
            key = layer, kind
            kept = value if self._picked is None else value.index_select(0, self._picked)
            entry = self._written.cell_numbers(key), self.states.to_cells(key, kept)
            if self._later is None:
                self.states.write_cells(*entry)
            else:
                self._later.append(entry)

    def commit(self) -> None:
        """Write the states that were deferred until the pass has succeeded.

        `commit` allocates no memory, so it cannot fail after half of the states are written.
        """
        later, self._later = self._later, None
        for index, cells in later or ():
            self.states.write_cells(index, cells)

    def advance(self) -> None:
        """Make rows read from now on the states that they wrote in the last pass."""
        self._read, self._zeros, self._beginning = self._own, None, []
        if self._tables is not None:
            self._tables.advance()

    def stop(self, rows: Sequence[int]) -> None:
        """Write no states of these rows from now on, since their last token has been forwarded."""
        gone = set(rows)
        if not gone.isdisjoint(self._active):
            self._active = [row for row in self._active if row not in gone]
            self._select_written()
            if self._tables is not None:
                self._tables.stop(rows)

    # --- inside ------------------------------------------------------------------------------

    def _select_written(self) -> None:
        """Compute which rows `write` stores, and to which cells."""
        self._picked, self._written = None, self._own
        if len(self._active) < len(self._own.blocks):
            self._picked = torch.tensor(self._active, dtype=torch.long, device=self.states.device)
            blocks = self._own.blocks.index_select(0, self._picked)
            self._written = _Table(self.states, blocks)

    def _table(self, rows: Sequence[Blocks]) -> _Table:
        if any(len(blocks) < self.states.num_blocks for blocks in rows):
            raise AssertionError("a state that is read or written is not on the device")
        blocks = torch.from_numpy(np.array(rows, dtype=np.int64))
        return _Table(self.states, blocks.to(self.states.device))

    def _places(self, rows: Sequence[int]) -> Tensor | None:
        return torch.tensor(rows, device=self.states.device) if rows else None
