"""Scripted trees that reports are made of."""

import pytest

from beamwright.tree import StopReason
from fakes import add_step, grow, new_tree


@pytest.fixture
def searched():
    """A tree of two rounds with every state in it: (tree, the chosen node)."""
    tree = new_tree(num_prompt_tokens=5, text="What is 1+1?")
    first, second, third = grow(tree, tree.root, ["Add them. ", "Guess. ", "Wait. "])
    for node, score in ((first, 0.9), (second, 0.25), (third, None)):
        node.score = node.step_score = score
    tree.keep(first)
    tree.prune(second)
    tree.rounds = 1
    done, cut, _ = tree.expand(first, 3)
    add_step(tree, done, "The answer is 2.", (7, 8, 9), StopReason.EOS)
    add_step(tree, cut, "So ", (7, 8), StopReason.STEP_LIMIT)
    done.score, done.step_score, cut.score = 0.75, 0.5, float("-inf")
    tree.finish(done)
    tree.rounds = 2
    return tree, done
