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
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

from beamwright.errors import InputError
from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.registry import option
from beamwright.search.declare import SearchPolicy, strategy
from beamwright.search.rounds import duplicates, ranked
from beamwright.tree import Node, NodeState, SearchTree

_NODES_PER_CANDIDATE = 16
_DECIMALS = 6  # values this close are equal


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
    best-scored take them. Duplicates are sought among siblings.

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
        dropped = _repeated_siblings(tree) if settings.filter_duplicates else {}
        leaves = [node for node in tree.candidates() if node not in dropped]
        ended = ranked(node for node in leaves if node.ended)
        places = settings.n - len(tree.finished())
        actions: list[Action] = [*map(Prune, dropped), *map(Complete, ended[:places])]
        actions += map(Prune, ended[places:])
        waiting = [node for node in leaves if not node.ended]
        places -= len(ended)
        if places <= 0:
            return [*actions, *map(Prune, waiting), Finish()]
        extended = self._extended(tree, waiting, dropped)
        if extended:
            return [*actions, *extended]
        surplus = ranked(waiting)[places:]
        return [*actions, *map(Prune, surplus), Finish(self._reason(tree, waiting, places))]

    def _extended(
        self, tree: SearchTree, waiting: Sequence[Node], dropped: Collection[Node]
    ) -> list[Extend]:
        """The steps that get children this round: simulations that go on, then fresh ones."""
        settings = self.search
        left = self.most_nodes - _num_written(tree)
        open_to = [node for node in waiting if node.depth < settings.max_rounds]
        counts = Visits(tree, open_to, dropped)
        picked: list[Node] = []
        for parent in _under_way(tree):
            node = counts.best_child(parent, self.exploration)
            if node is not None and counts.leaves[node]:  # else the simulation has come to its end
                counts.visit(node)
                picked.append(node)
        while counts.leaves[tree.root] and len(picked) < self._simulations:
            picked.append(counts.pick(self.exploration))
        found: list[Extend] = []
        for node in picked:
            if left > 0:
                found.append(Extend(node, min(settings.width, left)))
                left -= settings.width
        return found

    @property
    def _simulations(self) -> int:
        return max(1, self.search.n // self.search.width)

    def _reason(self, tree: SearchTree, waiting: Sequence[Node], missing: int) -> str:
        """Why so many paths are missing."""
        paths = f"{missing} of {self.search.n} paths"
        if any(node.depth < self.search.max_rounds for node in waiting):
            return f"{paths} were unfinished when --nodes {self.most_nodes} were written"
        return f"{paths} reached --max-rounds" if waiting else f"{paths} were duplicates"


class Visits:
    """What PUCT knows of every step, read from the tree.

    visits: steps of its subtree that were extended, itself included; picking a leaf adds one to
        each step of its path. leaves: how many of its subtree can still be picked.
    values: of a step that was extended, the mean over those visits of what they led to, the mean
        score of the new children; picking leaves it as it is. Of a leaf, its score.
        A step without a score counts with the mean of all scores, and 0 where there is none.
    priors: softmax over siblings of the mean log-probability of a step's tokens.
    """

    def __init__(
        self, tree: SearchTree, open_to: Iterable[Node], dropped: Collection[Node]
    ) -> None:
        self.root = tree.root
        self.children: dict[Node, list[Node]] = {}
        order: list[Node] = []
        stack = [tree.root]
        while stack:  # parents first; deep trees are legal, so this does not recurse
            node = stack.pop()
            order.append(node)
            self.children[node] = [
                child
                for child in node.children
                if child.state is not NodeState.PRUNED and child not in dropped
            ]
            stack += self.children[node]
        self._scores = _scores(order[1:])
        self.visits, self.leaves = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
        self.leaves.update(dict.fromkeys(open_to, 1))
        totals = dict.fromkeys(order, 0.0)
        for node in reversed(order):
            if self.children[node]:
                self.visits[node] += 1
                totals[node] += _mean(self._scores[child] for child in self.children[node])
            if node.parent is not None:
                totals[node.parent] += totals[node]
                self.visits[node.parent] += self.visits[node]
                self.leaves[node.parent] += self.leaves[node]
        self.values = {
            node: totals[node] / visits if visits else self._scores[node]
            for node, visits in self.visits.items()
        }
        self.priors: dict[Node, float] = {}
        for siblings in self.children.values():
            self.priors.update(zip(siblings, _priors(siblings), strict=True))

    def puct(self, node: Node, exploration: float) -> float:
        """Value plus exploration bonus of a node among its siblings."""
        assert node.parent is not None
        spread = math.sqrt(self.visits[node.parent]) / (1 + self.visits[node])
        bonus = exploration * self.priors[node] * spread
        return round(self.values[node] + bonus, _DECIMALS)

    def pick(self, exploration: float) -> Node:
        """Walk down to a leaf, and count it as extended; ties to the lower lineage.

        There has to be a leaf; it can be picked once.
        """
        node = self.root
        while self.children[node]:
            going = [child for child in self.children[node] if self.leaves[child]]
            node = max(going, key=lambda child: self.puct(child, exploration))  # first of equals
        self.visit(node)
        return node

    def best_child(self, node: Node, exploration: float) -> Node | None:
        """The child with the largest `puct`, the first of equals; None if all were dropped."""
        key = partial(self.puct, exploration=exploration)
        return max(self.children[node], key=key, default=None)

    def visit(self, leaf: Node) -> None:
        """Count a leaf as extended; it can be picked once."""
        for above in leaf.path():
            self.visits[above] += 1
            self.leaves[above] -= 1


def _under_way(tree: SearchTree) -> list[Node]:
    """Steps that a simulation extended in the last round, the root left out, in lineage order."""
    fresh = [node for node in tree.nodes() if node.round == tree.rounds and node.parent]
    return [node for node in dict.fromkeys(node.parent for node in fresh) if node and node.parent]


def _scores(steps: Sequence[Node]) -> dict[Node, float]:
    """Rounded: last bits must not decide which leaf is picked."""
    known = {
        node: round(node.score, _DECIMALS)
        for node in steps
        if node.score is not None and math.isfinite(node.score)
    }
    neutral = _mean(known.values()) if known else 0.0
    return {node: known.get(node, neutral) for node in steps}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _priors(siblings: Sequence[Node]) -> list[float]:
    """They add up to 1; all the same where a step has no log-probabilities."""
    if not all(node.logprobs for node in siblings):
        return [1 / len(siblings)] * len(siblings)
    means = [round(_mean(node.logprobs), _DECIMALS) for node in siblings]
    largest = max(means, default=0.0)
    weights = [math.exp(mean - largest) for mean in means]
    return [weight / math.fsum(weights) for weight in weights]


def _repeated_siblings(tree: SearchTree) -> dict[Node, None]:
    """Candidates with the text of an earlier child of the same node, in lineage order."""
    parents = dict.fromkeys(node.parent for node in tree.candidates() if node.parent is not None)
    found: list[Node] = []
    for parent in parents:
        found += duplicates(n for n in parent.children if n.state is not NodeState.PRUNED)
    return dict.fromkeys(found)


def _num_written(tree: SearchTree) -> int:
    return sum(node.parent is not None for node in tree.nodes())
