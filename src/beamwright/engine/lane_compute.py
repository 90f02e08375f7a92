"""How a lane computes: with torch's threads on a CPU, on a stream of its own on a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from beamwright.engine.lanes import LaneCompute


def lane_compute(device: torch.device) -> LaneCompute:
    """For a verifier on this device."""
    return CudaLane(device) if device.type == "cuda" else on_host


@contextmanager
def on_host() -> Iterator[None]:
    """As many threads as the loop computes with, and so the same bits.

    A thread takes torch's number over when it first asks, and keeps it while others change theirs.
    """
    torch.get_num_threads()
    yield


class CudaLane:
    """A `LaneCompute` on a stream of its own.

    It starts behind what the loop's stream holds, and is empty at its end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Made once: torch hands out the same few in turn, and another one's captures are on them.
        self._stream = torch.cuda.Stream(device)

    def __call__(self) -> AbstractContextManager[None]:
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(self._device))
        return self._computing(before)

    @contextmanager
    def _computing(self, before: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(before)
        # Device and stream are a thread's own.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()
