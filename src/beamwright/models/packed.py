"""Passes over packed tokens: chunks of several paths one behind the other, and how they are run.

A pass over few tokens takes a card less time than its host takes to launch it: it is padded to one
of a few sizes, and run as one step that is captured once (`CapturedPasses`). Padding changes no bit
of what it pads: its tokens see one another alone, their keys and values are kept nowhere, and a
product's row has the same bits among any others (`models.streaming`, on a card; where it has not,
it follows the batch without padding, too). Chunks are cut before: sizes decide no sums. Knows no
requests, and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beamwright.attention.kernels.worklist import LEAST_CHUNK
from beamwright.attention.protocols import AttentionBackend, AttentionView, Workspace
from beamwright.kv.segments import Path
from beamwright.kv.states import StateRows
from beamwright.kv.store import SegmentStore
from beamwright.models.decoder import Decoder, padded_rows
from beamwright.plan.costs import CAPTURED_TOKENS

SIZES = (64, 128, 256, 384, 512, 768, CAPTURED_TOKENS)
"""Tokens of captured passes; with more, what is computed takes longer than the launches of it."""
_FEW = 64  # tokens that are read, or all of them


@dataclass(frozen=True)
class Packed:
    """What a pass computes.

    lengths: tokens of the chunk behind each path. token_ids, positions: [tokens] of all chunks.
    read: the tokens whose hidden states are wanted, in order.
    """

    paths: Sequence[Path]
    lengths: Sequence[int]
    token_ids: Sequence[int]
    positions: Sequence[int]
    read: Sequence[int]

    @property
    def chained(self) -> bool:
        """True if some of it is behind what the pass itself writes: each layer has to be in its
        place before anybody attends to it."""
        return any(part.visible > part.segment.length for path in self.paths for part in path)

    def hidden(self, decoder: Decoder, view: AttentionView) -> Tensor:
        """Hidden states [read, hidden], by a pass of its own; it closes the view."""
        total, device, read_at = len(self.token_ids), decoder.device, None
        padding = padded_rows(total) - total
        if len(self.read) < total:
            spare = padded_rows(len(self.read)) - len(self.read)
            read_at = torch.tensor([*self.read, *[0] * spare], device=device)
        ids, positions = (
            torch.tensor([*each, *[each[0]] * padding], device=device)
            for each in (self.token_ids, self.positions)
        )
        try:
            return decoder.hidden(ids, positions, view, read_at)[: len(self.read)]
        finally:
            view.close()


@dataclass
class Writing(AttentionView):
    """An attention view that also writes every layer's keys and values of the first `num_tokens`,
    those before padding.

    write: takes a layer's group, its place there, as in `places`, and what it is given.
    states: of recurrent layers.
    """

    view: AttentionView
    num_tokens: int
    write: Callable[[int, int, Tensor], None]
    places: Mapping[int, tuple[int, int]]
    states: StateRows | None

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.write(*self.places[layer], key_value[: self.num_tokens])
        context: Tensor = self.view.attend(layer, query, key_value, sinks)
        return context

    def close(self) -> None:
        self.view.close()


Launches = Callable[[], None]
Numbers = npt.NDArray[Any]


class Replay:
    """Runs steps by calling them, and brings what they found to the host.

    The specification of `engine.graphs.CudaGraphReplay`, and all that a CPU needs.
    is_plain: a step is done when `run` returns, so that looking at its results costs no time.
    """

    is_plain = True

    @property
    def idle_bytes(self) -> int:
        """Memory that nothing uses between steps, and nothing else can."""
        return 0

    def run(self, key: Hashable, version: int, step: Launches) -> None:
        """Run `step` once.

        key: its shapes. version: grows when tensors that any step touches have moved.
        """
        step()

    def fetch(self, values: torch.Tensor) -> Callable[[], Numbers]:
        """Start to copy numbers to the host; what is returned waits for them and them alone.

        The caller must not write `values` before it has them.
        """
        return lambda: values.cpu().numpy()

    def release(self) -> None:
        """Forget what was captured, and its memory."""


class CapturedPasses:
    """Passes of one model whose launches are captured: by a size, and whether few tokens are read.

    What a pass reads of the host, token ids and work lists, is in tensors that stay where they are,
    and so is what it finds. So passes follow one another, on whatever stream: the caller's.

    backend: its views keep keys and values themselves. failed: why passes cannot be captured.
    """

    def __init__(
        self, decoder: Decoder, store: SegmentStore, backend: AttentionBackend, replay: Replay
    ) -> None:
        self._decoder, self._store, self._backend = decoder, store, backend
        self.replay = replay
        self._workspace: Workspace | None = None
        self._inputs = self._found = torch.empty(0)

    def hidden(self, packed: Packed, slots: Sequence[Any]) -> Tensor | None:
        """Hidden states [read, hidden]; None where the pass is none of these.

        slots: places of the tokens in the pool, by group of layers.
        """
        total, few = len(packed.token_ids), len(packed.read) <= _FEW
        size = size_of(total, len(packed.lengths))
        if size is None:
            return None
        heads, device = self._decoder.shape.heads, self._decoder.device
        if self._workspace is None:
            width, dtype = self._decoder.shape.hidden, self._decoder.dtype
            self._workspace = self._backend.prefill_workspace(self._store, heads, SIZES[-1])
            self._inputs = torch.zeros(2 * SIZES[-1] + _FEW, dtype=torch.long, device=device)
            self._found = torch.empty(SIZES[-1], width, dtype=dtype, device=device)
        lengths, workspace = packed.lengths, self._workspace
        view = self._backend.prefill_view(self._store, packed.paths, lengths, slots, workspace)
        view.prepare(heads, size)
        inputs, host = self._inputs[: 2 * size + _FEW], np.zeros(2 * size + _FEW, dtype=np.int64)
        host[:total], host[size : size + total] = packed.token_ids, packed.positions
        if few:
            host[2 * size : 2 * size + len(packed.read)] = packed.read
        inputs.copy_(torch.from_numpy(host))
        ids, positions, read = inputs.split([size, size, _FEW])
        found = self._found[: _FEW if few else size]

        def step() -> None:
            found.copy_(self._decoder.hidden(ids, positions, view, read if few else None))

        self.replay.run((size, few), workspace.num_moves, step)
        view.close()
        if few or len(packed.read) == total:
            return found[: len(packed.read)].clone()
        return found[torch.tensor(packed.read, device=device)]


def size_of(num_tokens: int, num_chunks: int) -> int | None:
    """Tokens of the captured pass that takes so many, and chunks; None: none does."""
    fitting = (size for size in SIZES if num_tokens <= size and num_chunks < size // LEAST_CHUNK)
    return next(fitting, None)
