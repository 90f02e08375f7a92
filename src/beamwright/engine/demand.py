"""What KV a round's beams need: from nodes and segments to the numbers that a schedule sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from beamwright.engine.paths import segment_of
from beamwright.kv.cache import CacheManager
from beamwright.protocols import KVDemand
from beamwright.tree import Node


class DemandBuilder:
    """Numbers the segments of a round, parents first.

    expected_tokens: how many tokens an open node's step will hold.
    """

    def __init__(self, residency: CacheManager, expected_tokens: Callable[[Node], int]) -> None:
        self._residency, self._expected = residency, expected_tokens
        self._previous_need_bytes: int | None = None

    def build(self, beams: Sequence[Node]) -> KVDemand:
        """The demand of these open nodes."""
        numbering = _Numbering(self._residency)
        ledger = self._residency.device
        leaf: list[int | None] = []
        growth: list[int] = []
        for beam in beams:
            segment = segment_of(beam)
            stored = segment.length if segment is not None else 0
            # A parked beam has stored whole blocks of its step; it reads them like any segment.
            leaf.append(numbering.leaf(beam, stored))
            blocks = ledger.blocks_for(self._expected(beam)) - ledger.blocks_for(stored)
            growth.append(max(1, blocks) * ledger.bytes_per_block)
        parent, sizes, resident = numbering.parent, numbering.sizes, numbering.resident
        previous, self._previous_need_bytes = self._previous_need_bytes, sum(sizes) + sum(growth)
        return KVDemand(
            parent=parent,
            segment_bytes=sizes,
            resident=resident,
            leaf=leaf,
            growth_bytes=growth,
            capacity_bytes=ledger.num_blocks * ledger.bytes_per_block,
            copy_per_beam=self._residency.copies_per_beam,
            previous_need_bytes=previous,
        )


class _Numbering:
    """Segments in the order in which paths first meet them."""

    def __init__(self, residency: CacheManager) -> None:
        self._ledger = residency.device
        self._number: dict[Node, int] = {}
        self.parent: list[int | None] = []
        self.sizes: list[int] = []
        self.resident: list[int] = []

    def leaf(self, beam: Node, stored_tokens: int) -> int | None:
        """The number of the deepest segment that a beam reads."""
        above: int | None = None
        for node in beam.path():
            # A prompt or a turn has no KV until the first row behind it is admitted.
            tokens = stored_tokens if node is beam else len(node.token_ids)
            if tokens == 0:
                continue
            if node not in self._number:
                self._number[node] = self._add(node, tokens, above)
            above = self._number[node]
        return above

    def _add(self, node: Node, num_tokens: int, above: int | None) -> int:
        segment = segment_of(node)
        self.parent.append(above)
        self.sizes.append(self._ledger.blocks_for(num_tokens) * self._ledger.bytes_per_block)
        stored = segment is not None and segment.length > 0
        self.resident.append(len(segment.copies) if segment is not None and stored else 0)
        return len(self.parent) - 1
