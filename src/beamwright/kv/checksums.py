"""Checksums: what comes back over the link is compared with what went. A debugging option.

Off by default: sums are made by the host, which waits for the device. `HostTier.checks` switches it
on (tests do).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch


class Checksums:
    """Of the blocks of segments, by place in the segment. num_compared: blocks that came back."""

    def __init__(self) -> None:
        self.num_compared = 0
        self._sums: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._coming: dict[Any, None] = {}

    def went(self, segment: Any, first: int, blocks: Sequence[Any]) -> None:
        """A segment's blocks go to the host, from number `first` on."""
        self._sums.setdefault(segment, [])[first:] = map(_sum, blocks)

    def comes(self, segment: Any) -> None:
        """It is on its way back."""
        self._coming[segment] = None

    def came(self, segment: Any, blocks: Sequence[Any]) -> None:
        """It is there, and nobody has written to it yet.

        Raises:
            AssertionError: if it is not what went.
        """
        if segment not in self._coming:
            return
        del self._coming[segment]
        found = [*map(_sum, blocks)]
        changed = [
            n
            for n, pair in enumerate(zip(found, self._sums[segment], strict=True))
            if len({*pair}) > 1
        ]
        if changed:
            raise AssertionError(f"blocks {changed} of segment {segment.name!r} came back changed")
        self.num_compared += len(found)


def _sum(block: Any) -> int:
    array: Any = block.cpu().numpy() if isinstance(block, torch.Tensor) else block
    return zlib.crc32(array)
