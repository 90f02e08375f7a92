"""Who waits for the running batch: open steps in the order of a plan, and children ahead of them.

Knows nodes and their groups; what they read and whether it fits is `capacity`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from beamwright.engine.capacity import Capacity
from beamwright.engine.row import Row
from beamwright.protocols import Plan
from beamwright.tree import Node, NodeState


class Queue:
    """Open steps, each with the number of its group.

    barriers: a group begins when the one before it has ended. many_groups: the plan has several.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[Node, int]] = deque()
        self._num_groups = 0
        self.barriers = self.many_groups = False

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def nodes(self) -> list[Node]:
        """The next one first."""
        return [node for node, _ in self._pairs]

    @property
    def group(self) -> int:
        """Number of the next one's group."""
        return self._pairs[0][1]

    def replace(self, plan: Plan, running: Collection[Node]) -> None:
        """Wait for what a plan says, but for what runs."""
        self._pairs.clear()
        for group in plan.groups:
            self._num_groups += 1
            self._pairs += [(node, self._num_groups) for node in group if node not in running]
        self.many_groups = len(plan.groups) > 1

    def front(self, most: int) -> list[Node]:
        """The first ones, with barriers those of one group."""
        first = islice(self._pairs, max(0, most))
        return [node for node, group in first if group == self.group or not self.barriers]

    def batches(self, size: int) -> Sequence[Sequence[Node]]:
        """What comes, group by group; without barriers, so many at a time."""
        batches: dict[int, list[Node]] = {}
        for place, (node, group) in enumerate(self._pairs):
            batches.setdefault(group if self.barriers else place // size, []).append(node)
        return list(batches.values())

    def leave(self, count: int = 1) -> Node:
        """So many in front, one at least, do not wait any more; returns the first of them."""
        first, *_ = (self._pairs.popleft()[0] for _ in range(count))
        return first

    def put_back(self, node: Node, group: int) -> None:
        """In front of all."""
        self._pairs.appendleft((node, group))

    def remove(self, nodes: Collection[Node]) -> None:
        """Those of these that wait."""
        self._pairs = deque(pair for pair in self._pairs if pair[0] not in nodes)


class SpeculativeQueue:
    """Children of complete steps, for slots that no open step waits for (FlashTTS section 4.1.2,
    phase 2): those that wait, the likeliest first, and those that hold KV, in the order they got
    it. They never hold what an open step needs: its slots, or its room.

    held: those that hold KV. most_rows: open steps that ran together since the last plan; no more
    rows are filled. fresh: something may have come that can be begun. active: something is to be
    decoded ahead in this round.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, None] = {}
        self.held: dict[Node, None] = {}
        self.most_rows = 0
        self.fresh = self.active = False

    def replace(self, nodes: Iterable[Node]) -> None:
        """What waits now."""
        self._waiting = dict.fromkeys(nodes)
        self.fresh = self.active = bool(self._waiting)

    def put_back(self, node: Node) -> None:
        """One that had to leave goes on before others begin."""
        self._waiting = {node: None, **self._waiting}

    def begin(self, capacity: Capacity, running: Sequence[Row], most: int) -> list[Row]:
        """Rows of those in front, as many as there is free room for; they hold KV from now on.

        Who was opened since, runs, or is complete does not wait.
        """
        self.fresh = False
        rows: list[Row] = []
        under_way = {row.node for row in running}
        for node in self._waiting:
            if len(rows) >= most:
                break
            if not node.speculative or node in under_way or node.state is not NodeState.OPEN:
                continue
            row = capacity.row(node)
            if not capacity.is_free([*rows, row]):
                break
            rows.append(row)
        for row in rows:
            del self._waiting[row.node]
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
