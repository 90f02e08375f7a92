"""PUCT by hand, a slow oracle beside it, and what ends the search."""

import math
import random

import pytest

from beamwright.protocols import Extend, FinishPath
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import NodeState, StopReason
from fakes import add_step, new_tree
from played import actions_of, first_round, obey, play


def mcts(**settings):
    return make_strategy(SearchSettings(search="mcts", **settings))


def extended(actions):
    return [action.node for action in actions if isinstance(action, Extend)]


# --- a slow oracle ---------------------------------------------------------------------------


class Oracle:
    """PUCT written down as its definition, from the root at every question."""

    def __init__(self, tree, exploration, max_rounds):
        self.tree, self.exploration, self.max_rounds = tree, exploration, max_rounds
        self.picked = []

    def children(self, node):
        return [child for child in node.children if child.state is not NodeState.PRUNED]

    def subtree(self, node):
        yield node
        for child in self.children(node):
            yield from self.subtree(child)

    def score(self, node):
        known = [n.score for n in self.subtree(self.tree.root) if n.score is not None]
        return node.score if node.score is not None else (sum(known) / len(known) if known else 0)

    def visits(self, node):
        inside = list(self.subtree(node))
        return sum(bool(self.children(n)) for n in inside) + sum(n in inside for n in self.picked)

    def value(self, node):
        led_to = [
            sum(map(self.score, self.children(n))) / len(self.children(n))
            for n in self.subtree(node)
            if self.children(n)
        ]
        return sum(led_to) / len(led_to) if led_to else self.score(node)

    def prior(self, node):
        weights = [math.exp(sum(n.logprobs) / len(n.logprobs)) for n in self.children(node.parent)]
        return math.exp(sum(node.logprobs) / len(node.logprobs)) / sum(weights)

    def puct(self, node):
        spread = math.sqrt(self.visits(node.parent)) / (1 + self.visits(node))
        return self.value(node) + self.exploration * self.prior(node) * spread

    def pickable(self, node):
        return [
            n
            for n in self.subtree(node)
            if n.state is NodeState.CANDIDATE
            and not n.ended
            and n.depth < self.max_rounds
            and n not in self.picked
        ]

    def leaves(self, most):
        """Simulations under way go on from the best new child; others begin at the root."""
        parents = {n.parent for n in self.subtree(self.tree.root) if n.round == self.tree.rounds}
        for parent in sorted(parents - {self.tree.root, None}, key=lambda node: node.lineage[1:]):
            best = self.children(parent)[0]
            for child in self.children(parent):
                best = child if self.puct(child) > self.puct(best) + 1e-7 else best
            if best in self.pickable(parent):
                self.picked.append(best)
        while len(self.picked) < most and self.pickable(self.tree.root):
            self.pick(self.tree.root)
        return self.picked

    def pick(self, node):
        """The next leaf below `node`; it counts as visited from then on."""
        if not self.children(node):
            self.picked.append(node)
            return node
        best = None
        for child in self.children(node):
            if self.pickable(child) and (best is None or self.puct(child) > self.puct(best) + 1e-7):
                best = child
        return self.pick(best)


def test_the_same_leaves_as_the_oracle_picks():
    for seed in range(40):
        rng = random.Random(seed)
        exploration, max_rounds = rng.choice([0.0, 0.1, 0.7, 3.0]), rng.choice([4, 40])
        strategy = mcts(n=8, width=2, nodes=60, exploration=exploration, max_rounds=max_rounds)
        tree, rounds = new_tree(), 0
        while not tree.done:
            actions = actions_of(strategy, tree)
            oracle = Oracle(tree, exploration, max_rounds)
            if tree.rounds and (leaves := extended(actions)):
                assert leaves == oracle.leaves(4)[: len(leaves)]
                rounds += 1
            obey(tree, actions)
            for node in tree.open_nodes():
                stop = StopReason.EOS if rng.random() < 0.15 else StopReason.DELIMITER
                add_step(tree, node, f"{node.lineage[-1]}.", (7, 8), stop)
                node.score = rng.choice([None, round(rng.random(), 3), round(rng.random(), 3)])
                node.logprobs = (round(-rng.random(), 3),) * 2
            tree.rounds += 1
        assert rounds


# --- exploration -----------------------------------------------------------------------------


def test_ties_go_to_the_lower_lineage():
    tree, nodes = first_round([0.5] * 4)
    assert extended(actions_of(mcts(n=4, width=2), tree)) == [nodes[0], nodes[1]]
    nodes[0].score = 0.5 + 1e-8
    nodes[2].score = 0.5 - 1e-8
    assert extended(actions_of(mcts(n=4, width=2), tree)) == [nodes[0], nodes[1]]


# --- the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [8, 9, 21, 64])
def test_the_nodes_are_never_exceeded_and_all_of_them_are_used(nodes):
    def check(tree):
        assert sum(node.parent is not None for node in tree.nodes()) <= nodes
        assert len(tree.open_nodes()) <= 8

    for seed in range(12):
        tree, reason = play(mcts(n=8, width=3, nodes=nodes), seed, ends=0.1, check=check)
        missing = 8 - len(tree.finished())
        assert len(tree.candidates()) == missing
        assert all(not node.ended for node in tree.candidates())
        if missing == 0:
            assert reason is None
        else:
            assert (
                reason == f"{missing} of 8 paths were unfinished when --nodes {nodes} was reached"
            )
            assert sum(node.parent is not None for node in tree.nodes()) == nodes


def test_ended_paths_are_set_aside_at_once_and_the_others_wait():
    tree, nodes = first_round([0.1, 0.9, 0.2, 0.8], ended=[1])
    actions = actions_of(mcts(n=4, width=4), tree)
    assert actions == [FinishPath(nodes[1]), Extend(nodes[3], 4)]
    obey(tree, actions)
    assert [node.state for node in (nodes[0], nodes[2])] == [NodeState.CANDIDATE] * 2
    tree.pop_dead()
    assert {nodes[0], nodes[2], nodes[3], tree.root} <= tree.held
    assert nodes[1] not in tree.held
    assert tree.candidates() == [nodes[0], nodes[2]]


def test_a_path_of_max_rounds_steps_is_not_extended():
    tree, reason = play(mcts(n=4, width=2, max_rounds=3, nodes=500), 3, ends=0.05)
    assert max(node.depth for node in tree.nodes()) == 3
    assert reason == f"{4 - len(tree.finished())} of 4 paths reached --max-rounds"
    assert tree.rounds > 3, "the rounds of the search are not what is limited"
