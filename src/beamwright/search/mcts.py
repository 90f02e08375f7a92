"""Monte Carlo tree search over steps: PUCT picks the leaves that get children, a score is a value.

A simulation walks from the root by PUCT to a leaf and then goes on, a step a round, from the best
of the children that it has just got, until its path ends. No rollouts: a step is worth its path's
score, as in AlphaMath (Chen et al. 2024). Nothing is remembered between rounds; simulations under
way, visits and values are read from the tree, so a search that is resumed goes on alike. Several
simulations run side by side; each leaf is counted at once as a visit whose value is not known yet
(unobserved samples, Liu et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean
from typing import Any

from beamwright.errors import InputError
from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.rounds import ranked
from beamwright.tree import Node, NodeState, SearchTree

_NODES_PER_CANDIDATE = 16
_DECIMALS = 6  # values this close are equal: last bits must not decide which leaf is picked


@strategy(
    "mcts",
    meaning="tree search: score plus exploration bonus picks the leaves (PUCT)",
    commits=True,
    by_level=False,
    reads_width=True,
    needs_scores=True,
)
class MonteCarloTreeSearch(SearchPolicy):
    """n first steps; then max(1, n // width) simulations side by side, `width` children a step.

    Leaves that are not picked wait as candidates. A path goes on until it ends, or is `max_rounds`
    steps long. The search is over when n paths have ended, when `nodes` steps are written, or when
    no leaf can be extended; if more paths end in the last round than there are places, the
    best-scored take them. Duplicates are not sought.

    Raises:
        InputError: if n < width, or the nodes are fewer than n.
    """

    exploration: float = option(
        1.0, ge=0, allow_inf_nan=False, help="Weight of the exploration bonus; 0 follows scores."
    )
    nodes: int | None = option(None, ge=1, help="Most steps that are written (default: 16 n).")

    def model_post_init(self, context: Any) -> None:
        settings = self.search
        if settings.n < settings.width:
            raise InputError(f"--n {settings.n} is smaller than --width {settings.width}")
        if self.most_nodes < settings.n:
            raise InputError(f"--nodes {self.nodes} is smaller than --n {settings.n}")

    @property
    def most_nodes(self) -> int:
        """The most steps that are written."""
        return _NODES_PER_CANDIDATE * self.search.n if self.nodes is None else self.nodes

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        settings = self.search
        if tree.rounds == 0:
            return [Extend(tree.root, settings.n)]
        ended = ranked(node for node in tree.candidates() if node.ended)
        waiting = [node for node in tree.candidates() if not node.ended]
        places = settings.n - len(tree.finished())
        actions: list[Action] = [*map(Complete, ended[:places]), *map(Prune, ended[places:])]
        places -= len(ended)
        if places <= 0:
            return [*actions, *map(Prune, waiting), Finish()]
        open_to = [node for node in waiting if node.level < settings.max_rounds]
        if extended := self._extended(tree, open_to):
            return [*actions, *extended]
        reason = f"{places} of {settings.n} paths reached --max-rounds"
        if open_to:
            written = f"--nodes {self.most_nodes} were written"
            reason = f"{places} of {settings.n} paths were unfinished when {written}"
        return [*actions, *map(Prune, ranked(waiting)[places:]), Finish(reason)]

    def _extended(self, tree: SearchTree, open_to: Sequence[Node]) -> list[Extend]:
        """The steps that get children this round: simulations that go on, then fresh ones."""
        width = self.search.width
        counts = Visits(tree, open_to, self.exploration)
        steps = [node for node in tree.nodes() if node.parent and not node.goes_on]
        picked: list[Node] = []
        for parent in dict.fromkeys(node.parent for node in steps if node.round == tree.rounds):
            if parent is None or parent.parent is None:
                continue  # the root's children belong to no simulation yet
            node = max(counts.children[parent], key=counts.puct, default=None)
            if node is not None and counts.leaves[node]:  # else the simulation has come to its end
                counts.visit(node)
                picked.append(node)
        while counts.leaves[tree.root] and len(picked) < max(1, self.search.n // width):
            picked.append(counts.pick())
        left = self.most_nodes - len(steps)
        shares = ((node, min(width, left - place * width)) for place, node in enumerate(picked))
        return [Extend(node, share) for node, share in shares if share > 0]


class Visits:
    """What PUCT knows of every step, read from the tree. Steps that nobody judged are one with the
    step that they went on to.

    visits: steps of its subtree that were extended, itself included; picking a leaf adds one to
        each step of its path. leaves: how many of its subtree can still be picked.
    values: of a step that was extended, the mean over those visits of what they led to, the mean
        score of the new children; picking leaves it as it is. Of a leaf, its score.
        A step without a score counts with the mean of all scores, and 0 where there is none.
    priors: softmax over siblings of the mean log-probability of a step's tokens.
    children, parents: who they are where unjudged steps are left out.
    """

    def __init__(self, tree: SearchTree, open_to: Iterable[Node], exploration: float) -> None:
        self.root, self._exploration = tree.root, exploration
        self.children: dict[Node, list[Node]] = {}
        self.parents: dict[Node, Node] = {}
        order, stack = [], [tree.root]
        while stack:  # parents first; deep trees are legal, so this does not recurse
            node = stack.pop()
            order.append(node)
            ends = map(_gone_on, node.children)
            children = [child for child in ends if child.state is not NodeState.PRUNED]
            self.children[node] = children
            self.parents.update(dict.fromkeys(children, node))
            stack += children
        scores = _scores(order[1:])
        self.visits, self.leaves = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
        self.leaves.update(dict.fromkeys(open_to, 1))
        totals = dict.fromkeys(order, 0.0)
        self.values: dict[Node, float] = {}
        self.priors: dict[Node, float] = {}
        for node in reversed(order):
            children = self.children[node]
            if children:
                self.visits[node] += 1
                totals[node] += fmean(scores[child] for child in children)
                self.priors.update(zip(children, _priors(children), strict=True))
            visits = self.visits[node]
            self.values[node] = totals[node] / visits if visits else scores.get(node, 0.0)
            if (parent := self.parents.get(node)) is not None:
                totals[parent] += totals[node]
                self.visits[parent] += visits
                self.leaves[parent] += self.leaves[node]

    def puct(self, node: Node) -> float:
        """Value plus exploration bonus of a node among its siblings."""
        spread = math.sqrt(self.visits[self.parents[node]]) / (1 + self.visits[node])
        bonus = self._exploration * self.priors[node] * spread
        return round(self.values[node] + bonus, _DECIMALS)

    def pick(self) -> Node:
        """Walk down to a leaf, and count it as extended; ties to the lower lineage.

        There has to be a leaf; it can be picked once.
        """
        node = self.root
        while self.children[node]:
            going = [child for child in self.children[node] if self.leaves[child]]
            node = max(going, key=self.puct)  # the first of equals
        self.visit(node)
        return node

    def visit(self, leaf: Node) -> None:
        """Count a leaf as extended; it can be picked once."""
        above: Node | None = leaf
        while above is not None:
            self.visits[above] += 1
            self.leaves[above] -= 1
            above = self.parents.get(above)


def _gone_on(step: Node) -> Node:
    """The step that the strategy has judged, or will, in the place of one that nobody did."""
    while step.children and step.children[0].goes_on:
        step = step.children[0]
    return step


def _drawn(step: Node) -> list[float]:
    """Log-probabilities of its tokens, those of unjudged steps before it included."""
    drawn = [*step.logprobs]
    while step.goes_on and step.parent is not None:
        step = step.parent
        drawn += step.logprobs
    return drawn


def _scores(steps: Sequence[Node]) -> dict[Node, float]:
    known = {
        node: round(node.score, _DECIMALS)
        for node in steps
        if node.score is not None and math.isfinite(node.score)
    }
    neutral = fmean(known.values()) if known else 0.0
    return {node: known.get(node, neutral) for node in steps}


def _priors(siblings: Sequence[Node]) -> list[float]:
    """They add up to 1; all the same where a step has no log-probabilities."""
    drawn = [_drawn(node) for node in siblings]
    if not all(drawn):
        return [1 / len(siblings)] * len(siblings)
    means = [round(fmean(logprobs), _DECIMALS) for logprobs in drawn]
    weights = [math.exp(mean - max(means)) for mean in means]
    return [weight / math.fsum(weights) for weight in weights]
