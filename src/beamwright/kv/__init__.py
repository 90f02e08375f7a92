"""Block pools, segments and byte accounting on the device. Knows no models, no strategies."""

from beamwright.kv.budget import DeviceBudget
from beamwright.kv.pool import BlockPool, KVLayout
from beamwright.kv.store import Path, PathPart, Segment, SegmentStore, truncate_path
from beamwright.kv.tail import TailBuffer

__all__ = [
    "BlockPool",
    "DeviceBudget",
    "KVLayout",
    "Path",
    "PathPart",
    "Segment",
    "SegmentStore",
    "TailBuffer",
    "truncate_path",
]
