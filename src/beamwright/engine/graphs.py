"""How a step that reads no host state is run again and again: by calling it, or as a CUDA graph.

Knows nothing of what the step does. A captured step is the launches of one call with the addresses,
strides and numbers of that call; whoever changes one of them says so by the key or the version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from threading import Lock

import torch

from beamwright.errors import said_by
from beamwright.models.load import is_out_of_memory
from beamwright.models.packed import Launches, Numbers, Replay
from beamwright.models.session import steps_in_place
from beamwright.models.tree_model import TreeModel

_FIRST = -1  # decoding, which is short, before a prefill beside it: there are no more than two


class CudaGraphReplay(Replay):
    """A `Replay` that captures each step once.

    The first run of a key is an ordinary one, which compiles kernels and makes library handles; the
    second is captured. Graphs share one pool: a step leaves its results in tensors from outside,
    so nothing in the pool outlives a replay, and replays follow one another on one stream. Two of
    these share none: the verifier's run beside the generator's, and a pool whose graphs are all
    gone cannot be captured into again, so that neither could let go of its own.

    Where a capture fails, nothing is captured any more: steps run plainly, on the same stream.
    on_failure: hears why. priority: of what is captured, as CUDA counts it: of kernels that wait
    on several streams, those of the least number begin first.
    """

    is_plain = False

    def __init__(
        self, device: torch.device, on_failure: Callable[[str], None], priority: int = 0
    ) -> None:
        self._device, self._on_failure = device, on_failure
        self._alone = _capturing()
        self._failed = False
        self._side = torch.cuda.Stream(device, priority)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._warm: set[Hashable] = set()
        self._version = 0

    def run(self, key: Hashable, version: int, step: Launches) -> None:
        if version != self._version:
            self.release()
            self._version = version
        if key in self._warm and key not in self._graphs and not self._failed:
            with self._alone:
                self._try_capture(key, step)
        if key in self._graphs:
            self._graphs[key].replay()
            return
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with self._alone, torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)
        self._warm.add(key)

    @property
    def idle_bytes(self) -> int:
        """What the graphs' pool holds."""
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

    def _try_capture(self, key: Hashable, step: Launches) -> None:
        """No graph if CUDA or torch refuses to capture the step; memory that is short is raised."""
        current = torch.cuda.current_stream(self._device)
        try:
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on talking to CUDA meanwhile. None of the launches runs.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ):
                step()
        except Exception as error:
            torch.cuda.set_stream(current)  # torch leaves its context half-way
            torch.cuda.synchronize(self._device)
            if is_out_of_memory(error):
                raise
            self._failed = True
            self._on_failure(said_by(error) or repr(error))
        else:
            self._graphs[key] = graph


@cache
def _capturing() -> Lock:
    """Held by who captures in this process, and by who waits for all of a device.

    A thread may launch and allocate while another one captures: captures are `thread_local`. It may
    not wait for the device, which a capture does before it begins: that would end the other's. So
    captures are one after the other, and so is a step's first run, which loads what it launches.
    """
    return Lock()


def make_replay(
    graphs: str, model: TreeModel, on_failure: Callable[[str], None], priority: int = _FIRST
) -> Replay | None:
    """How `--graphs` runs steps with this model; None: as plain calls.

    on_failure: hears why steps cannot be captured after all. Layer-wise streaming waits for a
    transfer inside a step; states that are moved by the host, row by row, are none of a step's
    launches.
    """
    by_host = model.decoder.shape.states and not steps_in_place(model.decoder, model.store)
    if graphs == "off" or model.store.streams_layers or by_host:
        return None
    device = model.decoder.device
    if device.type == "cuda" and model.backend.writes_blocks:
        return CudaGraphReplay(device, on_failure, priority)
    return Replay() if graphs == "on" else None


def capture_passes(graphs: str, model: TreeModel, on_failure: Callable[[str], None]) -> None:
    """Have prefills of this model captured, too, where its steps would be."""
    replay = make_replay(graphs, model, on_failure, priority=0)
    if replay is not None:
        model.capture(replay)
