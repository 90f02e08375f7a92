"""A lower bound on the time of a search with a given KV budget, for any schedule.

It holds for engines that keep a row's whole path on the device while the row runs, read shared KV
once per pass, and compute one token per row and pass. Rounds follow one another, because selection
needs all scores. Loads over the link are not counted; `clairvoyant` bounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from beamwright.plan.costs import Layout, Roofline
from beamwright_lab.simulator.recorded import RecordedTree


@dataclass(frozen=True)
class RoundNeeds:
    """The work of one round, in tokens.

    longest: length of the longest step. drawn: summed length of all steps. seen: tokens that rows
    attend to, summed over all passes. held: tokens of KV on the device, summed over all passes. A
    step of t tokens holds 1, 2, ..., t of its own; a node above it is held for as many passes as
    the longest step below it has tokens.
    """

    longest: int
    drawn: int
    seen: int
    held: int

    def passes(self, capacity: int) -> int:
        """Return the fewest forward passes with `capacity` tokens of KV on the device."""
        return max(self.longest, -(-self.held // capacity))

    def seconds(self, roofline: Roofline, capacity: int) -> float:
        """Return the seconds of all passes: the slower of memory and arithmetic, plus launches."""
        passes = self.passes(capacity)
        memory_s, compute_s, launch_s = roofline.pass_parts_s(
            max(1, self.drawn // passes), self.held / passes, self.seen / passes, Layout.TREE
        )
        return passes * (max(memory_s, compute_s) + launch_s)


def rounds_of(tree: RecordedTree) -> Iterator[RoundNeeds]:
    """Yield the work of each round in order."""
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
    """Return the lower bound in seconds of the whole search.

    The prompt's prefill counts as the first pass of the first round.
    """
    capacity = kv_bytes // roofline.model.kv_bytes_per_token
    return sum(each.seconds(roofline, capacity) for each in rounds_of(tree))


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2
