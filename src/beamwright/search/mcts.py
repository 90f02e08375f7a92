"""Monte Carlo tree search (MCTS) over steps: PUCT picks the leaves that get children.

A simulation walks from the root to a leaf by PUCT and gives the leaf children. In each later round
the simulation extends the best of the newest children, until the path ends. There are no rollouts:
the value of a step is the score of its path, as in AlphaMath (Chen et al. 2024). Running
simulations, visits and values are read from the tree in each round, so a resumed search continues
in the same way. Several simulations run in parallel: a picked leaf counts as a visit at once,
before its value is known (unobserved samples, Liu et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean
from typing import Any

from beamwright.errors import InputError
from beamwright.protocols import Action, EndSearch, Extend, FinishPath, Prune
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.rounds import sort_by_rank
from beamwright.tree import Node, NodeState, SearchTree

_NODES_PER_CANDIDATE = 16
# Values are rounded to this many decimals, because their last bits must not decide which leaf is
# picked.
_DECIMALS = 6


@strategy(
    "mcts",
    meaning="tree search that picks leaves by score plus exploration bonus (PUCT)",
    commits=True,
    by_level=False,
    reads_width=True,
    needs_scores=True,
)
class MonteCarloTreeSearch(SearchPolicy):
    """Monte Carlo tree search with n first steps and `width` children per extended step.

    Up to max(1, n // width) simulations run in parallel. Leaves that are not picked remain
    candidates. A path is extended until it ends or has `max_rounds` steps. The search ends when n
    paths have ended, when `nodes` steps are generated, or when no leaf can be extended. If more
    paths end in the last round than places are left, the best-scored paths take the places.
    Duplicates are not filtered.

    Raises:
        InputError: if n < width, or if `nodes` < n.
    """

    exploration: float = option(
        1.0, ge=0, allow_inf_nan=False, help="Weight of the exploration bonus; 0 follows scores."
    )
    nodes: int | None = option(None, ge=1, help="Limit on generated steps (default: 16 n).")

    def model_post_init(self, context: Any) -> None:
        settings = self.search
        if settings.n < settings.width:
            raise InputError(
                f"--n {settings.n} is smaller than --width {settings.width}; raise --n or lower "
                "--width"
            )
        if self.most_nodes < settings.n:
            raise InputError(
                f"--nodes {self.nodes} is smaller than --n {settings.n}; raise --nodes or lower --n"
            )

    @property
    def most_nodes(self) -> int:
        """Maximum number of steps to generate."""
        return _NODES_PER_CANDIDATE * self.search.n if self.nodes is None else self.nodes

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        settings = self.search
        if tree.rounds == 0:
            return [Extend(tree.root, settings.n)]
        ended = sort_by_rank(node for node in tree.candidates() if node.ended)
        waiting = [node for node in tree.candidates() if not node.ended]
        places = settings.n - len(tree.finished())
        actions: list[Action] = [*map(FinishPath, ended[:places]), *map(Prune, ended[places:])]
        places -= len(ended)
        if places <= 0:
            return [*actions, *map(Prune, waiting), EndSearch()]
        open_to = [node for node in waiting if node.level < settings.max_rounds]
        if extended := self._extended(tree, open_to):
            return [*actions, *extended]
        reason = f"{places} of {settings.n} paths reached --max-rounds"
        if open_to:
            written = f"--nodes {self.most_nodes} was reached"
            reason = f"{places} of {settings.n} paths were unfinished when {written}"
        return [*actions, *map(Prune, sort_by_rank(waiting)[places:]), EndSearch(reason)]

    def _extended(self, tree: SearchTree, open_to: Sequence[Node]) -> list[Extend]:
        """Return the actions that extend leaves in this round.

        Running simulations come first, then new ones.

        open_to: the leaves that may still be extended.
        """
        width = self.search.width
        counts = Visits(tree, open_to, self.exploration)
        steps = [node for node in tree.nodes() if node.parent and not node.is_continuation]
        picked: list[Node] = []
        for parent in dict.fromkeys(node.parent for node in steps if node.round == tree.rounds):
            if parent is None or parent.parent is None:
                continue  # the root's children are not yet part of a simulation
            node = max(counts.children[parent], key=counts.puct, default=None)
            if node is not None and counts.leaves[node]:  # otherwise its simulation has ended
                counts.visit(node)
                picked.append(node)
        while counts.leaves[tree.root] and len(picked) < max(1, self.search.n // width):
            picked.append(counts.pick())
        left = self.most_nodes - len(steps)
        shares = ((node, min(width, left - place * width)) for place, node in enumerate(picked))
        return [Extend(node, share) for node, share in shares if share > 0]


class Visits:
    """Visits, values and priors of every step for PUCT, computed from the tree in each round.

    With `--verify-every`, a chain of steps that is scored only at its end counts as one step.

    visits: for each step, the number of extended steps in its subtree, itself included. Picking a
        leaf adds one visit to each step of the leaf's path.
    leaves: for each step, the number of leaves in its subtree that can still be picked.
    values: for an extended step, the mean over all extended steps of its subtree; each of them
        contributes the mean score of its children. For a leaf, its own score. Picking a leaf does
        not change the values. A step without a score gets the mean of all scores, or 0 if no step
        has one.
    priors: for each step, the softmax over its siblings of the mean log-probability of the tokens.
    children, parents: the tree without the steps inside unscored chains.
    """

    def __init__(self, tree: SearchTree, open_to: Iterable[Node], exploration: float) -> None:
        self.root, self._exploration = tree.root, exploration
        self.children: dict[Node, list[Node]] = {}
        self.parents: dict[Node, Node] = {}
        order, stack = [], [tree.root]
        while stack:  # parents first; a loop, because a deep tree would exceed the recursion limit
            node = stack.pop()
            order.append(node)
            ends = map(_chain_end, node.children)
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
        """Return the PUCT value of `node`: its value plus the exploration bonus."""
        spread = math.sqrt(self.visits[self.parents[node]]) / (1 + self.visits[node])
        bonus = self._exploration * self.priors[node] * spread
        return round(self.values[node] + bonus, _DECIMALS)

    def pick(self) -> Node:
        """Walk from the root to a leaf by PUCT, count the leaf as extended, and return it.

        The tree must contain a leaf that can be picked. Ties go to the lower lineage. Each leaf can
        be picked once.
        """
        node = self.root
        while self.children[node]:
            going = [child for child in self.children[node] if self.leaves[child]]
            node = max(going, key=self.puct)  # `max` returns the first of equal values
        self.visit(node)
        return node

    def visit(self, leaf: Node) -> None:
        """Count `leaf` as extended, so that it cannot be picked again."""
        above: Node | None = leaf
        while above is not None:
            self.visits[above] += 1
            self.leaves[above] -= 1
            above = self.parents.get(above)


def _chain_end(step: Node) -> Node:
    """Return the last step of the chain (`Visits`) that begins with `step`; only it is scored."""
    while step.children and step.children[0].is_continuation:
        step = step.children[0]
    return step


def _chain_logprobs(step: Node) -> list[float]:
    """Return the log-probabilities of all tokens of the chain that ends with `step`."""
    logprobs = [*step.logprobs]
    while step.is_continuation and step.parent is not None:
        step = step.parent
        logprobs += step.logprobs
    return logprobs


def _scores(steps: Sequence[Node]) -> dict[Node, float]:
    """Return the score of each step; a step without one gets the mean of the others, or 0."""
    known = {
        node: round(node.score, _DECIMALS)
        for node in steps
        if node.score is not None and math.isfinite(node.score)
    }
    neutral = fmean(known.values()) if known else 0.0
    return {node: known.get(node, neutral) for node in steps}


def _priors(siblings: Sequence[Node]) -> list[float]:
    """Return the PUCT priors of sibling steps: a softmax over their mean token log-probability.

    All priors are equal if any sibling has no log-probabilities.
    """
    logprobs = [_chain_logprobs(node) for node in siblings]
    if not all(logprobs):
        return [1 / len(siblings)] * len(siblings)
    means = [round(fmean(values), _DECIMALS) for values in logprobs]
    weights = [math.exp(mean - max(means)) for mean in means]
    return [weight / math.fsum(weights) for weight in weights]
