"""Online DeepConf: prune paths of low confidence (Fu et al. 2025, Algorithm 2).

The first paths, the warm-up, run to their end. Their scores set the bar, the lowest confidence that
is accepted. Each later path is pruned after its first step with a score below the bar. The
published method instead checks the confidence after every token, and it stops the search early if
enough votes agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any

from beamwright.errors import InputError
from beamwright.protocols import Action, EndSearch, Extend, FinishPath, Prune
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.best_of_n import IndependentPaths
from beamwright.search.rounds import TIE
from beamwright.tree import Node, NodeState, SearchTree

_MOST_FIRST = 16  # largest default number of warm-up paths


@strategy(
    "deepconf",
    meaning="best-of-n that prunes paths below the confidence of the first ones",
    choose="weighted",
    by_level=False,
    needs_scores=True,
    scorer="deepconf",
    competes=False,
    fills=False,
    votes_change="a path that has voted may still be pruned",
)
class OnlineDeepConf(IndependentPaths):
    """Online DeepConf with n independent paths; the first `warmup` paths run to their end.

    A `keep` of 0.9 is DeepConf-high, and 0.1 is DeepConf-low.

    A path's score should be the lowest group confidence so far (`--verifier deepconf`), because
    DeepConf compares this value. Scores of other verifiers are compared in the same way. A path
    without a score is never below the bar.

    Raises:
        InputError: if the warm-up has more than n paths.
    """

    warmup: int | None = option(
        None,
        ge=1,
        metavar="PATHS",
        help="Warm-up paths that set the bar (default: n / 4, at most 16).",
    )
    keep: float = option(
        0.9, gt=0, le=1, metavar="SHARE", help="Share of warm-up paths at or above the bar."
    )

    def model_post_init(self, context: Any) -> None:
        if self.num_first > self.search.n:
            raise InputError(
                f"--warmup {self.warmup} is larger than --n {self.search.n}; lower --warmup"
            )

    @property
    def num_first(self) -> int:
        """The number of warm-up paths."""
        return self.warmup or min(_MOST_FIRST, max(1, self.search.n // 4))

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        if tree.rounds == 0:
            return [Extend(tree.root, self.num_first)]
        warming = len(tree.root.children) <= self.num_first
        bar = -math.inf if warming else self._bar(tree)
        # Paths that reached max_rounds without ending remain candidates until the search ends.
        waiting = tree.candidates()
        dropped = _nodes_below(waiting, bar)
        ended = [node for node in waiting if node.ended and node not in dropped]
        going = [
            Extend(node, 1)
            for node in waiting
            if not node.ended and node.level < self.search.max_rounds and node not in dropped
        ]
        if going:
            return [*map(Prune, dropped), *map(FinishPath, ended), *going]
        # The warm-up is over. Its own paths below the bar are pruned as well and have no vote.
        if warming:
            bar = self._bar(tree)
            dropped = _nodes_below([*tree.finished(), *waiting], bar)
            ended = [node for node in ended if node not in dropped]
        actions: list[Action] = [*map(Prune, dropped), *map(FinishPath, ended)]
        if warming and self.num_first < self.search.n:
            return [*actions, Extend(tree.root, self.search.n - self.num_first)]
        ends = [_last_step(node) for node in tree.root.children]
        full = sum(end.ended and end.state is not NodeState.PRUNED for end in ends)
        fewer, n = len(ends) - full + sum(end.ended for end in dropped), self.search.n
        below = f"fell below the warm-up's bar of {bar:.4g} or " if math.isfinite(bar) else ""
        reason = f"{fewer} of {n} paths {below}reached --max-rounds" if fewer else None
        return [*actions, EndSearch(reason)]

    def _bar(self, tree: SearchTree) -> float:
        """Return the bar: the score that the share `keep` of the warm-up paths reaches.

        It is the quantile 1 - keep of their scores, interpolated; -inf if no path has a score.
        """
        scores = [_last_step(node).score for node in tree.root.children[: self.num_first]]
        known = sorted(score for score in scores if score is not None and not math.isnan(score))
        if not known:
            return -math.inf
        place = (1 - self.keep) * (len(known) - 1)
        low, high = known[math.floor(place)], known[min(math.floor(place) + 1, len(known) - 1)]
        return low + (place - math.floor(place)) * (high - low)


def _nodes_below(nodes: Iterable[Node], bar: float) -> list[Node]:
    """Return the nodes whose score is below `bar` by more than the tolerance TIE."""
    return [node for node in nodes if node.score is not None and node.score < bar - TIE]


def _last_step(node: Node) -> Node:
    """Return the last step of a path that never branches."""
    while node.children:
        (node,) = node.children
    return node
