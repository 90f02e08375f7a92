"""CUDA graphs: capture a decode pass or a prefill once, and replay its kernel launches.

A captured pass repeats one call's launches with that call's addresses, strides and numbers. A
caller that changes one of these must change the pass's key or version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from threading import Lock

import torch

from beamwright.errors import message_of
from beamwright.models.load import is_out_of_memory
from beamwright.models.prefill_passes import Launches, Numbers, Replay
from beamwright.models.session import updates_states_in_place
from beamwright.models.tree_model import TreeModel

# Stream priority of decoding: its short passes go before a concurrent prefill (priority 0).
_FIRST = -1


class CudaGraphReplay(Replay):
    """A `Replay` that captures each pass as a CUDA graph, one per key.

    The first run of a key is a plain call, which compiles kernels and creates library handles. The
    second run is captured, later runs replay it. The graphs of an instance share one memory pool,
    because replays follow one another on one stream, and a pass leaves its results outside the
    pool. Two instances do not share a pool, because generator and verifier run concurrently. A
    pool cannot be used again once all its graphs are deleted, so `release` takes a new one.

    If a capture fails, no later pass is captured: passes run plainly, on the same stream.

    on_failure: called with the reason of a failed capture.
    priority: CUDA's stream priority of the captured kernels; of kernels that wait on several
        streams, those with the lowest number start first.
    """

    is_plain = False

    def __init__(
        self, device: torch.device, on_failure: Callable[[str], None], priority: int = 0
    ) -> None:
        self._device, self._on_failure = device, on_failure
        self._alone = _capture_lock()
        self._failed = False
        self._side = torch.cuda.Stream(device, priority)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._warm: set[Hashable] = set()
        self._version = 0

    def run(self, key: Hashable, version: int, launches: Launches) -> None:
        if version != self._version:
            self.release()
            self._version = version
        if key in self._warm and key not in self._graphs and not self._failed:
            with self._alone:
                self._try_capture(key, launches)
        if key in self._graphs:
            self._graphs[key].replay()
            return
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with self._alone, torch.cuda.stream(self._side):
            launches()
        current.wait_stream(self._side)
        self._warm.add(key)

    @property
    def cuda_graph_bytes(self) -> int:
        """Bytes that the graphs' memory pool holds, even while nothing runs."""
        if not self._graphs:
            return 0
        segments = torch.cuda.memory_snapshot(self._pool)
        return sum(segment["total_size"] for segment in segments)

    def fetch(self, values: torch.Tensor) -> Callable[[], Numbers]:
        held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        held.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))

        def wait() -> Numbers:
            copied.synchronize()
            return held.numpy()

        return wait

    def release(self) -> None:
        with self._alone:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._warm.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _try_capture(self, key: Hashable, launches: Launches) -> None:
        """Capture the launches, or report why CUDA or torch cannot. Raise if memory is short."""
        current = torch.cuda.current_stream(self._device)
        try:
            graph = torch.cuda.CUDAGraph()
            # "thread_local" lets other threads use CUDA meanwhile. Captured launches do not run.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ):
                launches()
        except Exception as error:
            torch.cuda.set_stream(current)  # after an error torch does not restore the stream
            torch.cuda.synchronize(self._device)
            if is_out_of_memory(error):
                raise
            self._failed = True
            self._on_failure(message_of(error) or repr(error))
        else:
            self._graphs[key] = graph


@cache
def _capture_lock() -> Lock:
    """Return the process-wide lock to hold during a capture, or while waiting for a whole device.

    During a capture, other threads may launch kernels and allocate, because captures are
    `thread_local`. They must not wait for the device, which would end the capture. A capture itself
    waits for the device before it begins, so captures exclude one another. They also exclude a
    pass's first run, which loads kernels.
    """
    return Lock()


def make_replay(
    graphs: str, model: TreeModel, on_failure: Callable[[str], None], priority: int = _FIRST
) -> Replay | None:
    """Create the runner of the model's passes, according to `--graphs`; None for plain calls.

    Passes that wait for transfers are not captured: layer-wise streaming, and offloaded weights.
    Recurrent states that the host moves row by row are not captured either.

    on_failure: called with the reason if passes cannot be captured after all.
    """
    by_host = model.decoder.shape.states and not updates_states_in_place(model.decoder, model.store)
    waits = model.store.streams_layers or model.decoder.offload is not None
    if graphs == "off" or waits or by_host:
        return None
    device = model.decoder.device
    if device.type == "cuda" and model.backend.writes_blocks:
        return CudaGraphReplay(device, on_failure, priority)
    return Replay() if graphs == "on" else None


def capture_prefills(graphs: str, model: TreeModel, on_failure: Callable[[str], None]) -> None:
    """Capture this model's prefills too, if its decode passes can be captured."""
    replay = make_replay(graphs, model, on_failure, priority=0)
    if replay is not None:
        model.capture(replay)
