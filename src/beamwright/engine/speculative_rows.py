"""Speculative rows: which children may be decoded ahead of selection, and how many at a time.

Slots that no open step waits for go to children of steps that are complete (FlashTTS section
4.1.2, phase 2). They never hold what an open step needs: its slots, or its room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from beamwright.engine.room import Room
from beamwright.engine.row import Row
from beamwright.tree import Node, NodeState


class SpeculativeQueue:
    """Children that wait, the likeliest first, and those that hold KV, in the order they got it.

    held: those that hold KV. most_rows: open steps that ran together since the last plan; no more
    rows are filled. fresh: something may have come that can be begun. active: something is to be
    decoded ahead in this round.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, None] = {}
        self.held: dict[Node, None] = {}
        self.most_rows = 0
        self.fresh = self.active = False

    def count(self, running: Sequence[Row]) -> tuple[int, int]:
        """How many of these rows are of open nodes, and how many speculative."""
        ahead = sum(row.speculative for row in running)
        self.most_rows = max(self.most_rows, len(running) - ahead)
        return len(running) - ahead, ahead

    def replace(self, nodes: Iterable[Node]) -> None:
        """What waits now."""
        self._waiting = dict.fromkeys(nodes)
        self.fresh = self.active = bool(self._waiting)

    def put_back(self, node: Node) -> None:
        """One that had to leave goes on before others begin."""
        self._waiting = {node: None, **self._waiting}

    def front(self, running: Sequence[Row]) -> Iterator[Node]:
        """Those that wait: not opened since, not among these rows, and not complete."""
        under_way = {row.node for row in running}
        for node in list(self._waiting):
            if node.speculative and node not in under_way and node.state is NodeState.OPEN:
                yield node

    def begin(self, room: Room, running: Sequence[Row], most: int) -> list[Row]:
        """Rows of those in front, as many as there is free room for; they hold KV from now on."""
        self.fresh = False
        rows: list[Row] = []
        for node in islice(self.front(running), most):
            row = room.row(node, 0)
            if not room.is_free([*rows, row]):
                break
            rows.append(row)
        for row in rows:
            self._waiting.pop(row.node, None)
            self.held[row.node] = None
        return rows

    def forget(self, node: Node) -> None:
        """It holds nothing any more, and does not wait."""
        self._waiting.pop(node, None)
        self.held.pop(node, None)

    def last(self) -> Node | None:
        """The one whose room is given up first; None if there is none."""
        for node in [node for node in self.held if not node.speculative]:
            del self.held[node]  # selection has opened it
        return next(reversed(self.held), None)
