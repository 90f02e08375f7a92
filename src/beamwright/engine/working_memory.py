"""Working memory beside the KV budget: how many rows of a group there is room for right now.

LBS section 4.2 asks for the free memory before every step and sets #Beam by it. KV has its own
ledger; what is asked here is what else a row needs: its tail, its activations, its logits.
"""

from __future__ import annotations

from collections.abc import Callable

from beamwright.models import TreeModel, device_memory


class WorkingMemory:
    """Rows that can be decoded together.

    free_bytes: asked before every plan; None where the machine does not say (a CPU).
    row_bytes: working bytes of a row whose step has so many tokens.
    """

    def __init__(
        self, free_bytes: Callable[[], int] | None, row_bytes: Callable[[int], int]
    ) -> None:
        self._free_bytes, self._row_bytes = free_bytes, row_bytes
        self._failed_at: int | None = None

    @classmethod
    def unknown(cls) -> WorkingMemory:
        """Of a machine that does not say, and of a simulation."""
        return cls(None, lambda step_tokens: 0)

    @classmethod
    def of(cls, model: TreeModel) -> WorkingMemory:
        """The room beside a model's KV."""
        shape, layout = model.decoder.shape, model.store.pool.layout

        def row_bytes(step_tokens: int) -> int:
            tail_tokens = min(
                1 << max(4, (step_tokens - 1).bit_length()), model.backend.tail_tokens
            )
            # What stays is copied out while rows are arranged anew, so a tail exists twice.
            tail = 2 * tail_tokens * layout.bytes_per_token
            return tail + shape.working_bytes_per_row(layout.dtype.itemsize)

        return cls(device_memory.free_bytes(model.decoder.device), row_bytes)

    def max_rows(self, step_tokens: int, held_bytes: int = 0) -> int | None:
        """Rows with steps of this length that there is room for, at least one; None if unknown.

        held_bytes: not free, but kept for the next rows.
        """
        limits = [] if self._failed_at is None else [max(1, self._failed_at // 2)]
        if self._free_bytes is not None:
            free_bytes = self._free_bytes() + held_bytes
            limits.append(max(1, free_bytes // self._row_bytes(step_tokens)))
        return min(limits, default=None)

    def failed(self, num_rows: int) -> None:
        """So many rows were too many; one that does not fit alone says nothing of others."""
        if num_rows > 1:
            self._failed_at = min(num_rows, self._failed_at or num_rows)
