"""Runs prefill passes: chunks of several paths, concatenated in one forward pass.

On a GPU, launching a pass over few tokens takes longer than computing it. Such a pass is padded to
one of a few sizes and captured once as a CUDA graph (`CapturedPasses`). Padding does not change
results: padding tokens attend only to each other, and their keys and values are discarded. Matrix
products on a GPU are batch-invariant (`models.streaming`). Where products are not
batch-invariant, results depend on the batch even without padding. Chunks are chosen before padding,
so padding does not change how attention's sums are split. `prefill` decides what runs in a pass.
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
from beamwright.kv.states import RowStates
from beamwright.kv.store import SegmentStore
from beamwright.models.decoder import Decoder, padded_rows
from beamwright.plan.costs import CAPTURED_TOKENS

# Token counts of captured passes. Larger passes take longer to compute than to launch.
SIZES = (64, 128, 256, 384, 512, 768, CAPTURED_TOKENS)
_FEW = 64  # a pass returns the hidden states of at most this many tokens, or of all tokens


@dataclass(frozen=True)
class PassInput:
    """The input of one prefill pass.

    paths: the tokens before each chunk, to which it attends besides itself.
    lengths: the number of tokens in each path's chunk.
    token_ids, positions: [tokens], all chunks concatenated.
    read: indices of the tokens whose hidden states are returned, in order.
    """

    paths: Sequence[Path]
    lengths: Sequence[int]
    token_ids: Sequence[int]
    positions: Sequence[int]
    read: Sequence[int]

    @property
    def is_chained(self) -> bool:
        """True if a chunk attends to another chunk of the same pass.

        In such a pass, each layer's KV must be stored before that layer's attention runs.
        """
        return any(part.visible > part.segment.length for path in self.paths for part in path)

    def hidden(self, decoder: Decoder, view: AttentionView) -> Tensor:
        """Run the pass without a CUDA graph; return the hidden states [read, hidden].

        The view is closed afterwards.
        """
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
class WritingView(AttentionView):
    """An attention view that also stores each layer's keys and values.

    view: the view that computes attention.
    num_tokens: the number of tokens before padding; only their KV is stored.
    write: called with the layer's group, its index in the group, and the keys and values.
    places: (group, index in the group) of each layer.
    states: the states of recurrent layers.
    """

    view: AttentionView
    num_tokens: int
    write: Callable[[int, int, Tensor], None]
    places: Mapping[int, tuple[int, int]]
    states: RowStates | None

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
    """Runner of decode passes and prefills that calls them directly, without CUDA graphs.

    It is the implementation for CPUs, and the specification of `engine.graphs.CudaGraphReplay`.

    is_plain: True if a pass is complete when `run` returns, so that reading its results does not
        wait.
    """

    is_plain = True

    @property
    def cuda_graph_bytes(self) -> int:
        """Bytes that captured graphs reserve between passes and that no other code can use."""
        return 0

    def run(self, key: Hashable, version: int, launches: Launches) -> None:
        """Run `launches` once, or replay the CUDA graph that was captured of it.

        key: identifies the shapes of the pass.
        version: increases when tensors that any pass uses have moved, which invalidates captures.
        """
        launches()

    def fetch(self, values: torch.Tensor) -> Callable[[], Numbers]:
        """Start copying `values` to the host; return a function that waits for the copy.

        The caller must not overwrite `values` before that function has returned.
        """
        return lambda: values.cpu().numpy()

    def release(self) -> None:
        """Free all captures and their memory."""


class CapturedPasses:
    """CUDA graphs of one model's prefill passes, by size and by whether few outputs are read.

    Inputs from the host (token ids, work lists) and outputs are in tensors at fixed addresses. So
    passes must run one after the other, on the caller's stream.

    backend: an attention backend whose views store keys and values themselves.
    """

    def __init__(
        self, decoder: Decoder, store: SegmentStore, backend: AttentionBackend, replay: Replay
    ) -> None:
        self._decoder, self._store, self._backend = decoder, store, backend
        self.replay = replay
        self._workspace: Workspace | None = None
        self._inputs = self._outputs = torch.empty(0)

    def hidden(self, packed: PassInput, slots: Sequence[Any]) -> Tensor | None:
        """Run the pass; return hidden states [read, hidden], or None if no captured size fits.

        slots: the tokens' slots in the pool, per layer group.
        """
        total, few = len(packed.token_ids), len(packed.read) <= _FEW
        size = captured_size(total, len(packed.lengths))
        if size is None:
            return None
        heads, device = self._decoder.shape.heads, self._decoder.device
        if self._workspace is None:
            width, dtype = self._decoder.shape.hidden, self._decoder.dtype
            self._workspace = self._backend.prefill_workspace(self._store, heads, SIZES[-1])
            self._inputs = torch.zeros(2 * SIZES[-1] + _FEW, dtype=torch.long, device=device)
            self._outputs = torch.empty(SIZES[-1], width, dtype=dtype, device=device)
        lengths, workspace = packed.lengths, self._workspace
        view = self._backend.prefill_view(self._store, packed.paths, lengths, slots, workspace)
        view.prepare(heads, size)
        inputs, host = self._inputs[: 2 * size + _FEW], np.zeros(2 * size + _FEW, dtype=np.int64)
        host[:total], host[size : size + total] = packed.token_ids, packed.positions
        if few:
            host[2 * size : 2 * size + len(packed.read)] = packed.read
        inputs.copy_(torch.from_numpy(host))
        ids, positions, read = inputs.split([size, size, _FEW])
        outputs = self._outputs[: _FEW if few else size]

        def step() -> None:
            outputs.copy_(self._decoder.hidden(ids, positions, view, read if few else None))

        self.replay.run((size, few), workspace.num_moves, step)
        view.close()
        if few or len(packed.read) == total:
            return outputs[: len(packed.read)].clone()
        return outputs[torch.tensor(packed.read, device=device)]


def captured_size(num_tokens: int, num_chunks: int) -> int | None:
    """Return the smallest captured size for these tokens and chunks, or None if none fits."""
    fitting = (size for size in SIZES if num_tokens <= size and num_chunks < size // LEAST_CHUNK)
    return next(fitting, None)
