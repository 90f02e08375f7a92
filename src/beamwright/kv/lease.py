"""Lease: pins that keep segments on the device while a group reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from beamwright.kv.segments import Segment


class Lease:
    """Pins on segments; some may be given up, or added, before the lease ends."""

    def __init__(self, needs: Mapping[Segment, int]) -> None:
        self._held: Counter[Segment] = Counter()
        self.add(needs)

    def add(self, needs: Mapping[Segment, int]) -> None:
        """Pin so many more copies of each."""
        for segment, copies in needs.items():
            self._held[segment] += copies
            segment.pins += copies

    def keep(self, needs: Mapping[Segment, int]) -> None:
        """Unpin everything beyond these."""
        for segment, held in self._held.items():
            kept = min(held, needs.get(segment, 0))
            segment.pins -= held - kept
            self._held[segment] = kept
