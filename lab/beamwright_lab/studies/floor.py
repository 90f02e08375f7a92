"""The least time that a search can take on a device of so much KV, whoever schedules.

For who keeps whole paths on the device while their rows run, reads what rows share once, forwards
each token that is drawn, and draws one token of a row in a pass. Selection is a barrier: rounds
come one after the other. Loads are left out (`clairvoyant` bounds them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from beamwright.plan.costs import Layout, Roofline
from beamwright_lab.simulator.recorded import RecordedTree


@dataclass(frozen=True)
class RoundNeeds:
    """What the rows of one round need, in tokens.

    longest: of the longest step. drawn: of all steps. seen: that rows attend to, over all passes.
    held: on the device, over all passes, where each pass draws a token of each row whose path it
    holds: a row of t tokens holds 1, 2, ... t of its own, and each node above it is there as often
    as the longest step below it has tokens.
    """

    longest: int
    drawn: int
    seen: int
    held: int

    def passes(self, capacity: int) -> int:
        """Fewest forward passes with so many tokens of KV on the device."""
        return max(self.longest, -(-self.held // capacity))

    def seconds(self, roofline: Roofline, capacity: int) -> float:
        """Of so many passes: the slower of memory and arithmetic, and launches."""
        passes = self.passes(capacity)
        memory_s, compute_s, launch_s = roofline.pass_parts_s(
            max(1, self.drawn // passes), self.held / passes, self.seen / passes, Layout.TREE
        )
        return passes * (max(memory_s, compute_s) + launch_s)


def rounds_of(tree: RecordedTree) -> Iterator[RoundNeeds]:
    """The rounds of a search, the first one first."""
    ends: dict[tuple[int, ...], int] = {(): tree.prompt_tokens}
    sizes = dict(ends)
    rounds: dict[int, list[tuple[int, ...]]] = {}
    for node in tree.nodes:
        sizes[node.lineage] = node.tokens
        ends[node.lineage] = ends[node.lineage[:-1]] + node.tokens
        rounds.setdefault(node.round, []).append(node.lineage)
    for _, rows in sorted(rounds.items()):
        longest_below: dict[tuple[int, ...], int] = {}
        for row in rows:
            for depth in range(len(row)):
                above = row[:depth]
                longest_below[above] = max(longest_below.get(above, 0), sizes[row])
        own = sum(_sum_to(sizes[row]) for row in rows)
        yield RoundNeeds(
            longest=max(sizes[row] for row in rows),
            drawn=sum(sizes[row] for row in rows),
            seen=own + sum(sizes[row] * ends[row[:-1]] for row in rows),
            held=own + sum(sizes[above] * times for above, times in longest_below.items()),
        )


def floor_s(tree: RecordedTree, roofline: Roofline, kv_bytes: int) -> float:
    """Seconds of the whole search. The prompt's prefill is counted as a pass of the first round,
    whose first tokens it draws."""
    capacity = kv_bytes // roofline.model.kv_bytes_per_token
    return sum(each.seconds(roofline, capacity) for each in rounds_of(tree))


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2
