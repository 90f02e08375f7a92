"""The running batch: rows, who joins and leaves, their tokens, sampling, stops.

Below the loop, above models; engine and simulator share all but the tensors.
"""

from beamwright.decode.batching import Batching
from beamwright.decode.lengths import StepLengths
from beamwright.decode.request import Decoding, Decodings
from beamwright.decode.row import Row, Rows
from beamwright.decode.running import RunningBatch

__all__ = ["Batching", "Decoding", "Decodings", "Row", "Rows", "RunningBatch", "StepLengths"]
