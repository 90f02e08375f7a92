"""States of recurrent layers in a pool's blocks: where a row's are, how they are read and written.

A segment's state is a flat record of all layers' parts over `fixed` blocks of its own, as it is
behind the segment's last token. A row that runs writes its own record in place; at its first token
it reads that of the node before it, so siblings begin from one record and copy nothing. Knows
blocks; no segments, no models.
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

from beamwright.plan.costs import record_bytes

Key = tuple[int, str]
"""A part's layer and kind ("conv", "recurrent")."""
Blocks = Sequence[int]
"""Of one record, in order."""
_LEAST_ROWS = 64  # of tables
IDLE, BEGINS, GOES_ON = 0, 1, 2
"""What a row does in a pass: nothing that is kept; it begins from zeros; it reads a state."""


class StateBlocks(NamedTuple):
    """Where kernels find rows' records, and put them.

    storage: bytes [block, bytes]. sources, targets: blocks that a row reads and writes, int32
    [rows, num_blocks]. ways: int32 [rows], see `IDLE`.
    """

    storage: Tensor
    sources: Tensor
    targets: Tensor
    ways: Tensor


class Placed(NamedTuple):
    """A part of rows' states, where it lies. offset: bytes into each record."""

    blocks: StateBlocks
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StateTensor:
    """One tensor that a layer keeps of a row."""

    layer: int
    kind: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """In a record, filled up so that each part begins aligned."""
        return record_bytes(self.size, self.dtype.itemsize)


class StateLayout:
    """A record: its parts, one behind the other.

    Recurrent parts are in front. They are most of it and of rounder sizes than convolutions', so
    their heads do not straddle blocks.
    parts, offsets: by key; bytes from the record's start. num_bytes: of a record.
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
        """Blocks of so many bytes that a record fills."""
        return -(-self.num_bytes // block_bytes)


class StateCells:
    """What blocks hold of records.

    A part is whole *cells*: pieces of equal bytes, as large as parts and blocks allow, so that a
    part of any rows is one selection of cells, however it lies in their blocks.
    """

    def __init__(self, by_block: Tensor, layout: StateLayout) -> None:
        """by_block: bytes [block, bytes] of a pool."""
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
        """Whether no line, the last dimension of a recurrent part, straddles blocks: so kernels
        find them."""
        lines = [
            (self.layout.offsets[key], part.size[-1] * part.dtype.itemsize)
            for key, part in self.layout.parts.items()
            if part.kind == "recurrent"
        ]
        block_bytes = self.by_block.shape[1]
        return all(block_bytes % line == 0 == offset % line for offset, line in lines)

    def index(self, key: Key, blocks: Tensor) -> Tensor:
        """Where a part of rows with these blocks [rows, num_blocks] is: [rows * cells]."""
        block, cell = self._at[key]
        return (blocks.index_select(1, block) * self._per_block + cell).flatten()

    def read(self, key: Key, index: Tensor) -> Tensor:
        """A part of rows [rows, *size]; a copy."""
        part = self.layout.parts[key]
        cells = self._cells.index_select(0, index).view(-1, part.num_bytes // _width(self._cells))
        values: Tensor = cells.view(part.dtype)[:, : math.prod(part.size)]
        return values.view(len(values), *part.size)

    def cells(self, key: Key, values: Tensor) -> Tensor:
        """A part of rows [rows, *size] as cells: what `put` writes, which takes no memory."""
        part, width = self.layout.parts[key], _width(self._cells)
        flat = values.to(part.dtype).flatten(1)
        spare = part.num_bytes // part.dtype.itemsize - flat.shape[1]
        flat = F.pad(flat, (0, spare)) if spare else flat.contiguous()
        if flat.storage_offset() * part.dtype.itemsize % width:
            flat = flat.clone()  # a view as wider numbers begins with a whole one
        return flat.view(self._cells.dtype).view(-1, self._cells.shape[1])

    def put(self, index: Tensor, cells: Tensor) -> None:
        self._cells.index_copy_(0, index, cells)


def _width(cells: Tensor) -> int:
    return cells.dtype.itemsize


class _Table:
    """Blocks [rows, num_blocks] of rows, and where each part is in them, found once."""

    def __init__(self, states: StateCells, blocks: Tensor) -> None:
        self.blocks, self._states = blocks, states
        self._found: dict[Key, Tensor] = {}

    def at(self, key: Key) -> Tensor:
        if key not in self._found:
            self._found[key] = self._states.index(key, self.blocks)
        return self._found[key]


class StateTables:
    """Rows' blocks for kernels, at addresses that stay while `num_moves` does.

    A captured step knows no more of a row than is here: that it has begun, the device notes itself.
    """

    def __init__(self, states: StateCells) -> None:
        self._states, self._count, self.num_moves = states, 0, 0
        self._most = self._empty(0)

    @property
    def blocks(self) -> StateBlocks:
        """Of the rows there are."""
        storage, *tables = self._most
        return StateBlocks(storage, *(table[: self._count] for table in tables))

    def load(self, rows: StateRows) -> None:
        """These are the rows; they are at the beginning of their passes."""
        found = rows.sources, rows.targets, rows.ways
        self._count = len(found[0])
        if self._count > len(self._most.ways):
            most = max(self._count, _LEAST_ROWS)
            self._most, self.num_moves = self._empty(most), self.num_moves + 1
        for table, values in zip(self.blocks[1:], found, strict=True):
            table.copy_(values)

    def begun(self) -> None:
        """A pass is over. Launches only."""
        _, sources, targets, ways = self.blocks
        sources.copy_(targets)
        ways.mul_(GOES_ON).clamp_(max=GOES_ON)

    def stop(self, rows: Sequence[int]) -> None:
        """Nothing of these rows is written from here on."""
        self._most.ways[list(rows)] = IDLE

    def _empty(self, rows: int) -> StateBlocks:
        sizes = (rows, self._states.num_blocks), (rows, self._states.num_blocks), (rows,)
        device = self._states.device
        tables = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
        return StateBlocks(self._states.by_block, *tables)


class StateRows:
    """The states of rows that are computed together, pass after pass (`models.recurrent`).

    lengths: tokens of each row in a pass; None: one of every row. sources, targets: blocks
    [rows, num_blocks] that rows read, and write.
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
        """sources: None of rows that begin from zeros. targets: None of rows that nobody keeps.

        deferred: nothing is written before `commit`, so that a pass can be tried again.
        tables: where kernels find these rows; then they read and write, and nobody else.
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
        self._pick()
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
    def ways(self) -> Tensor:
        """Of each row [rows], int32, see `IDLE`."""
        ways = [IDLE] * len(self._own.blocks)
        for row in self._active:
            ways[row] = BEGINS if row in self._beginning else GOES_ON
        return torch.tensor(ways, dtype=torch.int32).to(self.states.device)

    def placed(self, layer: int) -> dict[str, Placed] | None:
        """Where kernels find a layer's parts, by kind; None where there are no tables for them."""
        if self._tables is None:
            return None
        blocks, layout = self._tables.blocks, self.states.layout
        return {
            kind: Placed(blocks, layout.offsets[layer, kind], layout.parts[layer, kind].dtype)
            for kind in layout.by_layer[layer]
        }

    def read(self, layer: int) -> dict[str, Tensor]:
        """A layer's parts by kind, each [rows, *size]."""
        found = {}
        for kind in self.states.layout.by_layer[layer]:
            key = layer, kind
            found[kind] = self.states.read(key, self._read.at(key))
            if self._zeros is not None:
                found[kind].index_fill_(0, self._zeros, 0)
        return found

    def write(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Keep a layer's parts, as `read` gives them, of rows that are kept."""
        for kind, value in values.items():
            key = layer, kind
            kept = value if self._picked is None else value.index_select(0, self._picked)
            found = self._written.at(key), self.states.cells(key, kept)
            if self._later is None:
                self.states.put(*found)
            else:
                self._later.append(found)

    def commit(self) -> None:
        """The pass is over: write what was put off. No memory is taken, so none can run out when
        states are half written."""
        later, self._later = self._later, None
        for index, cells in later or ():
            self.states.put(index, cells)

    def begun(self) -> None:
        """A pass is over: from here on rows read what they have written."""
        self._read, self._zeros, self._beginning = self._own, None, []
        if self._tables is not None:
            self._tables.begun()

    def stop(self, rows: Sequence[int]) -> None:
        """Nothing that is computed of these rows from here on is kept."""
        gone = set(rows)
        if not gone.isdisjoint(self._active):
            self._active = [row for row in self._active if row not in gone]
            self._pick()
            if self._tables is not None:
                self._tables.stop(rows)

    # --- inside ------------------------------------------------------------------------------

    def _pick(self) -> None:
        """What is written, of the rows that are kept."""
        self._picked, self._written = None, self._own
        if len(self._active) < len(self._own.blocks):
            self._picked = torch.tensor(self._active, dtype=torch.long, device=self.states.device)
            blocks = self._own.blocks.index_select(0, self._picked)
            self._written = _Table(self.states, blocks)

    def _table(self, rows: Sequence[Blocks]) -> _Table:
        if any(len(blocks) < self.states.num_blocks for blocks in rows):
            raise AssertionError("a state is read, or written, that is not on the device")
        blocks = torch.from_numpy(np.array(rows, dtype=np.int64))
        return _Table(self.states, blocks.to(self.states.device))

    def _places(self, rows: Sequence[int]) -> Tensor | None:
        return torch.tensor(rows, device=self.states.device) if rows else None
