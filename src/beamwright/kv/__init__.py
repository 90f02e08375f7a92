"""Block pools, segments, two tiers and the link between them. Knows no models, no strategies."""

from beamwright.kv.budget import ByteBudget, ScratchMeter
from beamwright.kv.host_streams import HostStreams
from beamwright.kv.hosted import HostedStore
from beamwright.kv.lease import Lease
from beamwright.kv.ledger import BlockLedger
from beamwright.kv.link import Link, Piece, Transfer, TransferState
from beamwright.kv.movement import HostTier
from beamwright.kv.pool import BlockPool, KVLayout
from beamwright.kv.residency import Residency
from beamwright.kv.row_tails import RowTails
from beamwright.kv.segments import (
    Path,
    PathPart,
    Segment,
    Source,
    copies_needed,
    truncate_path,
    visible_path,
)
from beamwright.kv.store import SegmentStore
from beamwright.kv.stream_link import StreamLink
from beamwright.kv.streams import CudaStreams
from beamwright.kv.tail import Tail
from beamwright.kv.wire import Wire
from beamwright.protocols import Direction

__all__ = [
    "BlockLedger",
    "BlockPool",
    "ByteBudget",
    "CudaStreams",
    "Direction",
    "HostStreams",
    "HostTier",
    "HostedStore",
    "KVLayout",
    "Lease",
    "Link",
    "Path",
    "PathPart",
    "Piece",
    "Residency",
    "RowTails",
    "ScratchMeter",
    "Segment",
    "SegmentStore",
    "Source",
    "StreamLink",
    "Tail",
    "Transfer",
    "TransferState",
    "Wire",
    "copies_needed",
    "truncate_path",
    "visible_path",
]
