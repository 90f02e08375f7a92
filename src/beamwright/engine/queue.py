"""Queue: the open steps that wait, in the order of a plan, group by group."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

from beamwright.protocols import Plan
from beamwright.tree import Node


class Queue:
    """Pairs of a node and the number of its group.

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
        found: dict[int, list[Node]] = {}
        for place, (node, group) in enumerate(self._pairs):
            found.setdefault(group if self.barriers else place // size, []).append(node)
        return list(found.values())

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
