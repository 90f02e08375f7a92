"""Online DeepConf: paths that lose confidence are given up (Fu et al. 2025, Algorithm 2).

The first paths run to their end and set a bar for the others, which go step by step and are pruned
at the end of the first step after which their score lies below it. The published method watches
every token, and stops early where enough votes agree, which is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any

from beamwright.errors import InputError
from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.best_of_n import IndependentPaths
from beamwright.search.rounds import TIE
from beamwright.tree import Node, NodeState, SearchTree

_MOST_FIRST = 16


@strategy(
    "deepconf",
    meaning="best-of-n whose paths are pruned below the confidence of the first ones",
    choose="weighted",
    by_level=False,
    needs_scores=True,
    scorer="deepconf",
    competes=False,
    fills=False,
    votes_change="a path that has voted may still be pruned",
)
class OnlineDeepConf(IndependentPaths):
    """n independent paths, the first `warmup` of which are never given up on the way.

    A `keep` of 0.9 is DeepConf-high, 0.1 DeepConf-low.

    A path's score should be what DeepConf compares, the lowest group confidence so far
    (`--verifier deepconf`); whatever else scores paths is compared in the same way, and a path
    without a score is never below the bar.

    Raises:
        InputError: if the warm-up has more than n paths.
    """

    warmup: int | None = option(
        None, ge=1, metavar="PATHS", help="Paths that set the bar (default: n / 4, at most 16)."
    )
    keep: float = option(
        0.9, gt=0, le=1, metavar="SHARE", help="Share of the warm-up at or above the bar."
    )

    def model_post_init(self, context: Any) -> None:
        if self.num_first > self.search.n:
            raise InputError(f"--warmup {self.warmup} is larger than --n {self.search.n}")

    @property
    def num_first(self) -> int:
        """Paths of the warm-up."""
        return self.warmup or min(_MOST_FIRST, max(1, self.search.n // 4))

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        if tree.rounds == 0:
            return [Extend(tree.root, self.num_first)]
        warming = len(tree.root.children) <= self.num_first
        bar = -math.inf if warming else self._bar(tree)
        waiting = tree.candidates()  # paths that were cut off stay among them to the end
        dropped = _below(waiting, bar)
        ended = [node for node in waiting if node.ended and node not in dropped]
        going = [
            Extend(node, 1)
            for node in waiting
            if not node.ended and node.level < self.search.max_rounds and node not in dropped
        ]
        if going:
            return [*map(Prune, dropped), *map(Complete, ended), *going]
        if warming:  # over: its own paths have to reach the bar, too, to have a vote
            bar = self._bar(tree)
            dropped = _below([*tree.finished(), *waiting], bar)
            ended = [node for node in ended if node not in dropped]
        actions: list[Action] = [*map(Prune, dropped), *map(Complete, ended)]
        if warming and self.num_first < self.search.n:
            return [*actions, Extend(tree.root, self.search.n - self.num_first)]
        ends = [_end(node) for node in tree.root.children]
        full = sum(end.ended and end.state is not NodeState.PRUNED for end in ends)
        fewer, n = len(ends) - full + sum(end.ended for end in dropped), self.search.n
        below = f"fell below the warm-up's {bar:.4g} or " if math.isfinite(bar) else ""
        reason = f"{fewer} of {n} paths {below}reached --max-rounds" if fewer else None
        return [*actions, Finish(reason)]

    def _bar(self, tree: SearchTree) -> float:
        """The confidence that the share `keep` of the warm-up reaches; -inf if nothing scored.

        Interpolated between two neighbours.
        """
        scores = [_end(node).score for node in tree.root.children[: self.num_first]]
        known = sorted(score for score in scores if score is not None and not math.isnan(score))
        if not known:
            return -math.inf
        place = (1 - self.keep) * (len(known) - 1)
        low, high = known[math.floor(place)], known[min(math.floor(place) + 1, len(known) - 1)]
        return low + (place - math.floor(place)) * (high - low)


def _below(nodes: Iterable[Node], bar: float) -> list[Node]:
    return [node for node in nodes if node.score is not None and node.score < bar - TIE]


def _end(node: Node) -> Node:
    """The last step of a path that never branches."""
    while node.children:
        (node,) = node.children
    return node
