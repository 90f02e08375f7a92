"""Streams without a GPU: queues whose work runs as early, or as late, as their order allows.

A race is found by the order that is worst for it: copies that run at the first moment at which they
may (`EagerStreams`), or at the last (`LateStreams`). Both can be made careless, as a link without
the events would be.
"""

import numpy as np
import torch


def copy_piece(piece):
    if isinstance(piece.destination, torch.Tensor):
        assert piece.destination.is_contiguous(), "CudaStreams takes nothing else"
        assert piece.source.is_contiguous(), "CudaStreams takes nothing else"
        piece.destination.copy_(piece.source)
    else:
        np.copyto(piece.destination, piece.source)


class EagerStreams:
    """Compute runs when told to; a copy runs at the first moment at which its marker allows it.

    careless: copies ignore what they must wait for, as a link without events would.
    held: what compute was told to wait for; the host tells nobody's compute anything here.
    """

    strided, batches = False, True

    def __init__(self, *, careless=False):
        self.careless = careless
        self.compute, self.done = [], 0
        self.side, self.copied, self.held = [], [], []

    def queue(self, operation):
        self.compute.append(operation)

    def run_compute(self):
        while self.done < len(self.compute):
            self.compute[self.done]()
            self.done += 1
            self._advance()

    def _advance(self):
        while self.side and (self.careless or self.side[0].after <= self.done):
            self.side.pop(0).run()

    def copy(self, direction, pieces):
        copied = CopyHandle(self, direction, pieces, len(self.compute))
        self.copied.append(copied)
        self.side.append(copied)
        self._advance()
        return copied

    def delay_compute(self, copied):
        self.held.append(copied)
        return lambda: 0.01 if copied.ran else None  # a stall of 10 ms, known once they have run

    def close(self):
        """What was told to copy copies, as on a card."""


class LateStreams(EagerStreams):
    """Compute is what the host computes, at once; copies run when somebody waits, and not before.

    careless: nobody waits.
    """

    def _advance(self):
        pass

    def run_until(self, copied):
        """A direction keeps its order; the other one is left alone."""
        lane = [each for each in self.side if each.direction is copied.direction]
        for each in lane[: lane.index(copied) + 1] if copied in lane else []:
            self.side.remove(each)
            each.run()

    def delay_compute(self, copied):
        if not self.careless:
            self.run_until(copied)
        return super().delay_compute(copied)

    def run_compute(self):
        while self.side:
            self.side.pop(0).run()


class CopyHandle:
    """times: what `ran_s` says, once the copies have run."""

    times = None

    def __init__(self, streams, direction, pieces, after):
        self.streams, self.direction, self.pieces, self.after = streams, direction, pieces, after
        self.ran = False

    def run(self):
        for piece in self.pieces:
            copy_piece(piece)
        self.ran = True

    def query(self):
        return self.ran

    def synchronize(self):
        if isinstance(self.streams, LateStreams):
            self.streams.run_until(self)
        else:
            self.streams.run_compute()
        assert self.ran

    def cancel(self):
        self.synchronize()
        return 0

    @property
    def ran_s(self):
        return self.times
