"""How a step that reads no host state is run again and again: by calling it, or as a CUDA graph.

Knows nothing of what the step does. A captured step is the launches of one call with the addresses,
strides and numbers of that call; whoever changes one of them says so by the key or the version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from beamwright.models import FixedBackend, TreeModel

Launches = Callable[[], None]


class Replay(Protocol):
    """Runs steps, and brings what they found to the host without waiting for it."""

    @property
    def is_plain(self) -> bool:
        """A step is done when `run` returns, so that looking at its results costs no time."""
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
    """

    is_plain = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._warm: set[Hashable] = set()
        self._version = 0

    def run(self, key: Hashable, version: int, step: Launches) -> None:
        if version != self._version:
            self.release()
            self._version = version
        if key not in self._warm:
            self._warm_up(step)
            self._warm.add(key)
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(step)
        self._graphs[key].replay()

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

    def _warm_up(self, step: Launches) -> None:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def _capture(self, step: Launches) -> torch.cuda.CUDAGraph:
        """The launches of a call; none of them runs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on talking to CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            step()
        return graph


def make_replay(graphs: str, model: TreeModel) -> Replay | None:
    """How `--graphs` runs steps with this model; None: as plain calls.

    Layer-wise streaming waits for a transfer inside a step, so it has none.
    """
    if graphs == "off" or model.store.streams_layers:
        return None
    device = model.decoder.device
    if device.type == "cuda" and isinstance(model.backend, FixedBackend):
        return CudaGraphReplay(device)
    return EagerReplay() if graphs == "on" else None
