"""Checksums: what comes back over the link is compared with what went (`--check-transfers`).

Sums are made by the host, which waits for the device: of a share of all segments.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from beamwright.errors import LinkError


class Checksums:
    """Of the blocks of a share of all segments, by place in the segment.

    num_compared: blocks that came back.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._below, self.num_compared = share * 2**32, 0
        self._sums: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._coming: dict[Any, None] = {}

    def went(self, segment: Any, first: int, blocks: Sequence[Any]) -> None:
        """A segment's blocks go to the host, from number `first` on."""
        if segment.serial * 0x9E3779B1 % 2**32 < self._below:
            self._sums.setdefault(segment, [])[first:] = map(_sum, blocks)

    def comes(self, segment: Any) -> None:
        """It is on its way back."""
        if segment in self._sums:
            self._coming[segment] = None

    def came(self, segment: Any, blocks: Sequence[Any]) -> int:
        """It is there, and nobody has written to it yet; gives the blocks that were compared.

        Raises:
            LinkError: if it is not what went.
        """
        if segment not in self._coming:
            return 0
        del self._coming[segment]
        found = [*map(_sum, blocks)]
        pairs = zip(found, self._sums[segment], strict=True)
        changed = [number for number, (came, went) in enumerate(pairs) if came != went]
        if changed:
            raise LinkError(f"blocks {changed} of segment {segment.name!r} came back changed")
        self.num_compared += len(found)
        return len(found)


def _sum(block: Any) -> int:
    array: Any = block.cpu().numpy() if isinstance(block, torch.Tensor) else block
    return zlib.crc32(array)
