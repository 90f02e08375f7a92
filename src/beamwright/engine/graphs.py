"""How a step that reads no host state is run again and again: by calling it, or as a CUDA graph.

Knows nothing of what the step does. A captured step is the launches of one call with the addresses,
strides and numbers of that call; whoever changes one of them says so by the key or the version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from beamwright.models import FixedBackend, TreeModel
from beamwright.models.device_memory import is_out_of_memory

Launches = Callable[[], None]
_REASON_LENGTH = 200


class Replay(Protocol):
    """Runs steps, and brings what they found to the host without waiting for it."""

    @property
    def is_plain(self) -> bool:
        """A step is done when `run` returns, so that looking at its results costs no time."""
        ...

    @property
    def idle_bytes(self) -> int:
        """Memory that nothing uses between steps, and nothing else can."""
        ...

    def run(self, key: Hashable, version: int, step: Launches) -> None:
        """Run `step` once.

        key: its shapes. version: grows when tensors that any step touches have moved.
        """
        ...

    def fetch(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """Start to copy integers to the host; what is returned waits for them and them alone."""
        ...

    def release(self) -> None:
        """Forget what was captured, and its memory."""
        ...


class EagerReplay:
    """A `Replay` that calls the step: the specification of the other, and all that a CPU needs."""

    is_plain = True
    idle_bytes = 0

    def run(self, key: Hashable, version: int, step: Launches) -> None:
        step()

    def fetch(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """The caller must not write `values` before it has them."""
        return values.tolist

    def release(self) -> None:
        """Nothing is held."""


class CudaGraphReplay:
    """A `Replay` that captures each step once. Unmeasured: no GPU has run it yet.

    The first run of a key is an ordinary one, which compiles kernels and makes library handles; the
    second is captured. Graphs share one pool: a step leaves its results in tensors from outside,
    so nothing in the pool outlives a replay, and replays follow one another on one stream.

    Where a capture fails, nothing is captured any more: steps run plainly, on the same stream.
    on_failure: hears why.
    """

    is_plain = False

    def __init__(self, device: torch.device, on_failure: Callable[[str], None]) -> None:
        self._device, self._on_failure = device, on_failure
        self._failed = False
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._warm: set[Hashable] = set()
        self._version = 0

    def run(self, key: Hashable, version: int, step: Launches) -> None:
        if version != self._version:
            self.release()
            self._version = version
        if key in self._warm and key not in self._graphs and not self._failed:
            self._try_capture(key, step)
        if key in self._graphs:
            self._graphs[key].replay()
            return
        self._run_aside(step)
        self._warm.add(key)

    @property
    def idle_bytes(self) -> int:
        """What the graphs' pool holds."""
        if not self._graphs:
            return 0
        return sum(each["total_size"] for each in torch.cuda.memory_snapshot(self._pool))

    def fetch(self, values: torch.Tensor) -> Callable[[], list[int]]:
        held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        held.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))

        def wait() -> list[int]:
            copied.synchronize()
            found: list[int] = held.tolist()
            return found

        return wait

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._warm.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _run_aside(self, step: Launches) -> None:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def _try_capture(self, key: Hashable, step: Launches) -> None:
        """No graph if CUDA or torch refuses to capture the step; memory that is short is raised."""
        current = torch.cuda.current_stream(self._device)
        try:
            self._graphs[key] = self._capture(step)
        except Exception as error:
            torch.cuda.set_stream(current)  # torch leaves its context half-way
            torch.cuda.synchronize(self._device)
            if is_out_of_memory(error):
                raise
            self._failed = True
            self._on_failure(" ".join(str(error).split())[:_REASON_LENGTH] or repr(error))

    def _capture(self, step: Launches) -> torch.cuda.CUDAGraph:
        """The launches of a call; none of them runs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on talking to CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            step()
        return graph


def make_replay(graphs: str, model: TreeModel, on_failure: Callable[[str], None]) -> Replay | None:
    """How `--graphs` runs steps with this model; None: as plain calls.

    on_failure: hears why steps cannot be captured after all. Layer-wise streaming waits for a
    transfer inside a step, so it has none.
    """
    if graphs == "off" or model.store.streams_layers:
        return None
    device = model.decoder.device
    if device.type == "cuda" and isinstance(model.backend, FixedBackend):
        return CudaGraphReplay(device, on_failure)
    return EagerReplay() if graphs == "on" else None
