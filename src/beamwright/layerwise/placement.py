"""Where the layers of one view reside, and how many fit. Knows no memory and no link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NUM_BUFFERS = 2


def resident_layers(num_layers: int, budget_bytes: int, layer_bytes: int) -> int:
    """Eq. 1 with the two stream buffers inside the budget."""
    if num_layers * layer_bytes <= budget_bytes:
        return num_layers
    return max(0, budget_bytes // layer_bytes - NUM_BUFFERS)


@dataclass
class Placement:
    """The present token's layers and rows.

    resident: layers [0, resident) stay on the device. buffers: the stream buffer of each other
    layer that was fetched. rows: original numbers of the rows of the present batch; the first
    `num_real` have KV of their own, the others pad the batch.
    """

    resident: int
    rows: list[int]
    num_real: int
    buffers: dict[int, int] = field(default_factory=dict)

    def buffer_of(self, layer: int) -> int | None:
        """The stream buffer that holds a layer; None if the layer is resident."""
        return None if layer < self.resident else self.buffers[layer]


def neighbours(
    numbers: Sequence[int], alike: Callable[[int, int], bool] = lambda a, b: True
) -> list[range]:
    """Runs of neighbouring numbers that are alike."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number and alike(runs[-1].start, number):
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
